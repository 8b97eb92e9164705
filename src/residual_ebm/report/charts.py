"""How every chart looks, and how it becomes a file: the same numbers give the same bytes."""

import io
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# What is written and drawn as a line of the chart itself; a page may put its own colour there.
INK = "#24292f"
# Of lines and bars; readable on white and on black, and apart for those who see few colours.
REAL, BASE, JOINT = "#7d8590", "#d9822b", "#2f81c7"
CYCLE = [JOINT, BASE, "#2da57a", "#b45fae", "#c2544d", "#8a8d2a", REAL]
_ENTRIES_WITHIN = 4  # of a legend
_INCHES_A_LINE = 0.18
_STYLE: Any = {
    "svg.hashsalt": "residual-ebm",
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def style() -> Any:
    """Within, charts are drawn in the house's style."""
    return rc_context(_STYLE)


def new_chart(width: float = 4.6, height: float = 3.2, columns: int = 1) -> tuple[Figure, Any]:
    """A chart, in inches, and its axes: one, or as many as it has columns."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def plot_curve(axes: Axes, points: list[tuple[float, float]], label: str, **options: Any) -> None:
    """A line, or a dot where there is one point."""
    x, y = zip(*points, strict=True)
    line = {"linestyle": "-" if len(points) > 1 else "none", "marker": "o", **options}
    axes.plot(x, y, markersize=3, label=label, **line)


def add_legend(axes: Axes, loc: Literal["best", "lower right", "upper left"] = "best") -> None:
    """Within the axes, or below them where so many entries would cover what they explain."""
    count = len(axes.get_legend_handles_labels()[1])
    if count <= _ENTRIES_WITHIN:
        axes.legend(loc=loc)
        return
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.set_figheight(figure.get_figheight() + _INCHES_A_LINE * ((count + 1) // 2))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def image_of(figure: Figure, kind: str, *, inline: bool = False) -> bytes:
    """The chart as `svg` or `png`; on white, or for a page with colours of its own."""
    image = io.BytesIO()
    options: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 160}
    with style():  # ids in the file are made of its salt
        figure.savefig(image, format=kind, transparent=inline, **options)
    return image.getvalue()
