"""Figures of a calibration: estimates beside a truth that is known."""

import functools
import math
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from residual_ebm.report.charts import REAL, plot_curve
from residual_ebm.report.run_figure import GUIDE, RunFigure, colours


def coverage_figures(found: dict[str, Any], seed: int) -> list[RunFigure]:
    by_scale: dict[float, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        by_scale.setdefault(row["scale"], []).append(row)
    made_of = (
        f"Energy {found['energy']}, times a factor; {found['rows'][0]['num_replicates']} estimates"
        f" of {found['num_documents']} documents each, drawn from {found['num_prefixes']} prefixes"
        f" with {found['num_continuations']} continuations, seed {seed}."
    )

    def draw(
        axes: Axes, value: Callable[[dict[str, Any]], float], what: str = "", **options: Any
    ) -> None:
        for colour, (scale, rows) in zip(colours(), by_scale.items(), strict=False):
            points = [(row["num_samples"], value(row)) for row in rows]
            plot_curve(axes, points, f"energy x {scale:g}{what}", color=colour, **options)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("samples a prefix")
        axes.legend()

    def draw_covered(axes: Axes) -> None:
        draw(axes, lambda row: float(row["covered"]))
        known = sum(row["covered_with_known_partition"] for row in found["rows"])
        axes.axhline(0.95, **GUIDE)
        axes.axhline(known / len(found["rows"]), color=REAL, linestyle="--", linewidth=1)
        axes.set_ylim(-0.03, 1.03)
        axes.set_ylabel("intervals that hold the truth")

    def draw_between(axes: Axes) -> None:
        draw(axes, lambda row: float(row["between_bounds"]))
        axes.set_ylim(-0.03, 1.03)
        axes.set_ylabel("bounds that hold the truth")

    def draw_bias(axes: Axes) -> None:
        draw(axes, lambda row: 100 * math.expm1(row["upper_bias"]), ", upper")
        draw(axes, lambda row: 100 * math.expm1(row["lower_bias"]), ", lower", linestyle="--")
        axes.axhline(0, **GUIDE)
        axes.set_ylabel("% above the true perplexity")

    def draw_warned(axes: Axes, kind: str) -> None:
        draw(axes, lambda row: float(row["warnings"][kind]["overall"]))
        axes.set_ylim(-0.03, 1.03)
        axes.set_ylabel("estimates that are flagged")

    warned = {
        "heavy weights": ("warnings-k-hat", "When does k-hat warn?"),
        "few effective samples": ("warnings-ess", "When does the effective sample size warn?"),
        "any": ("warnings", "When does any flag warn?"),
    }
    return [
        RunFigure(
            "coverage",
            "Does the published interval hold the truth?",
            "Share of published 95 % intervals (dotted: 95 %) that hold the true perplexity of the"
            " joint model, which is summed over all continuations. Dashed: intervals of the same"
            " documents with log Z known, so what is missing there is the bootstrap's own.",
            made_of,
            draw_covered,
        ),
        RunFigure(
            "bias",
            "How far are the bounds from the truth?",
            "Geometric mean over estimates, beside the truth of the same documents. Where the upper"
            " bound lies below 0, too few samples flatter even it.",
            made_of,
            draw_bias,
        ),
        RunFigure(
            "between",
            "Do the bounds alone hold the truth?",
            "Share of estimates whose bounds, without the bootstrap, hold the true perplexity of"
            " the documents they were made of: what the samples alone do. They are bounds in"
            " expectation, and close in on each other faster than chance dies down, so that no"
            " share is promised.",
            made_of,
            draw_between,
        ),
        *(
            RunFigure(
                name,
                title,
                f"Share of all estimates with"
                f" {'a flag' if kind == 'any' else f'the flag {kind!r}'}; another figure"
                " shows how far they were off.",
                made_of,
                functools.partial(draw_warned, kind=kind),
            )
            for kind, (name, title) in warned.items()
        ),
    ]
