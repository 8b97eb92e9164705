"""A figure of a run: a chart with its title, its caption, and what it was made of."""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from residual_ebm.report.charts import CYCLE, INK, new_chart, style

GUIDE: dict[str, Any] = {"linestyle": ":", "color": INK, "linewidth": 0.8, "alpha": 0.6}


@dataclass(frozen=True)
class RunFigure:
    """A chart with its caption; `name` is that of its files."""

    name: str
    title: str
    caption: str
    made_of: str  # prefixes, samples, seed
    draw: Callable[[Axes], None]

    def chart(self, *, alone: bool = False) -> Figure:
        """With its title and what it was made of, where it stands alone."""
        with style():
            figure, axes = new_chart()
            self.draw(axes)
            if alone:
                axes.set_title(self.title)
                figure.supxlabel(textwrap.fill(self.made_of, 90), fontsize=7)
        return figure


def colours() -> Iterator[str]:
    while True:
        yield from CYCLE
