"""A plan as tables for a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_plan(plan: dict[str, Any], console: Console) -> None:
    networks = _table("network", "kind", "parameters", "published", "tokens", "FLOPs", "memory")
    for row in plan["networks"]:
        frozen = f" + {_millions(row['frozen_parameters'])}" if row["frozen_parameters"] else ""
        networks.add_row(
            row["name"],
            row["kind"],
            _millions(row["parameters"]) + frozen,
            _beside(row["published_parameters"], row["parameters"]),
            f"{row['tokens']:.2g}" if row["tokens"] else "-",
            f"{row['flops']:.2g}" if row["flops"] else "-",
            f"{row['memory_bytes'] / 1e9:.1f} GB",
        )
    console.print(networks)
    work = _table("drawing and scoring", "blocks", "tokens", "FLOPs")
    for row in plan["work"]:
        numbers = (f"{row[key]:.2g}" for key in ("blocks", "tokens", "flops"))
        work.add_row(row["what"], *numbers)
    console.print(work)
    lines = [
        "Parameters with + are frozen beside those that learn. Memory: weights, gradients, Adam and"
        " activations of a whole batch on one device.",
        f"In all {plan['flops']:.2g} FLOPs: {_duration(plan['device_hours'])} of one"
        f" {plan['device']} at {plan['utilisation']:.0%} of its peak,"
        f" {plan['peak_flops']['bfloat16'] / 1e12:g} TFLOP/s in half precision and"
        f" {plan['peak_flops']['float32'] / 1e12:g} where a training asks for float32.",
        f"To be downloaded: {', '.join(plan['downloads']) or 'nothing'}.",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def _duration(hours: float) -> str:
    return f"{hours:,.0f} hours" if hours >= 2 else f"{60 * hours:.1f} minutes"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M"


def _beside(published: int | None, counted: int) -> str:
    if published is None:
        return ""
    return f"{published / 1e6:.0f} M {counted / published - 1:+.1%}"
