"""What energies find on weaker and stronger language models: the paper's limitations, counted.

Gains are of what is resampled, which can be quoted whatever the flags.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from residual_ebm.report.rows import (
    base_perplexity,
    count_text,
    effective_text,
    gap_interval_text,
    items_seen,
    number_text,
    share_interval_text,
)

HEADINGS = (
    "language model",
    "tokens read",
    "test",
    "energy",
    "NCE accuracy",
    "resampled",
    "gain",
    "nats a passage, at least",
    "ESS",
    "promoted",
)


def strength_rows(results: dict[str, Any], analysis: dict[str, Any] | None) -> list[Sequence[str]]:
    """A line for each energy, from the weakest language model to the strongest; none where all
    energies correct the same one."""
    rows = _by_strength(results)
    recipe = results["resolved_recipe"]
    models = {row["name"]: row for row in results["language_models"]}
    configs = {entry["name"]: entry for entry in recipe["language_models"]}
    lines: list[Sequence[str]] = []
    for row in rows:
        name, test = row["language_model"], row["test"]
        base = base_perplexity(results, row)
        seen = items_seen(models[name], configs[name]) * recipe["block"]["length"]
        weights = (analysis or {}).get("energies", {}).get(row["energy"], {}).get("weights", {})
        lines.append(
            (
                name,
                count_text(seen) if seen else "",
                number_text(base),
                row["energy"],
                f"{_accuracy(row):.1%}",
                number_text(test["resampled"]),
                f"{1 - test['resampled'] / base:.1%}",
                gap_interval_text(test),
                effective_text(test),
                share_interval_text(weights) if "promoted" in weights else "",
            )
        )
    return lines


def strength_text(results: dict[str, Any]) -> str:
    """What the paper expects of weak language models, and what was found."""
    rows = _by_strength(results)
    accuracy = _trend([_accuracy(row) for row in rows])
    effective = _trend([float(row["test"]["median_effective_sample_size"]) for row in rows])
    gain = _trend([float(row["test"]["gap"]) for row in rows])
    return (
        "The paper expects that on a poor language model the energy has an easy task and resampling"
        " is inefficient. From the weakest to the strongest here: NCE accuracy on validation"
        f" {accuracy}, the effective sample size {effective}, the gain in nats {gain}. Promoted:"
        " the share of proposals that weigh more than the average, 95 % over documents; above 50 %"
        " where an energy mostly demotes the worst, as the paper supposes, below where it promotes"
        " a few."
    )


def _by_strength(results: dict[str, Any]) -> list[dict[str, Any]]:
    energies = {entry["name"] for entry in results["resolved_recipe"]["energies"]}
    rows = [
        row
        for row in results["joint_models"]
        if not row["scaled"] and row["energy"] in energies and "resampled" in row["test"]
    ]
    if len({row["language_model"] for row in rows}) < 2:
        return []
    return sorted(rows, key=lambda row: -base_perplexity(results, row))


def _accuracy(row: dict[str, Any]) -> float:
    return float(row["training"]["detection"]["validation"]["accuracy"])


def _trend(values: Sequence[float]) -> str:
    steps = [later - earlier for earlier, later in itertools.pairwise(values)]
    if all(step < 0 for step in steps):
        return "falls throughout"
    return "rises throughout" if all(step > 0 for step in steps) else "goes both ways"
