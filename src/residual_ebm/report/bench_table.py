"""Benchmarks as tables for a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from residual_ebm.report.bench_page import cells, headings, rate_text, sentences


def print_benchmarks(results: dict[str, Any], console: Console) -> None:
    for name, benchmark in results["benchmarks"].items():
        console.print(_table(name, benchmark) if benchmark["rows"] else name)
        for line in _notes(benchmark):
            console.print(line, highlight=False, markup=False)
        console.print()


def _table(name: str, benchmark: dict[str, Any]) -> Table:
    table = Table(title=name, title_justify="left", box=None, pad_edge=False)
    for heading in ("", *headings(benchmark)):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in benchmark["rows"]:
        measured = row["rate"] is not None
        table.add_row(row["name"], *(cells(benchmark, row) if measured else ["-"]))
    return table


def _notes(benchmark: dict[str, Any]) -> list[str]:
    notes = [
        f"{row['name']}: not measured ({row['error']})"
        for row in benchmark["rows"]
        if row["rate"] is None
    ]
    rounds = max((len(row["seconds"]) for row in benchmark["rows"]), default=0)
    if rounds:
        notes.append(f"Medians of {rounds} rounds in which all took turns, a process each.")
    if benchmark["sweep"]:
        swept = [row for row in benchmark["sweep"] if row["rate"] is not None]
        tried = ", ".join(f"{row['name']} {rate_text(row['rate'])}" for row in swept)
        of = benchmark.get("sweep_is_of", "")
        notes.append(f"Settings tried{of}, one turn each: {tried or 'none worked'}.")
    return notes + sentences(benchmark)
