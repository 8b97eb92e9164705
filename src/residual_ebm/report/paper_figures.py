"""The paper's figures for a run of ours, each with a sentence on how ours compares.

The sentences are made of the numbers: what the paper says is quoted, what is found here is counted.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from residual_ebm.report.figures import run_figures
from residual_ebm.report.rows import base_perplexity, best_row
from residual_ebm.report.run_figure import RunFigure

_OFF = 0.02  # of the true perplexity: more than this is not right any more
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
        said = {
            "coverage": _coverage(rows),
            "bias": _bias(rows),
            "between": _between(rows),
            "warnings": _warned(rows),
        }
        for name, claim in (
            ("claims-difference", "covered_difference"),
            ("claims-gap", "gap_holds"),
        ):
            if name in figures:
                said[name] = _claims(rows, claim)
        return [PaperFigure("Not in the paper", figures[name], said[name]) for name in said]
    entry = analysis["energies"][row["energy"]]
    compared = {
        "per-step": ("Figure 1", lambda: _per_step(analysis["per_step"])),
        "bounds": (
            "Figure 2, left",
            lambda: _bounds(results, analysis["energies"]),
        ),
        "bounds-deep": ("Figure 2, left, further", lambda: _deep(analysis["energies"])),
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
        "reweighting": ("Limitations", lambda: _reweighting(analysis["energies"])),
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


def _claims(rows: Sequence[dict[str, Any]], claim: str) -> str:
    """Apart where flags warn: there nobody should believe it anyway."""
    said = []
    for is_flagged, where in ((False, "no flag was"), (True, "a flag was")):
        shares = [
            row[claim] for row in rows if (row["warnings"]["any"]["overall"] > 0.5) == is_flagged
        ]
        if shares:
            said.append(
                f"between {min(shares):.0%} and {max(shares):.0%} in the {len(shares)} settings"
                f" where {where} raised as a rule"
            )
    return f"Here {'; '.join(said)}."


def _bias(rows: Sequence[dict[str, Any]]) -> str:
    ends = {}
    for side, pick in (("lower", min), ("upper", min), ("highest upper", max)):
        key = f"{side.rpartition(' ')[2]}_bias"
        row = pick(rows, key=lambda row: float(row[key]))
        ends[side] = (
            f"{math.expm1(row[key]):+.1%} (energy x {row['scale']:g}, n = {row['num_samples']})"
        )
    return (
        f"At its worst the lower bound is off by {ends['lower']}; the upper one by {ends['upper']}"
        f" on one side and {ends['highest upper']} on the other."
    )


def _between(rows: Sequence[dict[str, Any]]) -> str:
    shares = [row["between_bounds"] for row in rows]
    return f"Here it is between {min(shares):.0%} and {max(shares):.0%}."


def _warned(rows: Sequence[dict[str, Any]]) -> str:
    """What flags are for: are settings flagged whose bounds are off, and others not?"""
    off = {
        True: [row for row in rows if _is_off(row)],
        False: [row for row in rows if not _is_off(row)],
    }
    said = []
    for is_off, words in ((True, f"more than {_OFF:.0%}"), (False, "less")):
        shares = [row["warnings"]["any"]["overall"] for row in off[is_off]]
        if shares:
            said.append(
                f"in the {len(shares)} settings where a bound is off by {words}, between"
                f" {min(shares):.0%} and {max(shares):.0%} of the estimates are flagged"
            )
    found = "; ".join(said)
    return f"{found[0].upper()}{found[1:]}."


def _is_off(row: dict[str, Any]) -> bool:
    return any(abs(math.expm1(row[key])) > _OFF for key in ("lower_bias", "upper_bias"))


def _per_step(steps: dict[str, Any]) -> str:
    rows = steps["positions"]
    first, last = (
        sum(1 - row["upper"] / row["base"] for row in part) / len(part)
        for part in (rows[:_POSITIONS], rows[-_POSITIONS:])
    )
    return (
        "In the paper the gain shrinks from left to right, as less is left to be generated. Here it"
        f" is {first:.1%} on average over the first {len(rows[:_POSITIONS])} positions and"
        f" {last:.1%} over the last {len(rows[-_POSITIONS:])}, by the upper perplexity;"
        f" {_shrinks(steps.get('trend'))}."
    )


def _shrinks(trend: dict[str, Any] | None) -> str:
    """What the interval of the difference between both ends says."""
    if trend is None or trend["interval"]["low"] is None:
        return "whether that is more than chance was not counted"
    low, high = trend["interval"]["low"], trend["interval"]["high"]
    found = "it shrinks, as in the paper" if low > 0 else "it grows, unlike in the paper"
    if low <= 0 <= high:
        found = "whether it shrinks is undecided"
    return (
        f"the difference is {trend['difference']:+.3f} nats a token (95 % over the documents of"
        f" {trend['num_prefixes']} prefixes {low:+.3f} to {high:+.3f}), so {found}"
    )


def _bounds(results: dict[str, Any], energies: dict[str, dict[str, Any]]) -> str:
    """How far at least twice the samples move each energy's estimates, beside its gain."""
    paper = "In the paper the upper estimate is very stable beyond 20,000 samples."
    rows = next(iter(energies.values()))["bounds"]
    if len(rows) < 2 or 2 * rows[0]["num_samples"] > rows[-1]["num_samples"]:
        return f"{paper} Here there are too few samples to say."
    said = []
    for row in results["joint_models"]:
        if row["scaled"] or row["energy"] not in energies:
            continue
        half, whole = _halves(energies[row["energy"]]["bounds"])
        moves = (
            f"{words} {_moved(half[key], whole[key], base_perplexity(results, row))}"
            for key, words in (("upper", "upper"), ("resampled", "resampled"))
            if key in whole  # older analyses have no resampled one
        )
        said.append(f"{row['energy']} {', '.join(moves)}")
    half, whole = _halves(rows)
    return (
        f"{paper} Here n = {whole['num_samples']} instead of {half['num_samples']} moves the"
        f" estimates by: {'; '.join(said)}."
    )


def _halves(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Subsets of up to half the samples are disjoint; of more they would share samples."""
    whole = rows[-1]
    return [row for row in rows if row["num_samples"] <= whole["num_samples"] // 2][-1], whole


def _moved(half: float, whole: float, base: float) -> str:
    gain = base - whole
    share = f" ({abs(whole - half) / gain:.1%} of the gain)" if gain > 0 else ""
    return f"{whole - half:+.4f}{share}"


def _deep(energies: dict[str, dict[str, Any]]) -> str:
    """How far below the language model every energy ends, by each bound."""
    said = []
    for name, entry in energies.items():
        base, last = entry["deep"]["base"], entry["deep"]["bounds"][-1]
        gains = ", ".join(
            f"{words} {1 - last[key] / base:.1%}"
            for key, words in (
                ("lower", "lower"),
                ("upper", "upper perplexity"),
                ("resampled", "resampled"),
            )
            if key in last
        )
        said.append(f"joint {name} {gains}")
    return f"With all of them, below its language model: {'; '.join(said)}."


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
    return (
        f"{paper} Certain, over documents: {'; '.join(filter(None, certain)) or 'nothing'}. So"
        f" {_orders(rows)}."
    )


def _orders(rows: Sequence[dict[str, Any]]) -> str:
    """How the paper's order, base below joint below real, fares where intervals exclude 0."""
    intervals = [row["differences"][f"{one}-{other}"] for row in rows for one, other in _PAIRS]
    known = [one for one in intervals if one["low"] is not None]
    same = sum(one["low"] > 0 for one in known)
    other = sum(one["high"] < 0 for one in known)
    return (
        f"of the paper's {len(intervals)} orderings {same} hold here, {other} are the other way"
        f" round, {len(intervals) - same - other} undecided"
    )


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
    likelier = "more" if found[model]["difference"] > 0 else "less"
    shown = "" if low is None else f" (95 % of the difference {low:+.2f} to {high:+.2f})"
    return (
        f"In the paper the means differ by {_DIFFERENCES[model]:.2f} nats under {own}; here samples"
        f" are {abs(found[model]['difference']):.2f} nats {likelier} likely than real text{shown}."
    )


def _reweighting(energies: dict[str, dict[str, Any]]) -> str:
    """Which of the two gains more by itself, where the interval of the difference decides it."""
    kinds: dict[str, list[str]] = {}
    for name, entry in energies.items():
        gains = entry["weights"]["gains"]
        low, high = (gains["demoting_minus_promoting"][side] for side in ("low", "high"))
        kind = "undecided"
        if low is not None and not low <= 0 <= high:
            kind = f"{'demoting' if low > 0 else 'promoting'} alone gains more"
        kinds.setdefault(kind, []).append(
            f"{name} {gains['demoting']:+.2f} and {gains['promoting']:+.2f} of {gains['both']:+.2f}"
        )
    found = "; ".join(f"{kind}: {', '.join(rows)}" for kind, rows in kinds.items())
    return (
        "The paper supposes that mostly the worst samples are weighed down. Gains of what is"
        " resampled in nats a passage, by demoting alone (weights above their mean cut down to it)"
        f" and by promoting alone (those below lifted to it), of both together: {found}."
    )
