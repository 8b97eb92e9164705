"""The same story as Markdown, for a repository or a paper; figures are files beside it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from residual_ebm.report.page import (
    COMPARABLE,
    DETECTION_HEADINGS,
    SUMMARY_HEADINGS,
    Run,
    detection_rows,
    examples_note,
    gap_of,
    made_text,
    notes_of,
    repeats_of,
    summary_cells,
    time_text,
)
from residual_ebm.report.rows import (
    HEADINGS,
    caption_text,
    one_line,
    table_rows,
    tail_text,
)
from residual_ebm.report.story import verdict
from residual_ebm.report.strength_table import HEADINGS as STRENGTH_HEADINGS
from residual_ebm.report.strength_table import strength


def markdown_report(runs: list[Run], figures: dict[str, Path]) -> str:
    """`figures` names the folder of each run's figures, as the page refers to it."""
    lines: list[str] = []
    if len(runs) > 1:
        rows = [[run.name, *summary_cells(run.results)] for run in runs]
        lines += ["# Side by side", "", *_table(("run", *SUMMARY_HEADINGS), rows), "", COMPARABLE]
        lines.append("")
    for run in runs:
        lines += _section(run, figures[run.name])
    return "\n".join(lines).strip() + "\n"


def _section(run: Run, figures: Path) -> list[str]:
    results = run.results
    flags = [
        f"- {plain(row['name'])}: {plain(flag)}"
        for row in results["joint_models"]
        for flag in row["test"]["flags"]
    ]
    lines = [
        f"# {plain(run.name)}",
        "",
        f"**{plain(verdict(results).text)}**",
        "",
        *_table(HEADINGS, [row.cells for row in table_rows(results)]),
        "",
        plain(caption_text(results)),
        "",
        *(f"- {plain(note)}" for note in notes_of(run)),
        "",
        "## Can it be trusted?",
        "",
        *(flags or ["No diagnostic objects." if results["joint_models"] else "Nothing to doubt."]),
    ]
    detection = detection_rows(results)
    if detection:
        lines += ["", *_table(DETECTION_HEADINGS, detection)]
    found = strength(results, run.analysis)
    if found is not None:
        lines += ["", *_table(STRENGTH_HEADINGS, found.rows), "", plain(found.text)]
    lines += ["", "## Figures"]
    for figure in run.figures:
        image = (figures / f"{figure.name}.svg").as_posix()
        caption = plain(f"{figure.caption} {figure.made_of}")
        lines += ["", f"![{plain(figure.title)}](<{image}>)", "", caption]
    gap = gap_of(run)
    if gap is not None:
        lines += ["", "## Where the language model is furthest from the text", ""]
        lines.append(plain(gap["sentence"]))
        for group in gap["groups"]:
            lines += ["", f"### {plain(group['title'])}"]
            for passage in group["passages"]:
                text = f"{plain(passage['prefix'])} **{plain(passage['continuation'])}**"
                lines += ["", f"> {text} ({plain(passage['gap'])})"]
                for model, written in passage["written"]:
                    lines += [">", f"> {model} wrote: {plain(written)}"]
    return [*lines, *_examples(results), *_repeats(run), *_made(run)]


def _examples(results: dict[str, Any]) -> list[str]:
    lines = ["", "## Examples", "", plain(examples_note(results))] if results["examples"] else []
    for example in results["examples"]:
        lines += ["", f"> {plain(tail_text(example['prefix']))}", ""]
        for role in ("base", "joint", "highest_energy", "real"):
            sample = example[role]
            label = role.replace("_", " ")
            text = plain(one_line(sample["text"]))
            lines.append(f"- {label} (E {sample['energy']:+.2f}): {text}")
    return lines


def _repeats(run: Run) -> list[str]:
    repeats = repeats_of(run)
    if repeats is None:
        return []
    lines = ["", "## Where the language model repeats itself", "", plain(repeats["sentence"])]
    for repeat in repeats["contexts"]:
        lines += ["", f"> {plain(repeat['context'])}", "", plain(repeat["chances"]), ""]
        for label, tokens in repeat["columns"]:
            shown = ", ".join(
                f"{_code(token)}{' (repeated)' if is_repeated else ''} {probability}"
                for token, is_repeated, probability in tokens
            )
            lines.append(f"- {label}: {shown}")
    return lines


def _made(run: Run) -> list[str]:
    times = ", ".join(f"{stage} {time_text(seconds)}" for stage, seconds in run.timings.items())
    recipe = yaml.safe_dump(run.results["resolved_recipe"], sort_keys=False, allow_unicode=True)
    return [
        "",
        "## How it was made",
        "",
        f"{plain(made_text(run.results))} {plain(times)}.",
        "",
        *(f"    {line}" for line in recipe.splitlines()),
        "",
    ]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(headings) + " |",
        "| --- |" + " ---: |" * (len(headings) - 1),
        *("| " + " | ".join(map(plain, row)) + " |" for row in rows),
    ]


def _code(token: str) -> str:
    """A token with its blanks seen."""
    return f"<code>{plain(token)}</code>"


def plain(text: str) -> str:
    """Text that Markdown and HTML leave as it is."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]#|~$])", r"\\\1", escaped)
