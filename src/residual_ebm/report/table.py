"""The table at the end of a run, and three examples, for a terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from residual_ebm.report.published import fine_tuning_curve, read_published
from residual_ebm.report.rows import (
    HEADINGS,
    bounds_text,
    caption_text,
    estimate_text,
    notes,
    number_text,
    one_line,
    table_rows,
    tail_text,
)


def print_results(results: dict[str, Any], console: Console) -> None:
    console.print(_perplexity_table(results))
    console.print(caption_text(results), highlight=False)
    _print_fine_tuning(results, console)
    _print_flags(results, console)
    _print_examples(results, console)


def _perplexity_table(results: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    table.add_column(HEADINGS[0], overflow="fold", min_width=6)
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in table_rows(results):
        table.add_row(*map(escape, row.cells))
    return table


def _print_fine_tuning(results: dict[str, Any], console: Console) -> None:
    """A reader's first question, answered from the published results of a longer run."""
    published = read_published(results["reference"]) if results.get("reference") else None
    if published is None or published.results["corpus"] != results["corpus"]:
        return
    long = published.results
    curve = ", ".join(
        f"{number_text(value)} after {steps} steps" for steps, value in fine_tuning_curve(long)
    )
    joint = ", ".join(
        f"{row['name']} {bounds_text(row['test'])}"
        for row in long["joint_models"]
        if not row["scaled"]
    )
    console.print(
        f"Would plain fine-tuning do as well? In the long recipe {long['recipe']}"
        f" ({long['num_prefixes']['test']} test prefixes, n = {long['num_samples']}) the"
        f" adapted LM stands at {curve}; on top of the last of these, {joint}.",
        markup=False,
        highlight=False,
    )


def _print_flags(results: dict[str, Any], console: Console) -> None:
    for note in notes(results):
        console.print(note, markup=False, highlight=False)
    for row in results["joint_models"]:
        console.print(estimate_text(row), markup=False, highlight=False)
        for flag in row["test"]["flags"]:
            console.print(f"  flag: {flag}", markup=False, highlight=False)


def _print_examples(results: dict[str, Any], console: Console) -> None:
    for number, example in enumerate(results["examples"], start=1):
        console.print(
            f"\nExample {number} ({results['best_energy']}): {tail_text(example['prefix'])}",
            markup=False,
            highlight=False,
        )
        for role in ("base", "joint", "highest_energy", "real"):
            sample = example[role]
            label = role.replace("_", " ")
            console.print(
                f"  {label:>14} (E {sample['energy']:+.2f}): {one_line(sample['text'])}",
                markup=False,
                highlight=False,
            )
