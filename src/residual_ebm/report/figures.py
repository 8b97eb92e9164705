"""The figures of a run: what it was made of stands below each of them.

Every figure is drawn from `results.json` and `analysis.json` alone.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from residual_ebm.report.calibration_figures import coverage_figures
from residual_ebm.report.charts import BASE, JOINT, REAL, add_legend, plot_curve
from residual_ebm.report.run_figure import GUIDE, RunFigure, colours

_DOTTED = (
    " Dotted: what resampling n + 1 proposals writes, at most; not a bound of the joint model, but"
    " one that few samples cannot make too low."
)


def run_figures(results: dict[str, Any], analysis: dict[str, Any] | None) -> list[RunFigure]:
    """All figures that a run's numbers allow."""
    figures = []
    if analysis and analysis["energies"]:
        of = Made(results, analysis)
        figures += [
            *of.bounds(),
            *of.repetition(),
            of.density("base"),
            of.density("joint"),
            of.roc(),
            of.calibration(),
            of.ranks(),
            *of.reweighting(),
        ]
        if analysis.get("per_step"):
            figures.insert(1, _per_step(analysis["per_step"], analysis["seed"]))
        if analysis.get("calibration"):
            figures[1:1] = coverage_figures(analysis["calibration"], analysis["seed"])
    return [*figures, *_curves(results)]


class Made:
    """Figures of the analyses; those of one energy are of the best one on validation."""

    def __init__(self, results: dict[str, Any], analysis: dict[str, Any]) -> None:
        self._results = results
        self._analysis = analysis
        self._energies: dict[str, dict[str, Any]] = analysis["energies"]
        self._best = str(results["best_energy"])
        counts = f"{analysis['num_prefixes']} test prefixes"
        self._made_of = (
            f"{counts}, n = {analysis['num_samples']} proposals a prefix, seed {analysis['seed']}."
        )
        self._detected = (
            f"{counts}, n = {analysis['num_detected']} proposals a prefix, seed {analysis['seed']}."
        )

    def bounds(self) -> Iterator[RunFigure]:
        exact = {row["name"]: row["test"]["value"] for row in self._results["language_models"]}
        bases = {entry["language_model"] for entry in self._energies.values()}
        # Older analyses have no resampled one.
        resampled = any("resampled" in entry["bounds"][0] for entry in self._energies.values())
        yield RunFigure(
            "bounds",
            "Does the number of samples suffice?",
            "Lower and upper bound of the joint perplexity from fewer samples, on disjoint subsets"
            " of the same ones. A band that has met and lies flat no longer depends on n; one that"
            f" still rises flatters.{_DOTTED if resampled else ''}",
            self._made_of,
            functools.partial(
                _draw_bounds,
                bounds={name: entry["bounds"] for name, entry in self._energies.items()},
                bases={name: value for name, value in exact.items() if name in bases},
            ),
        )
        deep = {name: entry["deep"] for name, entry in self._energies.items() if entry.get("deep")}
        if deep:
            first = next(iter(deep.values()))
            yield RunFigure(
                "bounds-deep",
                "Where do the bounds go with many more samples?",
                "The same for a few of these prefixes, chosen by seed.",
                f"{first['num_prefixes']} test prefixes, up to"
                f" n = {first['bounds'][-1]['num_samples']} proposals a prefix, seed"
                f" {self._analysis['seed']}.",
                functools.partial(
                    _draw_bounds,
                    bounds={name: entry["bounds"] for name, entry in deep.items()},
                    bases={
                        self._energies[name]["language_model"]: entry["base"]
                        for name, entry in deep.items()
                    },
                ),
            )

    def repetition(self) -> Iterator[RunFigure]:
        rows = self._energies[self._best]["repetition"]
        if not rows:
            return
        about = {
            "within": ("Does a passage repeat itself?", "Mean over passages of the share of", ""),
            "among": (
                "Do passages repeat each other?",
                "Of all passages together, the share of",
                ", at equal numbers of n-grams",
            ),
        }
        for kind, (title, share, equal) in about.items():
            yield RunFigure(
                f"repetition-{kind}",
                title,
                f"{share} different n-grams of tokens{equal}. One passage a prefix in every set;"
                f" of base and joint {self._best} samples the mean of"
                f" {self._analysis['num_draws']} sets, with their standard deviation; joint samples"
                f" are chosen from {self._analysis['num_resampled_from']} proposals each.",
                self._made_of,
                functools.partial(_draw_repetition, rows=rows, kind=kind),
            )

    def density(self, model: str) -> RunFigure:
        entry = self._energies[self._best]
        found = entry["density"][model]
        own = entry["language_model"] if model == "base" else f"joint {self._best}"

        def draw(axes: Axes) -> None:
            colour = BASE if model == "base" else JOINT
            for curve, label, shade in (
                (found["real_K"], "real text", REAL),
                (found["sample_K"], f"samples of {own}", colour),
            ):
                if None not in curve:
                    axes.plot(found["log_prob_K"], curve, color=shade, label=label)
                    axes.fill_between(found["log_prob_K"], curve, color=shade, alpha=0.2)
            axes.set_xlabel(f"log-prob of a passage under {own}, in nats")
            axes.set_yticks([])
            add_legend(axes)

        low, high = found["interval"]["low"], found["interval"]["high"]
        shown = "?" if low is None else f"{low:.2f} to {high:.2f}"
        return RunFigure(
            f"density-{model}",
            f"Are samples of {own} as likely as real text?",
            f"Densities of log-probs under {own}. Mean of samples minus mean of real text:"
            f" {found['difference']:+.2f} nats (95 % {shown}). A perfect model would give 0; 0"
            " alone proves nothing."
            + (
                " Joint samples come from one half of the proposals, Z from the other."
                if model == "joint"
                else ""
            ),
            f"{self._analysis['num_draws']} samples a prefix; {self._made_of}",
            draw,
        )

    def roc(self) -> RunFigure:
        curves = {}
        for name, entry in self._energies.items():
            found = entry["detector"]
            label = f"{name}, AUC {found['auc']:.3f}, accuracy {found['accuracy']:.1%}"
            curve = found["roc"]
            curves[label] = list(zip(curve["false_positive"], curve["true_positive"], strict=True))

        def draw(axes: Axes) -> None:
            _draw_over_diagonal(axes, curves, marker="")
            axes.set_xlabel("samples taken for real text")
            axes.set_ylabel("real text recognised")
            add_legend(axes, "lower right")

        return RunFigure(
            "roc",
            "Can the energy tell real text from samples?",
            "ROC curve of each energy on test text; AUC is the chance that a real passage has the"
            " lower energy of two.",
            self._detected,
            draw,
        )

    def calibration(self) -> RunFigure:
        curves = {}
        for name, entry in self._energies.items():
            found = entry["detector"]["calibration"]
            curves[f"{name}, off by {found['error']:.3f}"] = [
                (one["predicted"], one["observed"]) for one in found["bins"]
            ]

        def draw(axes: Axes) -> None:
            _draw_over_diagonal(axes, curves)
            axes.set_xlabel("probability of being real, says the energy")
            axes.set_ylabel("share that is real")
            add_legend(axes, "upper left")

        return RunFigure(
            "calibration",
            "Do the energy's odds come true?",
            "An energy is a log-odds: where it says 70 %, 70 % should be real (the dotted line)."
            " Both classes weigh the same.",
            self._detected,
            draw,
        )

    def ranks(self) -> RunFigure:
        ranks = self._energies[self._best]["detector"]["ranks"]

        def draw(axes: Axes) -> None:
            axes.hist(ranks, bins=[tenth / 10 for tenth in range(11)], color=JOINT, alpha=0.8)
            axes.axhline(len(ranks) / 10, **GUIDE)
            axes.set_xlabel("share of proposals with a lower energy than the real text")
            axes.set_ylabel("prefixes")

        return RunFigure(
            "ranks",
            "Where is the real text among its proposals?",
            f"By the energy {self._best}. Piled up at 0: real text looks more real than nearly all"
            " proposals; even (the dotted line): the energy cannot tell.",
            self._made_of,
            draw,
        )

    def reweighting(self) -> Iterator[RunFigure]:
        found = {name: entry["weights"].get("curve") for name, entry in self._energies.items()}
        curves = {
            name: list(zip(curve["share"], curve["mass"], strict=True))
            for name, curve in found.items()
            if curve is not None  # older analyses have none
        }
        if not curves:
            return

        def draw(axes: Axes) -> None:
            _draw_over_diagonal(axes, curves, marker="")
            axes.set_xlabel("share of proposals, those of highest energy first")
            axes.set_ylabel("share of the joint model")
            add_legend(axes, "upper left")

        yield RunFigure(
            "reweighting",
            "Are a few samples promoted, or the worst demoted?",
            "How much of the joint model the proposals of highest energy get, mean over prefixes."
            " On the dotted line all count the same. Flat at the left: so many are demoted to"
            " nothing. Steep at the right: so few have most of it.",
            self._made_of,
            draw,
        )


def _draw_over_diagonal(
    axes: Axes, curves: Mapping[str, list[tuple[float, float]]], **options: Any
) -> None:
    for colour, (label, points) in zip(colours(), curves.items(), strict=False):
        plot_curve(axes, points, label, color=colour, **options)
    axes.plot([0, 1], [0, 1], **GUIDE)


def _draw_bounds(
    axes: Axes, bounds: dict[str, list[dict[str, float]]], bases: dict[str, float]
) -> None:
    for colour, (name, rows) in zip(colours(), bounds.items(), strict=False):
        counts = [row["num_samples"] for row in rows]
        lower = [row["lower"] for row in rows]
        upper = [row["upper"] for row in rows]
        axes.fill_between(counts, lower, upper, color=colour, alpha=0.25, linewidth=0)
        axes.plot(counts, upper, color=colour, label=f"joint {name}")
        axes.plot(counts, lower, color=colour, linewidth=0.8)
        if "resampled" in rows[0]:
            axes.plot(counts, [row["resampled"] for row in rows], color=colour, linestyle=":")
    if any("resampled" in rows[0] for rows in bounds.values()):
        axes.plot([], [], color=REAL, linestyle=":", label="resampled")
    for name, value in bases.items():
        axes.axhline(value, color=REAL, linestyle="--", linewidth=1, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("samples a prefix")
    axes.set_ylabel("perplexity")
    add_legend(axes)


def _per_step(steps: dict[str, Any], seed: int) -> RunFigure:
    rows, last = steps["positions"], steps["last_step"]

    def draw(axes: Axes) -> None:
        place = [row["position"] for row in rows]
        known = [row for row in rows if row["gain_interval"]["low"] is not None]
        low, high = (
            [_gained(row["gain_interval"][side]) for row in known] for side in ("low", "high")
        )
        label = "95 % over documents"
        axes.fill_between(
            [row["position"] for row in known], low, high, color=JOINT, alpha=0.2, label=label
        )
        for side, width in (("upper", 1.5), ("lower", 0.8)):
            gains = [100 * (1 - row[side] / row["base"]) for row in rows]
            axes.plot(place, gains, color=JOINT, linewidth=width, label=f"by the {side} perplexity")
        if last is not None:
            gain = 100 * (1 - last["exact_perplexity"] / last["base_perplexity"])
            star = f"last of {last['num_prefixes']} other prefixes, enumerated"
            axes.plot(place[-1], gain, "*", color=BASE, markersize=11, label=star)
            gain = 100 * (1 - last["estimated_perplexity"] / last["base_perplexity"])
            ring = axes.plot(place[-1], gain, "o", color=JOINT, label="the same, estimated")
            ring[0].set(markersize=13, markerfacecolor="none")
        axes.axhline(0, **GUIDE)
        axes.set_xlabel("position after the prefix")
        axes.set_ylabel("perplexity gained, %")
        add_legend(axes)

    checked = ""
    if last is not None:
        checked = (
            f" At the last position of {last['num_prefixes']} prefixes, where all tokens can be"
            f" tried, the exact log-prob lies within the published 95 % interval for"
            f" {last['inside']}; estimate minus exact {last['mean_error']:+.4f} nats on average,"
            f" median width {last['median_width']:.3f} nats."
        )
    diagnostics = steps["diagnostics"]
    return RunFigure(
        "per-step",
        "Which positions gain?",
        f"Perplexity of joint {steps['energy']} at each position, relative to its language model"
        f" (Figure 1 of the paper).{checked} Effective sample size of the estimates"
        f" {diagnostics['effective_sample_size']:.0f} on average and"
        f" {diagnostics['least_effective_sample_size']:.0f} at least; k-hat past its threshold for"
        f" {diagnostics['share_past_pareto_k']:.0%}.",
        f"{steps['num_prefixes']} test prefixes, n = {steps['num_samples']} completions a"
        f" position, seed {seed}.",
        draw,
    )


def _gained(nats: float) -> float:
    """Per cent of perplexity."""
    return 100 * (1 - math.exp(-nats))


def _draw_repetition(axes: Axes, rows: list[dict[str, Any]], kind: str) -> None:
    """Points, not bars: nearly all n-grams are different, and bars would have to start at 0."""
    colours = {"real": REAL, "base": BASE, "joint": JOINT}
    for place, (name, colour) in enumerate(colours.items()):
        centre = [number + 0.15 * (place - 1) for number in range(len(rows))]
        spread = [100 * (row[name][f"{kind}_spread"] or 0.0) for row in rows]
        share = [100 * row[name][kind] for row in rows]
        axes.errorbar(centre, share, spread, fmt="o", color=colour, label=name, elinewidth=1)
    axes.set_xticks(range(len(rows)), [f"{row['order']}-grams" for row in rows])
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_ylabel("% different")
    add_legend(axes, "lower right")


def _validated_on(rows: list[dict[str, Any]]) -> str:
    """Energies learn from prefixes, each with its samples; language models from any block."""
    counts = {
        row["training"]["detection"]["validation"]["num_prefixes"]
        for row in rows
        if row["training"].get("detection")
    }
    shown = " or ".join(map(str, sorted(counts)))
    return f"{shown} validation prefixes" if counts else "Blocks of the validation split"


def _curves(results: dict[str, Any]) -> Iterator[RunFigure]:
    plain = [row for row in results["joint_models"] if not row["scaled"]]
    groups = {
        "language-models": ("Have the language models learnt?", results["language_models"]),
        "energies": ("Have the energies learnt?", plain),
    }
    for name, (title, rows) in groups.items():
        curves = {
            row.get("energy", row["name"]): [
                (point["step"], point["loss"]) for point in row["training"].get("validations") or []
            ]
            for row in rows
        }
        curves = {label: points for label, points in curves.items() if points}
        if all(len(points) < 2 for points in curves.values()):
            continue  # no curve, and the table has the numbers

        def draw(axes: Axes, curves: dict[str, Any] = curves) -> None:
            for colour, (label, points) in zip(colours(), curves.items(), strict=False):
                plot_curve(axes, points, label, color=colour)
            axes.set_xlabel("step")
            axes.set_ylabel("validation loss")
            add_legend(axes)

        log_four = " 1.386 (log 4) is what knowing nothing gives." if name == "energies" else ""
        yield RunFigure(
            f"curves-{name}",
            title,
            f"Validation loss by training step; the weights with the lowest are kept.{log_four}",
            f"{_validated_on(rows)}; seed {results['seed']}.",
            draw,
        )
