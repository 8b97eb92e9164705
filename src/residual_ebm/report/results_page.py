"""docs/results.md: every published result as a page, made from the numbers alone.

A published result is what `rebm results RUN --json` printed for a finished run, and the run's
analysis.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

from residual_ebm.config import SCRATCH
from residual_ebm.files.source_commit import short_commit
from residual_ebm.files.storage import write_bytes
from residual_ebm.report.charts import CYCLE, add_legend, image_of, new_chart, plot_curve, style
from residual_ebm.report.paper_figures import PaperFigure, paper_figures
from residual_ebm.report.paper_table import HEADINGS as ORDER_HEADINGS
from residual_ebm.report.paper_table import order_of_rows
from residual_ebm.report.published import Published, published_names, read_published
from residual_ebm.report.rows import (
    bounds_text,
    comparison_texts,
    comparisons_note,
    count_text,
    effective_text,
    growth_text,
    interval_text,
    items_seen,
    marked_name,
    number_text,
    pretrained_note,
    resampled_text,
    signed_text,
)
from residual_ebm.report.strength_table import HEADINGS as STRENGTH_HEADINGS
from residual_ebm.report.strength_table import strength

_COLUMNS = (
    "model",
    "params",
    "tokens read",
    "validation",
    "test",
    "95 %",
    "minus base",
    "gain",
    "resampled",
    "ESS",
    "k-hat passes",
)

_ENOUGH_TOKENS = 20  # for each parameter, about where training is usually stopped


def results_page(published: dict[str, Published]) -> str:
    lines = [
        "# Results",
        "",
        "Made by `make docs` from `src/residual_ebm/published/`; each folder there has what"
        " `rebm results RUN --json` printed for a run of the recipe of that name, and the run's"
        " `analysis.json`, which `rebm run` writes too.",
        "",
        "*Tokens read*: by the network of the row while it trained, behind what the encoder read"
        " that it started from, in tokens of the language model."
        " *Test*: perplexity; of joint models from the lower to the upper bound. *95 %*: bootstrap"
        " over documents. *Minus base*: the paired difference of the upper bound from the language"
        " model that the energy corrects, 95 %. *Gain*: how far the upper bound lies below that"
        " model. *Resampled*: of what is written by keeping one of n + 1 proposals in proportion to"
        " exp(-E), at most, and its gain; a bound at every n and for every energy, so that flagged"
        " rows can be quoted by it (docs/method.md). *ESS*: effective sample size. *k-hat passes*:"
        " for so many prefixes the tail of the weights is light enough to trust the estimate.",
    ]
    for name, (results, analysis) in published.items():
        lines += ["", *_section(name, results), *_order(results)]
        lines += _strength(results, analysis)
        lines += _figures(name, results, analysis)
    return "\n".join(lines) + "\n"


def _section(name: str, results: dict[str, Any]) -> list[str]:
    counts, num_tokens = results["num_prefixes"], results["block_length"]
    num_tokens -= results["prefix_length"]
    recipe = results["resolved_recipe"]
    commit = f", commit {short_commit(results['commit'])}" if results.get("commit") else ""
    lines = [
        f"## {name}",
        "",
        f"{recipe['description']}. `rebm run {name}`, version {results['version']}{commit};"
        f" {_times(results['timings'])}.{growth_text(results)}",
        "",
        f"{counts['test']} test prefixes and {counts['validation']} validation prefixes of"
        f" {results['prefix_length']} tokens, the next {num_tokens} scored;"
        f" n = {results['num_samples']} proposals a prefix.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "| --- |" + " ---: |" * (len(_COLUMNS) - 1),
        *(_language_model_row(row, recipe) for row in results["language_models"]),
        *(_joint_row(row, results) for row in results["joint_models"]),
        *(line for note in pretrained_note(results) for line in ("", note)),
        "",
        f"![Validation losses of {name}](results-{name}.svg)",
    ]
    for row in results["joint_models"]:
        if row["scaled"]:
            continue
        test = row["test"]
        bounds = ", ".join(
            f"{bounds_text(at)} at n = {at['num_samples']}" for at in test["bounds_at"]
        )
        flags = "".join(f" Flag: {flag}." for flag in test["flags"])
        mean, spread = (number_text(test[f"log_partition_{of}"]) for of in ("mean", "spread"))
        lines += [
            "",
            f"- {row['name']}: {bounds}; log Z {mean} ± {spread} over prefixes.{flags}"
            f"{resampled_text(test)}",
        ]
    return lines + _trials(results)


def _order(results: dict[str, Any]) -> list[str]:
    """Every model beside those above it, and the order of the paper's rows."""
    compared = comparison_texts(results)
    lines = [line for text in compared for line in ("", f"- {text}")]
    if compared:
        lines += ["", comparisons_note(results)]
    order = order_of_rows(results)
    if order:
        lines += [
            "",
            "The order of the paper's Table 1 (test perplexities on CC-News, 12 layers; 24 layers)"
            " and ours;"
            " differences are paired, over documents:",
            "",
            "| " + " | ".join(ORDER_HEADINGS) + " |",
            "| --- |" + " ---: |" * (len(ORDER_HEADINGS) - 1),
            *("| " + " | ".join(line) + " |" for line in order),
            *_short_of_tokens(results),
        ]
    return lines


def _strength(results: dict[str, Any], analysis: dict[str, Any] | None) -> list[str]:
    """Energies of several language models side by side."""
    found = strength(results, analysis)
    if found is None:
        return []
    return [
        "",
        found.text,
        "",
        "| " + " | ".join(STRENGTH_HEADINGS) + " |",
        "| --- |" + " ---: |" * (len(STRENGTH_HEADINGS) - 1),
        *("| " + " | ".join(line) + " |" for line in found.rows),
    ]


def _short_of_tokens(results: dict[str, Any]) -> list[str]:
    """A reservation about the order where language models from scratch have read little."""
    recipe = results["resolved_recipe"]
    rows = {row["name"]: row for row in results["language_models"]}
    shares = {
        config["name"]: items_seen(rows[config["name"]], config)
        * recipe["block"]["length"]
        / rows[config["name"]]["parameters"]
        for config in recipe["language_models"]
        if config["source"] == SCRATCH and config.get("residual_of") is None
    }
    if not shares or min(shares.values()) >= _ENOUGH_TOKENS:
        return []
    shown = ", ".join(f"{name} {share:.1f}" for name, share in shares.items())
    return [
        "",
        f"Tokens read for each parameter: {shown}. Language models go on learning well past"
        f" {_ENOUGH_TOKENS}, large ones longer, so an order with one of these in it says which is"
        " better after so short a training, not which would be in the end.",
    ]


def _figures(name: str, results: dict[str, Any], analysis: dict[str, Any] | None) -> list[str]:
    """The paper's figures, each with its caption and how it compares."""
    made = paper_figures(results, analysis)
    lines = []
    if made:
        lines += ["", f"### Figures of {name}", ""]
        commit = (analysis or {}).get("commit")
        by = f", its last stage by commit {short_commit(commit)}" if commit else ""
        drawn = f"drawn again by `rebm report runs/{name} --figures FOLDER`"
        lines.append(f"Made by `rebm run {name}`{by}; {drawn}.")
    for entry in made:
        lines += ["", f"![{entry.figure.title}]({_figure_file(name, entry)})", ""]
        figure = entry.figure
        lines.append(f"**{entry.of_paper}.** {figure.caption} {figure.made_of} {entry.comparison}")
    return lines


def _figure_file(name: str, entry: PaperFigure) -> str:
    return f"results-{name}-{entry.figure.name}.svg"


def _times(timings: dict[str, float]) -> str:
    parts = [f"{stage} {seconds / 60:.0f}" for stage, seconds in timings.items() if seconds >= 30]
    return f"{sum(timings.values()) / 60:.0f} minutes in all ({', '.join(parts)})"


def _trials(results: dict[str, Any]) -> list[str]:
    """Learning rates that were tried, each for a tenth of the steps."""
    lines = []
    for row in [*_started_from(results), *results["joint_models"]]:
        trials = row["training"].get("trials") or []
        if trials and not row.get("scaled"):
            tried = ", ".join(
                f"{trial['learning_rate']:g} "
                + ("lost" if trial["loss"] is None else f"{trial['loss']:.3f}")
                for trial in trials
            )
            chosen = row["training"]["learning_rate"]
            lines += ["", f"- {row['name']}: validation loss at each learning rate after a tenth"]
            lines[-1] += f" of the steps: {tried}; {chosen:g} was taken."
    return lines


def _encoders(results: dict[str, Any]) -> list[dict[str, Any]]:
    return results.get("encoders", [])  # older results have none


def _started_from(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [*results["language_models"], *_encoders(results)]


def _language_model_row(row: dict[str, Any], recipe: dict[str, Any]) -> str:
    config = next(entry for entry in recipe["language_models"] if entry["name"] == row["name"])
    read = items_seen(row, config) * recipe["block"]["length"]
    cells = [
        row["name"],
        count_text(row["parameters"]),
        count_text(read) if read else "",
        number_text(row["validation"]["value"]),
        number_text(row["test"]["value"]),
        interval_text(row["test"]["published"]),
    ]
    return "| " + " | ".join([*cells, *[""] * (len(_COLUMNS) - len(cells))]) + " |"


def _joint_row(row: dict[str, Any], results: dict[str, Any]) -> str:
    test = row["test"]
    base = next(
        entry for entry in results["language_models"] if entry["name"] == row["language_model"]
    )
    cells = [
        marked_name(row),
        count_text(row["parameters"]),
        "" if row["scaled"] else _read_by_energy(row, results),
        bounds_text(row["validation"]),
        bounds_text(test),
        interval_text(test["published"]),
        signed_text(test["difference_from_base"]),
        _gain(test["upper"], base["test"]["value"]),
        _resampled(test, base["test"]["value"]),
        effective_text(test),
        f"{1 - test['share_past_pareto_k']:.0%}",
    ]
    return "| " + " | ".join(cells) + " |"


def _resampled(test: dict[str, Any], base: float | None) -> str:
    if "resampled" not in test:
        return ""  # results made before it was known
    return f"{number_text(test['resampled'])} ({_gain(test['resampled'], base)})"


def _gain(upper: float | None, base: float | None) -> str:
    return "?" if upper is None or base is None else f"{1 - upper / base:.1%}"


def _read_by_energy(row: dict[str, Any], results: dict[str, Any]) -> str:
    recipe = results["resolved_recipe"]
    configs = [entry for entry in recipe["energies"] if entry["name"] == row["energy"]]
    if not configs:
        return ""  # a sum of others
    block, config = recipe["block"], configs[0]
    prefix, own = block["prefix_length"], block["length"] - block["prefix_length"]
    blocks = 1 + config["negatives_per_positive"]
    # HeaT reads continuations alone, UniT a prefix once for all its blocks.
    read = {"heat": blocks * own, "unit": prefix + blocks * own, "bit": blocks * (prefix + own)}
    own_tokens = count_text(items_seen(row, config) * read[config["kind"]])
    encoder = str(config["source"]).removeprefix("encoder:")
    before = [
        count_text(items_seen(entry, learnt) * block["length"])
        for entry in _encoders(results)
        for learnt in recipe["encoders"]
        if entry["name"] == learnt["name"] == encoder
    ]
    return " + ".join([*before, own_tokens])


def curves(results: dict[str, Any]) -> bytes:
    """Validation losses by step, energies apart from what they start from."""
    plain = [row for row in results["joint_models"] if not row["scaled"]]
    groups = {"language models, encoders": _started_from(results), "energies": plain}
    with style():
        figure, both = new_chart(9, 3.4, columns=2)
        for axes, (title, rows) in zip(both, groups.items(), strict=True):
            for colour, row in zip(itertools.cycle(CYCLE), rows, strict=False):
                points = row["training"].get("validations") or []
                if points:
                    losses = [(point["step"], point["loss"]) for point in points]
                    plot_curve(axes, losses, row["name"], color=colour)
            axes.set_title(title)
            axes.set_xlabel("step")
            axes.set_ylabel("validation loss")
            if axes.has_data():
                add_legend(axes)
        return image_of(figure, "svg")


def write_results_page(path: Path) -> None:
    """The page, with a chart beside it for each result."""
    published = {name: read_published(name) for name in published_names()}
    complete = {
        name: one
        for name, one in published.items()
        if one is not None and "resolved_recipe" in one.results
    }
    for name, (results, analysis) in complete.items():
        write_bytes(path.with_name(f"results-{name}.svg"), curves(results))
        for entry in paper_figures(results, analysis):
            image = image_of(entry.figure.chart(alone=True), "svg")
            write_bytes(path.with_name(_figure_file(name, entry)), image)
    write_bytes(path, results_page(complete).encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    write_results_page(parser.parse_args().path)
