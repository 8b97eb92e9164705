"""Figures of a calibration: estimates beside a truth that is known."""

import functools
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

    def draw(axes: Axes, value: Callable[[dict[str, Any]], float | None]) -> None:
        for colour, (scale, rows) in zip(colours(), by_scale.items(), strict=False):
            values = [(row["num_samples"], value(row)) for row in rows]
            points = [(count, share) for count, share in values if share is not None]
            if points:
                plot_curve(axes, points, f"energy x {scale:g}", color=colour)
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

    def draw_bias(axes: Axes) -> None:
        draw(axes, lambda row: float(row["upper_bias"]))
        axes.axhline(0, **GUIDE)
        axes.set_ylabel("log upper perplexity minus log truth")

    def draw_warned(axes: Axes, kind: str) -> None:
        draw(axes, lambda row: row["warnings"][kind]["when_missed"])
        axes.set_ylim(-0.03, 1.03)
        axes.set_ylabel("of misses, flagged")

    warned = {
        "heavy weights": ("warnings-k-hat", "Does k-hat warn of a miss?"),
        "few effective samples": ("warnings-ess", "Does the effective sample size warn?"),
        "any": ("warnings", "Does any flag warn?"),
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
            "How far is the upper bound from the truth?",
            "Mean over estimates, on the same documents. Below 0 the upper bound lies below the"
            " true perplexity: too few samples flatter even it.",
            made_of,
            draw_bias,
        ),
        *(
            RunFigure(
                name,
                title,
                f"Of the estimates whose interval misses the truth, the share with"
                f" {'a flag' if kind == 'any' else f'the flag {kind!r}'}; no point where none"
                " misses.",
                made_of,
                functools.partial(draw_warned, kind=kind),
            )
            for kind, (name, title) in warned.items()
        ),
    ]
