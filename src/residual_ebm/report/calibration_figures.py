"""Figures of a calibration: estimates beside a truth that is known."""

import functools
import math
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from residual_ebm.report.charts import add_legend, plot_curve
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
        add_legend(axes)

    def draw_covered(axes: Axes) -> None:
        draw(axes, lambda row: float(row["covered"]))
        axes.axhline(0.95, **GUIDE)
        for colour, rows in zip(colours(), by_scale.values(), strict=False):
            # The same documents at every n, so the same figure.
            known = rows[0]["covered_with_known_partition"]
            axes.axhline(known, color=colour, linestyle="--", linewidth=1)
        axes.set_ylim(-0.03, 1.03)
        axes.set_ylabel("intervals that hold the truth")

    def draw_claims(axes: Axes, claim: str) -> None:
        draw(axes, lambda row: float(row[claim]))
        axes.axhline(0.975 if claim == "gap_holds" else 0.95, **GUIDE)
        axes.set_ylim(-0.03, 1.03)
        axes.set_ylabel("claims that are true")

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
    claims = [
        RunFigure(
            "claims-difference",
            "Does the interval of the gain hold the truth?",
            "Share of 95 % intervals (dotted: 95 %) of the paired difference from the language"
            " model that hold the true difference. They are narrower than those of the perplexity,"
            " so an error of log Z shows sooner.",
            made_of,
            functools.partial(draw_claims, claim="covered_difference"),
        ),
        RunFigure(
            "claims-gap",
            "Is the language model really at least so far away?",
            "Share of estimates whose gap, the low end of its 95 % interval (dotted: 97.5 %), is"
            " not more than KL(data || P_LM), which the language itself gives.",
            made_of,
            functools.partial(draw_claims, claim="gap_holds"),
        ),
    ]
    return [
        RunFigure(
            "coverage",
            "Does the published interval hold the truth?",
            "Share of published 95 % intervals (dotted: 95 %) that hold the true perplexity of the"
            " joint model, which is summed over all continuations. Dashed, in the same colours:"
            " intervals of the same documents with log Z known, so what is missing there is the"
            f" bootstrap's own. Of so many estimates a share is certain to ±{_chance(found):.0%}.",
            made_of,
            draw_covered,
        ),
        *(claims if _has_claims(found) else []),
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


def _chance(found: dict[str, Any]) -> float:
    """Two standard errors of a share near 95 % of that many estimates."""
    return 2 * math.sqrt(0.95 * 0.05 / float(found["rows"][0]["num_replicates"]))


def _has_claims(found: dict[str, Any]) -> bool:
    """Not of an analysis that was made before they were counted."""
    return found["rows"][0].get("gap_holds") is not None
