"""The paper's figures for a run of ours, each with a sentence on how ours compares.

The sentences are made of the numbers: what the paper says is quoted, what is found here is counted.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from residual_ebm.report.figures import run_figures
from residual_ebm.report.rows import base_perplexity, best_row
from residual_ebm.report.run_figure import RunFigure

_POSITIONS = 10  # at either end of a continuation
_DIFFERENCES = {"base": 21.64, "joint": 6.20}  # of means, in nats: the paper's section 4.3


_PAIRS = (("joint", "base"), ("real", "joint"))


class PaperFigure(NamedTuple):
    of_paper: str
    figure: RunFigure
    comparison: str


def paper_figures(results: dict[str, Any], analysis: dict[str, Any] | None) -> list[PaperFigure]:
    """In the paper's order; those that the run has no numbers for are left out."""
    row = best_row(results)
    if analysis is None or row is None:
        return []
    figures = {figure.name: figure for figure in run_figures(results, analysis)}
    if analysis.get("calibration"):
        # A toy on which the truth is known has nothing to compare with the paper.
        rows = analysis["calibration"]["rows"]
        said = {"coverage": _coverage(rows), "bias": _bias(rows), "warnings-k-hat": _warned(rows)}
        return [PaperFigure("Not in the paper", figures[name], said[name]) for name in said]
    entry = analysis["energies"][row["energy"]]
    compared = {
        "per-step": ("Figure 1", lambda: _per_step(analysis["per_step"]["positions"])),
        "bounds": (
            "Figure 2, left",
            lambda: _bounds(entry["bounds"], base_perplexity(results, row)),
        ),
        "repetition-within": (
            "Figure 2, right",
            lambda: _repetition(entry["repetition"], "within"),
        ),
        "repetition-among": (
            "Figure 2, right",
            lambda: _repetition(entry["repetition"], "among"),
        ),
        "density-base": ("Figure 3, left", lambda: _density(entry["density"], "base")),
        "density-joint": ("Figure 3, right", lambda: _density(entry["density"], "joint")),
    }
    return [
        PaperFigure(of_paper, figures[name], compare())
        for name, (of_paper, compare) in compared.items()
        if name in figures
    ]


def _coverage(rows: Sequence[dict[str, Any]]) -> str:
    worst = min(rows, key=lambda row: float(row["covered"]))
    known = sum(row["covered_with_known_partition"] for row in rows) / len(rows)
    return (
        f"With log Z known {known:.0%} of the intervals hold the truth; of published ones at least"
        f" {worst['covered']:.0%} (energy x {worst['scale']:g}, n = {worst['num_samples']})."
    )


def _bias(rows: Sequence[dict[str, Any]]) -> str:
    least = min(rows, key=lambda row: float(row["upper_bias"]))
    return (
        f"The upper bound is furthest below the truth, by {-least['upper_bias']:.1%}, at energy x"
        f" {least['scale']:g} and n = {least['num_samples']}; the lower one is"
        f" {-least['lower_bias']:.1%} below it there."
    )


def _warned(rows: Sequence[dict[str, Any]]) -> str:
    heavy = [row for row in rows if row["share_past_pareto_k"] > 0.5]
    least = min(
        (row["warnings"]["heavy weights"]["when_missed"] or 0.0 for row in heavy), default=0
    )
    return (
        f"Where k-hat is past its threshold for most prefixes ({len(heavy)} of {len(rows)}"
        f" settings), at least {least:.0%} of the misses are flagged by it; elsewhere intervals"
        " miss as often as with log Z known."
    )


def _per_step(rows: Sequence[dict[str, Any]]) -> str:
    first, last = (
        sum(1 - row["upper"] / row["base"] for row in part) / len(part)
        for part in (rows[:_POSITIONS], rows[-_POSITIONS:])
    )
    return (
        "In the paper the gain shrinks from left to right, as less is left to be generated. Here it"
        f" is {first:.1%} on average over the first {len(rows[:_POSITIONS])} positions and"
        f" {last:.1%} over the last {len(rows[-_POSITIONS:])}, by the upper perplexity."
    )


def _bounds(rows: Sequence[dict[str, Any]], base: float) -> str:
    paper = "In the paper the upper estimate is very stable beyond 20,000 samples."
    if len(rows) < 2:
        return f"{paper} Here there are too few samples to say."
    half, whole = rows[-2], rows[-1]
    moved, gain = whole["upper"] - half["upper"], base - whole["upper"]
    share = f", {abs(moved) / gain:.1%} of the gain" if gain > 0 else ""
    return (
        f"{paper} Here it moves by {moved:+.4f} from n = {half['num_samples']} to"
        f" n = {whole['num_samples']}{share}."
    )


def _repetition(rows: Sequence[dict[str, Any]], kind: str) -> str:
    found = ", ".join(
        f"n = {row['order']}: base {row['base'][kind]:.1%}, joint {row['joint'][kind]:.1%}, real"
        f" {row['real'][kind]:.1%}"
        for row in rows
    )
    paper = (
        "In the paper joint samples have slightly more unique n-grams than base samples, and fewer"
        f" than real text. Here {found}."
    )
    if kind == "among":
        return paper
    certain = [_certain(row, *pair) for pair in _PAIRS for row in rows]
    return f"{paper} Certain, over documents: {'; '.join(filter(None, certain)) or 'nothing'}."


def _certain(row: dict[str, Any], one: str, other: str) -> str:
    """What the 95 % interval of a difference says; nothing where it holds 0."""
    interval = row["differences"][f"{one}-{other}"]
    if interval["low"] is None or interval["low"] <= 0 <= interval["high"]:
        return ""
    relation = "more" if interval["low"] > 0 else "fewer"
    return f"{one} has {relation} than {other} for n = {row['order']}"


def _density(found: dict[str, Any], model: str) -> str:
    own = {"base": "the base language model", "joint": "the joint model"}[model]
    low, high = (found[model]["interval"][side] for side in ("low", "high"))
    shown = "" if low is None else f" (95 % of the difference {low:+.2f} to {high:+.2f})"
    return (
        f"In the paper the means differ by {_DIFFERENCES[model]:.2f} nats under {own}; here by"
        f" {abs(found[model]['difference']):.2f}{shown}."
    )
