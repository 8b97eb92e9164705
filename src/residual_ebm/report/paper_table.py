"""The order of the rows in the paper's Table 1, and whether a run of ours has the same one.

Rows are known by what they are, not by their names: RALM is a residual of the base language model,
BALM larger ones beside it, BiT* a bidirectional energy that was trained elsewhere first.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from residual_ebm.report.rows import (
    best_row,
    bounds_text,
    count_text,
    flagged_models,
    number_text,
    signed_text,
)

HEADINGS = ("the paper", "there", "here (parameters)", "difference, 95 %", "")

# Test perplexities on CC-News with 12 and with 24 layers, from the highest to the lowest.
_PAPER = {
    "base": ("17.57", "14.89"),
    "RALM": ("16.17", "14.89"),
    "BALM": ("15.74", "13.92"),
    "UniT": ("15.57-15.58", "13.81-13.82"),
    "BiT": ("14.61-14.64", "13.01-13.03"),
    "BiT*": ("14.37-14.42", "12.93-12.95"),
}
_SUM = "a sum of energies"  # not in the paper
_EQUAL = 0.03  # parameters that differ by less are as many


class _Row(NamedTuple):
    name: str
    perplexity: str
    parameters: int

    @property
    def shown(self) -> str:
        return f"{self.name} {self.perplexity} ({count_text(self.parameters)})"


def order_of_rows(results: dict[str, Any]) -> list[Sequence[str]]:
    """A line for each pair of the paper's rows that this run has, the lower one first."""
    roles = _roles(results)
    comparisons = {
        (found["model"], found["other"]): found for found in results.get("comparisons", [])
    }
    flagged = flagged_models(results)
    lines: list[Sequence[str]] = []
    for higher, lower in itertools.combinations((*_PAPER, _SUM), 2):
        for one, other in itertools.product(roles.get(lower, []), roles.get(higher, [])):
            interval = _difference(comparisons, one.name, other.name)
            if interval is None:
                continue
            resampled = comparisons.get((one.name, other.name), {}).get("resampled_difference")
            said = _agreement(interval, bool(flagged & {one.name, other.name}), resampled)
            if "BALM" in (higher, lower):
                said += _sizes(one, other)
            here = f"{one.shown}, {other.shown}"
            lines.append(
                (
                    f"{lower} below {higher}",
                    _there(lower, higher),
                    here,
                    signed_text(interval),
                    said,
                )
            )
    return lines


def _there(lower: str, higher: str) -> str:
    if lower not in _PAPER:
        return ""
    pairs = zip(_PAPER[lower], _PAPER[higher], strict=True)
    return "; ".join(f"{low} and {high}" for low, high in pairs)


def _sizes(one: _Row, other: _Row) -> str:
    """BALM is to show what as many parameters do in one model: whether these are as many."""
    ratio = one.parameters / other.parameters
    if abs(ratio - 1) <= _EQUAL:
        return "; as many parameters"
    return f"; {ratio:.1f} times the parameters"


def _difference(
    comparisons: dict[tuple[str, str], dict[str, Any]], one: str, other: str
) -> dict[str, float | None] | None:
    if (one, other) in comparisons:
        interval: dict[str, float | None] = comparisons[one, other]["difference"]
        return interval
    if (other, one) not in comparisons:
        return None
    turned = comparisons[other, one]["difference"]
    low, high = turned["low"], turned["high"]
    return {"low": None if high is None else -high, "high": None if low is None else -low}


def _agreement(
    interval: dict[str, float | None],
    is_flagged: bool,
    resampled: dict[str, float | None] | None,
) -> str:
    low, high = interval["low"], interval["high"]
    if is_flagged and resampled is not None and (resampled["high"] or 0.0) < 0:
        # Of what resampling writes no flag has to be believed.
        return f"so here, by what it resamples ({signed_text(resampled)})"
    if low is None or high is None or low <= 0 <= high:
        return "undecided"
    found = "so here" if high < 0 else "the other way round"
    return f"{found}, if the flagged estimate holds" if is_flagged else found


def _roles(results: dict[str, Any]) -> dict[str, list[_Row]]:
    best = best_row(results)
    if best is None:
        return {}
    recipe = results["resolved_recipe"]
    base = next(row for row in results["language_models"] if row["name"] == best["language_model"])
    roles: dict[str, list[_Row]] = {}
    configs = {entry["name"]: entry for entry in recipe["language_models"]}
    for row in results["language_models"]:
        residual_of = configs[row["name"]].get("residual_of")
        role = None
        if row is base:
            role = "base"
        elif residual_of is not None:
            role = "RALM" if residual_of == base["name"] else None
        elif row["parameters"] > base["parameters"]:
            role = "BALM"
        if role is not None:
            perplexity = number_text(row["test"]["value"])
            roles.setdefault(role, []).append(_Row(row["name"], perplexity, row["parameters"]))
    energies = {entry["name"]: entry for entry in recipe["energies"]}
    for row in results["joint_models"]:
        if not row["scaled"] and row["language_model"] == base["name"]:
            config = energies.get(row["energy"], {"kind": "sum"})
            role = {"unit": "UniT", "bit": "BiT", "sum": _SUM}.get(config["kind"])
            if role == "BiT" and str(config["source"]).partition(":")[0] != "encoder":
                role = "BiT*"
            if role is not None:
                perplexity = bounds_text(row["test"])
                roles.setdefault(role, []).append(_Row(row["name"], perplexity, row["parameters"]))
    return roles
