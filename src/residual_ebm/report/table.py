"""The table at the end of a run, and three examples, for a terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_results(results: dict[str, Any], console: Console) -> None:
    console.print(_perplexity_table(results))
    console.print(_caption(results), highlight=False)
    _print_flags(results, console)
    _print_examples(results, console)


def _perplexity_table(results: dict[str, Any]) -> Table:
    counts = results["num_prefixes"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model")
    table.add_column("parameters", justify="right")
    table.add_column(f"validation ({counts['validation']})", justify="right")
    table.add_column(f"test ({counts['test']})", justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("test - base", justify="right")
    table.add_column("ESS", justify="right")
    table.add_column("flags", justify="right")
    floor = results["floor"]
    for row in results["language_models"]:
        table.add_row(
            escape(row["name"]),
            _count(row["parameters"]),
            _number(row["validation"]["value"]),
            _number(row["test"]["value"]),
            _interval(row["test"]["published"]),
            "",
            "",
            "",
        )
    for row in results["joint_models"]:
        test = row["test"]
        scale = f" x{row['scale']:g}" if row["scaled"] else ""
        table.add_row(
            escape(row["name"]) + scale,
            _count(row["parameters"]),
            _bounds(row["validation"]),
            _bounds(test),
            _interval(test["published"]),
            _interval(test["difference_from_base"], signed=True),
            f"{test['effective_sample_size']:.0f}",
            str(len(test["flags"]) or "none"),
        )
    if floor["test"]:
        table.add_row(
            "true distribution (floor)",
            "",
            _number(floor["validation"]["value"]),
            _number(floor["test"]["value"]),
            _interval(floor["test"]["published"]),
            "",
            "",
            "",
        )
    return table


def _caption(results: dict[str, Any]) -> str:
    return (
        f"Perplexity of the {results['block_length'] - results['prefix_length']} tokens after a"
        f" prefix of {results['prefix_length']} ({results['continuation']} continuations); joint"
        f" models: lower to upper bound from n = {results['num_samples']} proposals a prefix."
        " The 95 % interval is a bootstrap over documents, from the lower bound's 2.5 % to the"
        " upper bound's 97.5 %. ESS: effective sample size of those n, mean over prefixes."
    )


def _print_flags(results: dict[str, Any], console: Console) -> None:
    for row in results["language_models"]:
        console.print(
            f"{row['name']}: perplexity {_number(row['train']['value'])} on training text,"
            f" {_number(row['test']['value'])} on test text.",
            markup=False,
            highlight=False,
        )
    for row in results["joint_models"]:
        test = row["test"]
        bounds = ", ".join(
            f"{_number(at['lower'])}-{_number(at['upper'])} at n = {at['num_samples']}"
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
            f"\nExample {number} ({results['best_energy']}): {example['prefix']}",
            markup=False,
            highlight=False,
        )
        for role in ("base", "joint", "highest_energy", "real"):
            sample = example[role]
            label = role.replace("_", " ")
            console.print(
                f"  {label:>14} (E {sample['energy']:+.2f}): {sample['text']}",
                markup=False,
                highlight=False,
            )


def _count(value: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return str(value)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}"


def _bounds(row: dict[str, Any]) -> str:
    return f"{_number(row['lower'])}-{_number(row['upper'])}"


def _interval(interval: dict[str, float | None], *, signed: bool = False) -> str:
    low, high = interval["low"], interval["high"]
    if low is None or high is None:
        return "one document"
    if signed:
        return f"{low:+.2f} to {high:+.2f}"
    return f"{_number(low)}-{_number(high)}"
