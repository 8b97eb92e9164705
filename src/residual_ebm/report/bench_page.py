"""Benchmarks as a page: tables in Markdown, a chart, and the numbers themselves beside it."""

from pathlib import Path
from typing import Any

from residual_ebm.files.source_commit import short_commit
from residual_ebm.files.storage import read_json, write_bytes, write_json
from residual_ebm.report.charts import INK, image_of, new_chart, style

_COLOURS = {"ours": "#2a7f62", "other": "#8a8f98"}


def write_page(results: dict[str, Any], path: Path) -> None:
    """PATH.md, with PATH.svg and PATH.json beside it."""
    chart, numbers = path.with_suffix(".svg"), path.with_suffix(".json")
    write_json(numbers, results)
    write_bytes(chart, _chart(results))
    write_bytes(path, _markdown(results, chart.name, numbers.name).encode())


def read_page(path: Path) -> dict[str, Any] | None:
    """The numbers behind a page, if it was made before."""
    numbers = path.with_suffix(".json")
    results: dict[str, Any] | None = (
        read_json(numbers, has="benchmarks") if numbers.exists() else None
    )
    return results


def _markdown(results: dict[str, Any], chart: str, numbers: str) -> str:
    setting = results["setting"]
    lines = [
        "# Benchmarks",
        "",
        f"Made by `rebm bench --page`, with {setting['threads']} threads, in"
        f" {setting['precision']} unless said otherwise. All numbers: [{numbers}]({numbers}).",
        "",
        "Candidates run in processes of their own and take turns; rates are medians of"
        f" {setting['repeats']} rounds, each begun by another. *First time* is that of a first"
        " turn, which counts as no round, *compiling* what torch compiled for in it, from nothing."
        " An alternative with settings was swept first, one turn each after a first one, and takes"
        " part at its best, of settings within 2 % of that at the smallest; where one turn does not"
        " decide between ways of drawing, all of these do.",
        "",
        "*Matrix products alone* are the linear layers of the same work with nothing between them,"
        " as torch multiplies them. *At most* is how many times as fast they are; weights in"
        " another layout would give a few per cent more, multiplying more coarsely twice as much."
        " Of samples, they are those of every token of each; what samples of a prefix have in"
        " common at their beginning we compute once (`models/beginnings.py`), which is less.",
        "",
        "generate, the classifier and Trainer have a process as anybody would have it. Ours keeps"
        " freed memory for the next tensor (`models/memory.py`); *memory kept* is the quickest of"
        " them if it had that too (generate with a dynamic cache). Engines have it.",
        "",
    ]
    if (
        len({benchmark["measured"]["processor"] for benchmark in results["benchmarks"].values()})
        > 1
    ):
        lines += [
            "Not everything was measured on the same processor: rates may be compared within a"
            " benchmark, ratios hold for the processor that stands beside them.",
            "",
        ]
    lines.append(f"![How many times as fast as each alternative]({chart})")
    for name, benchmark in results["benchmarks"].items():
        by = benchmark["measured"]
        commit = f", commit {short_commit(by['commit'])}" if by["commit"] else ""
        lines += ["", f"## {name}", "", f"{by['date']}, version {by['version']}{commit}, on"]
        lines[-1] += f" {by['cores']} cores ({by['processor']})."
        if benchmark.get("engines"):
            engines = (f"{package} {version}" for package, version in benchmark["engines"].items())
            lines[-1] += f" With {', '.join(engines)}."
        if benchmark.get("remark"):
            lines += ["", benchmark["remark"]]
        if benchmark["rows"]:
            lines += ["", *_table(benchmark)]
        for row in benchmark["rows"]:
            if row["rate"] is None:
                lines += ["", f"{row['name']}: not measured ({row['error']})."]
        for sentence in sentences(benchmark):
            lines += ["", sentence]
        if benchmark.get("settings_of"):
            others = " and ".join(f"`{other}`" for other in benchmark["settings_of"])
            lines += ["", f"Settings of alternatives: what {others} found, each part at its best."]
        if benchmark["sweep"]:
            lines += ["", f"Settings tried{benchmark.get('sweep_is_of', '')}:", ""]
            lines += [f"- {_tried(row, benchmark['unit'])}" for row in benchmark["sweep"]]
    return "\n".join(lines) + "\n"


def _tried(row: dict[str, Any], unit: str) -> str:
    if row["rate"] is None:
        return f"{row['name']}: {row['error']}"
    # Earlier versions did without a second turn where a first one took long.
    first = " in a first turn" if row["seconds"] == [row["first_seconds"]] else ""
    return f"{row['name']}: {rate_text(row['rate'])} {unit}{first}"


def sentences(benchmark: dict[str, Any]) -> list[str]:
    """What a benchmark says beside its table."""
    return [*_times(benchmark), *map(_agreement, benchmark.get("agreement", []))]


def _agreement(check: dict[str, Any]) -> str:
    what = f"{check['num_samples']:,} samples in {check['precision']}"
    if check["error"] is not None:
        return f"{what}: not compared ({check['error']})."
    same = "the same" if check["same_twice"] else "other"
    plain = check["to_plain"]
    return (
        f"{what}: log-prob as drawn minus log-prob as scored {_difference(check)}; minus that of"
        f" the plain model, of {plain['num_samples']:,} of them, {_difference(plain)}. Drawn"
        f" again with the same seed: {same} tokens."
    )


def _difference(check: dict[str, Any]) -> str:
    return (
        f"{check['mean_difference']:+.5f} nats a continuation on average (standard error"
        f" {check['standard_error']:.5f}), at most {check['largest_difference']:.5f}"
    )


def _times(benchmark: dict[str, Any]) -> list[str]:
    names = [row["name"] for row in benchmark["rows"]]
    compared = {
        "time_at_many_to_few": ("Time", 0, 1),
        "peak_at_many_to_few": ("Peak memory", 0, 1),
        "time_with_heat_to_drawing": ("Time", 2, 3),
    }
    return [
        f"{what} of `{names[one]}`: {benchmark[key]:.2f} times that of `{names[other]}`."
        for key, (what, one, other) in compared.items()
        if benchmark.get(key) is not None
    ]


def headings(benchmark: dict[str, Any]) -> list[str]:
    return [benchmark["unit"], "we are", "at most", "first time", "compiling", "peak memory"]


def rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def cells(benchmark: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """What a row says below the headings."""
    compiling = row.get("compile_seconds")  # not known of what was measured earlier
    ratios = (benchmark.get(key, {}).get(row["name"]) for key in ("ours_to", "products_to"))
    return [
        rate_text(row["rate"]),
        *("" if ratio is None else f"{ratio:.2f} x" for ratio in ratios),
        f"{row['first_seconds']:.1f} s",
        f"{compiling:.1f} s" if compiling else "",
        f"{row['peak_bytes'] / 1e6:,.0f} MB",
    ]


def _table(benchmark: dict[str, Any]) -> list[str]:
    lines = [
        f"| | {' | '.join(headings(benchmark))} |",
        "| --- | " + " | ".join(["---:"] * len(headings(benchmark))) + " |",
    ]
    for row in benchmark["rows"]:
        if row["rate"] is not None:
            lines.append(f"| {row['name']} | {' | '.join(cells(benchmark, row))} |")
    return lines


def _chart(results: dict[str, Any]) -> bytes:
    """A bar for every alternative of every benchmark: our rate by its rate. Neither we ourselves
    with another setting nor the products alone are alternatives."""
    bars = [
        (f"{name}: {other}", ratio)
        for name, benchmark in results["benchmarks"].items()
        for other, ratio in benchmark["ours_to"].items()
        if other in benchmark.get("alternatives", benchmark["ours_to"])
    ][::-1]
    with style():
        figure, axes = new_chart(8, 0.8 + 0.32 * max(1, len(bars)))
        colours = [_COLOURS["ours" if ratio >= 1 else "other"] for _, ratio in bars]
        drawn = axes.barh([label for label, _ in bars], [ratio for _, ratio in bars], color=colours)
        axes.bar_label(drawn, [f" {ratio:.1f} x" for _, ratio in bars])
        axes.axvline(1, color=INK, linewidth=0.8)
        axes.set_xlabel("our rate by theirs")
        axes.margins(x=0.12)
        return image_of(figure, "svg")
