"""The table at the end of a run, and three examples, for a terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from residual_ebm.report.published import fine_tuning_curve, read_published

_SHOWN_OF_A_PREFIX = 240  # characters


def print_results(results: dict[str, Any], console: Console) -> None:
    console.print(_perplexity_table(results))
    console.print(_caption(results), highlight=False)
    _print_fine_tuning(results, console)
    _print_flags(results, console)
    _print_examples(results, console)


def _perplexity_table(results: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    table.add_column("model", overflow="fold", min_width=6)
    for heading in ("params", "val", "test", "95 %", "minus base", "ESS", "flags"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results["language_models"]:
        _add_exact(table, row["name"], row, count_text(row["parameters"]))
    for row in results["joint_models"]:
        test = row["test"]
        table.add_row(
            escape(row["name"]),
            count_text(row["parameters"]),
            bounds_text(row["validation"]),
            bounds_text(test),
            interval_text(test["published"]),
            signed_text(test["difference_from_base"]),
            f"{test['effective_sample_size']:.0f}",
            str(len(test["flags"]) or "-"),
        )
    if all(results["floor"].values()):
        _add_exact(table, "truth", results["floor"], "")
    return table


def _add_exact(table: Table, name: str, row: dict[str, Any], parameters: str) -> None:
    values = (number_text(row["validation"]["value"]), number_text(row["test"]["value"]))
    table.add_row(escape(name), parameters, *values, interval_text(row["test"]["published"]))


def _caption(results: dict[str, Any]) -> str:
    counts = results["num_prefixes"]
    bases = dict.fromkeys(row["language_model"] for row in results["joint_models"])
    return (
        f"Perplexity of the {results['block_length'] - results['prefix_length']} tokens after a"
        f" prefix of {results['prefix_length']} ({results['continuation']} continuations), on"
        f" {counts['validation']} validation and {counts['test']} test prefixes. Joint models:"
        f" lower to upper bound from n = {results['num_samples']} proposals a prefix; x1.2 means"
        " that the energy is scaled by a factor fitted on validation. 95 %: bootstrap over"
        " documents, from the lower bound's 2.5 % to the upper bound's 97.5 %; minus base: the same"
        f" for the upper bound minus the language model below it ({', '.join(bases)}), paired. ESS:"
        " effective sample size of those n, mean over prefixes. k-hat: how heavy the tail of the"
        " weights is; past its threshold a few proposals decide. log Z: 0 where the energy needs no"
        " normalising."
    )


def _print_fine_tuning(results: dict[str, Any], console: Console) -> None:
    """A reader's first question, answered from the published results of a longer run."""
    published = read_published(results["reference"]) if results.get("reference") else None
    if published is None or published["corpus"] != results["corpus"]:
        return
    curve = ", ".join(
        f"{number_text(value)} after {steps} steps" for steps, value in fine_tuning_curve(published)
    )
    joint = ", ".join(
        f"{row['name']} {bounds_text(row['test'])}"
        for row in published["joint_models"]
        if not row["scaled"]
    )
    console.print(
        f"Would plain fine-tuning do as well? In the long recipe {published['recipe']}"
        f" ({published['num_prefixes']['test']} test prefixes, n = {published['num_samples']}) the"
        f" adapted LM stands at {curve}; on top of the last of these, {joint}.",
        markup=False,
        highlight=False,
    )


def _print_flags(results: dict[str, Any], console: Console) -> None:
    if results["pretrained"]:
        console.print(
            f"{', '.join(results['pretrained'])}: pretrained elsewhere, perhaps on this very text.",
            markup=False,
            highlight=False,
        )
    for row in results["language_models"]:
        console.print(
            f"{row['name']}: perplexity {number_text(row['train']['value'])} on training text,"
            f" {number_text(row['test']['value'])} on test text.",
            markup=False,
            highlight=False,
        )
    for row in results["joint_models"]:
        test = row["test"]
        bounds = ", ".join(
            f"{number_text(at['lower'])}-{number_text(at['upper'])} at n = {at['num_samples']}"
            for at in test["bounds_at"]
        )
        console.print(
            f"{row['name']}: {bounds}; log Z {test['log_partition_mean']:+.3f} ±"
            f" {test['log_partition_spread']:.3f} over prefixes; k-hat past its threshold for"
            f" {test['share_past_pareto_k']:.0%}; real text outweighs all proposals for"
            f" {test['share_outweighed']:.0%}.",
            markup=False,
            highlight=False,
        )
        for flag in test["flags"]:
            console.print(f"  flag: {flag}", markup=False, highlight=False)


def _print_examples(results: dict[str, Any], console: Console) -> None:
    for number, example in enumerate(results["examples"], start=1):
        console.print(
            f"\nExample {number} ({results['best_energy']}): {_tail(example['prefix'])}",
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


def one_line(text: str) -> str:
    """Paragraphs one after the other: a line break in a sample is not one of the page's."""
    paragraphs = (" ".join(line.split()) for line in text.split("\n"))
    return " ¶ ".join(paragraph for paragraph in paragraphs if paragraph)


def _tail(text: str) -> str:
    """The end of a prefix is what a continuation follows; results.json has all of it."""
    words = one_line(text)
    if len(words) <= _SHOWN_OF_A_PREFIX:
        return words
    return "... " + words[-_SHOWN_OF_A_PREFIX:].partition(" ")[2]


def count_text(value: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return str(value)


def number_text(value: float | None) -> str:
    if value is None:
        return "?"
    digits = 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:.{digits}f}"


def bounds_text(row: dict[str, Any]) -> str:
    return f"{number_text(row['lower'])}-{number_text(row['upper'])}"


def interval_text(interval: dict[str, float | None]) -> str:
    if interval["low"] is None or interval["high"] is None:
        return "one document"
    return f"{number_text(interval['low'])}-{number_text(interval['high'])}"


def signed_text(interval: dict[str, float | None]) -> str:
    if interval["low"] is None or interval["high"] is None:
        return "one document"
    digits = 2 if max(abs(interval["low"]), abs(interval["high"])) < 10 else 1
    return f"{interval['low']:+.{digits}f}/{interval['high']:+.{digits}f}"
