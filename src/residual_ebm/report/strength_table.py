"""What energies find on weaker and stronger language models: the paper's limitations, counted.

Gains are of what is resampled, which can be quoted whatever the flags.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from residual_ebm.report.rows import (
    base_perplexity,
    count_text,
    effective_text,
    items_seen,
    marked_name,
    number_text,
    signed_text,
)

HEADINGS = (
    "language model",
    "tokens read",
    "its perplexity",
    "",
    "NCE accuracy",
    "resampled",
    "nats a passage",
    "95 %",
    "demoting alone",
    "promoting alone",
    "ESS",
    "text outweighs all",
)


class Strength(NamedTuple):
    rows: list[Sequence[str]]  # from the weakest language model to the strongest
    text: str


def strength(results: dict[str, Any], analysis: dict[str, Any] | None) -> Strength | None:
    """A line for each energy; None where all of them correct the same language model."""
    rows = _by_strength(results)
    if not rows:
        return None
    analysed = (analysis or {}).get("energies", {})
    lines = [_line(results, row, analysed.get(row["energy"], {})) for row in rows]
    most = math.log(results["num_samples"] + 1)
    text = (
        "The paper expects that on a poor language model an energy has an easy task and search is"
        " inefficient, since the text is hardly within reach. NCE accuracy: on validation."
        " Resampled, and nats a passage by it: what an energy gains at"
        f" n = {results['num_samples']}, at least; it cannot be more than log(n + 1) = {most:.2f}."
        " Demoting, promoting alone: the same with weights above, below their mean set to it. Text"
        " outweighs all: for so many prefixes the real continuation has a larger weight than every"
        f" proposal. {_ends(rows)}"
    )
    return Strength(lines, text)


def _line(results: dict[str, Any], row: dict[str, Any], analysed: dict[str, Any]) -> Sequence[str]:
    recipe, name, test = results["resolved_recipe"], row["language_model"], row["test"]
    model = next(one for one in results["language_models"] if one["name"] == name)
    config = next(one for one in recipe["language_models"] if one["name"] == name)
    seen = items_seen(model, config) * recipe["block"]["length"]
    base = base_perplexity(results, row)
    accuracy = _accuracy(row)
    gains = analysed.get("weights", {}).get("gains", {})
    return (
        name,
        count_text(seen) if seen else "",
        number_text(base),
        marked_name(row),
        "" if accuracy is None else f"{accuracy:.1%}",
        f"{number_text(test['resampled'])} ({1 - test['resampled'] / base:.1%})",
        f"{test['gap']:+.2f}",
        signed_text(test["gap_interval"]),
        f"{gains['demoting']:+.2f}" if gains else "",
        f"{gains['promoting']:+.2f}" if gains else "",
        effective_text(test),
        f"{test['share_outweighed']:.0%}",
    )


def _by_strength(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Energies that were trained, not sums or scaled ones."""
    energies = {entry["name"] for entry in results["resolved_recipe"]["energies"]}
    rows = [
        row
        for row in results["joint_models"]
        if not row["scaled"] and row["energy"] in energies and "resampled" in row["test"]
    ]
    if len({row["language_model"] for row in rows}) < 2:
        return []
    return sorted(rows, key=lambda row: -base_perplexity(results, row))


def _accuracy(row: dict[str, Any]) -> float | None:
    """None for an energy of before this was kept."""
    detection = row["training"].get("detection")
    return float(detection["validation"]["accuracy"]) if detection else None


def _ends(rows: Sequence[dict[str, Any]]) -> str:
    """The gain on the weakest beside that on the strongest; certain where intervals lie apart."""
    weak, strong = (row["test"] for row in (rows[0], rows[-1]))
    weakest, strongest = (test["gap_interval"] for test in (weak, strong))
    relation = "whether it is larger on the one or the other is undecided"
    if None not in (*weakest.values(), *strongest.values()):
        if weakest["low"] > strongest["high"]:
            relation = "it is larger on the weaker one, their intervals lie apart"
        elif weakest["high"] < strongest["low"]:
            relation = "it is larger on the stronger one, their intervals lie apart"
    return (
        f"The gain is {weak['gap']:+.2f} nats on the weakest and {strong['gap']:+.2f} on the"
        f" strongest; {relation}."
    )
