"""report.html and report.md: the story of one run, or of several side by side.

Everything comes from the JSON files of the runs. All text goes through the template's escaping; the
only markup put in as it is are charts, which are ours.
"""

import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.source_commit import short_commit
from residual_ebm.report.charts import INK, image_of
from residual_ebm.report.figures import run_figures
from residual_ebm.report.rows import (
    FLAGGED,
    HEADINGS,
    base_perplexity,
    best_row,
    bounds_text,
    caption_text,
    estimate_text,
    gap_text,
    growth_text,
    notes,
    number_text,
    one_line,
    signed_text,
    table_rows,
    tail_text,
)
from residual_ebm.report.run_figure import RunFigure
from residual_ebm.report.story import Piece, compare_texts, verdict
from residual_ebm.report.strength_table import HEADINGS as STRENGTH_HEADINGS
from residual_ebm.report.strength_table import strength

_SHOWN_TOKENS = 5
_ROLES = {
    "base": "base",
    "joint": "joint",
    "highest_energy": "highest energy",
    "real": "real text",
}
WORDS = (
    ("lower, upper", "two estimates of the same perplexity that close in on it as n grows"),
    ("95 %", "bootstrap over documents: what another set of such documents might have given"),
    ("minus base", "95 % interval of the upper bound minus the language model below it, paired"),
    ("ESS", "effective sample size: how many equal weights the n unequal ones are worth"),
    ("k-hat", "how heavy the tail of the weights is; past its threshold a few proposals decide"),
    (
        "resampled",
        "of what is written by keeping one of n + 1 proposals (`rebm generate`, without top-k);"
        " a bound at every n, whatever the flags",
    ),
    ("x0.9", "the energy scaled by a factor fitted on validation"),
    ("E", "energy of a passage: low looks real, high looks machine-written"),
)


@dataclass(frozen=True)
class Run:
    """What a report needs of one run."""

    name: str
    results: dict[str, Any]
    analysis: dict[str, Any] | None
    timings: dict[str, float]

    @property
    def figures(self) -> list[RunFigure]:
        return run_figures(self.results, self.analysis)


def read_run(folder: Path) -> Run:
    run_dir = RunDirectory(folder)
    run_dir.recipe()
    results = run_dir.read_results()
    run_dir.check_results()
    return Run(folder.resolve().name, results, run_dir.read_analysis(), run_dir.read_timings())


def html_report(runs: list[Run]) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(
        files("residual_ebm.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    )
    views = [_view(run, f"run-{number}") for number, run in enumerate(runs, start=1)]
    title = " and ".join(run.name for run in runs) + ": residual energy-based model"
    fixed = {
        "words": WORDS,
        "summary_headings": SUMMARY_HEADINGS,
        "comparable": COMPARABLE,
        "detection_headings": DETECTION_HEADINGS,
        "strength_headings": STRENGTH_HEADINGS,
    }
    return template.render(title=title, runs=views, **fixed) + "\n"


def _view(run: Run, identity: str) -> dict[str, Any]:
    results = run.results
    return {
        "id": identity,
        "name": run.name,
        "description": f"{results['resolved_recipe']['description']}. Text: {results['corpus']}.",
        "verdict": verdict(results),
        "summary": summary_cells(results),
        "detection": detection_rows(results),
        "strength": strength(results, run.analysis),
        "headings": HEADINGS,
        "rows": table_rows(results),
        "caption": caption_text(results),
        "notes": notes_of(run),
        "has_energies": bool(results["joint_models"]),
        "flags": [
            {"row": row["name"], "text": flag}
            for row in results["joint_models"]
            for flag in row["test"]["flags"]
        ],
        "figures": [
            {
                "name": figure.name,
                "title": figure.title,
                "caption": f"{figure.caption} {figure.made_of}",
                "svg": _inline(image_of(figure.chart(), "svg", inline=True)),
            }
            for figure in run.figures
        ],
        "gap": gap_of(run),
        "examples": _examples(results),
        "repeats": repeats_of(run),
        "examples_note": examples_note(results),
        "made": made_text(results),
        "timings": [(stage, time_text(seconds)) for stage, seconds in run.timings.items()],
        "recipe": yaml.safe_dump(results["resolved_recipe"], sort_keys=False, allow_unicode=True),
    }


def notes_of(run: Run) -> list[str]:
    """What stands below the table."""
    found = [*notes(run.results), *map(estimate_text, run.results["joint_models"])]
    if run.analysis is None:
        found.append("No figures: the analysis is missing or old; `rebm run` makes it anew.")
    return found


SUMMARY_HEADINGS = (
    "corpus",
    "prefix + rest",
    "test prefixes",
    "n",
    "seed",
    "best energy",
    "language model",
    "joint",
    "minus base",
    "flags",
)
COMPARABLE = (
    "Perplexities can only be compared where corpus, tokenizer, prefix and rest are the same."
)


def summary_cells(results: dict[str, Any]) -> list[str]:
    row = best_row(results)
    prefix = results["prefix_length"]
    made_of = [
        results["corpus"],
        f"{prefix} + {results['block_length'] - prefix}",
        str(results["num_prefixes"]["test"]),
        str(results["num_samples"]),
        str(results["seed"]),
    ]
    if row is None:
        first = results["language_models"][0]
        shown = f"{first['name']} {number_text(first['test']['value'])}"
        return [*made_of, "", shown, "", "", ""]
    return [
        *made_of,
        f"{row['energy']}{FLAGGED if row['test']['flags'] else ''}",
        f"{row['language_model']} {number_text(base_perplexity(results, row))}",
        bounds_text(row["test"]),
        signed_text(row["test"]["difference_from_base"]),
        str(len(row["test"]["flags"]) or "-"),
    ]


def _inline(svg: bytes) -> str:
    """The chart without what only a file needs, in the page's own colour of text."""
    text = svg.decode("utf-8")
    return text[text.index("<svg") :].replace(INK, "currentColor")


def gap_of(run: Run) -> dict[str, Any] | None:
    """How far the language model is from the text, and the passages that show it; also those where
    the joint model does worst, with what both models wrote there."""
    row = best_row(run.results)
    if row is None or "resampled" not in row["test"]:  # an older gap was no bound at every n
        return None
    best, test = row["energy"], row["test"]
    sentence = gap_text(row["language_model"], best, test["gap"], test["gap_interval"])
    counts = (
        f"{run.results['num_prefixes']['test']} test passages, n = {run.results['num_samples']}."
    )
    titles = {
        "largest_gap": "Passages that the joint model gains most on",
        "smallest_gap": "Passages where the joint model does worst",
    }
    passages = (run.analysis or {}).get("energies", {}).get(best, {}).get("passages", {})
    groups = [
        {
            "title": titles[which],
            "passages": [
                {
                    "prefix": tail_text(passage["prefix"]),
                    "continuation": one_line(passage["continuation"]),
                    "gap": f"{passage['gap']:+.2f} nats; log P_LM {passage['lm_log_prob']:.1f}",
                    "written": [
                        (model, one_line(passage[model]))
                        for model in ("base", "joint")
                        if model in passage
                    ],
                }
                for passage in found
            ],
        }
        for which, found in passages.items()
    ]
    return {"sentence": f"{sentence} {counts}", "groups": groups}


def repeats_of(run: Run) -> dict[str, Any] | None:
    """Contexts in which the language model repeats itself, and both models' next tokens."""
    steps = (run.analysis or {}).get("per_step") or {}
    entries = steps.get("repeats")
    if not entries:
        return None
    repeats = [entry for entry in entries if entry["is_repeat"]]
    others = [entry for entry in entries if not entry["is_repeat"]]
    return {
        "sentence": (
            "Contexts, chosen by seed, in which a sample of the language model says again three"
            " tokens, all of words, that the text has said. On average the joint model"
            f" {steps['energy']} changes the log-prob of the third by {_mean_change(repeats)}; at"
            " other places, also chosen by seed, where the sample says something new, by"
            f" {_mean_change(others)} ({entries[0]['num_samples']} completions of each of the"
            " language model's 128 likeliest tokens). What the language model sampled is what it"
            " likes, so both are expected below 0; what counts is which of them is lower. Shown:"
            " the likeliest next tokens of both models, normalised among the ten best of each;"
            " marked: the repeated one."
        ),
        "contexts": [_repeat(entry) for entry in repeats],
    }


def _mean_change(entries: list[dict[str, Any]]) -> str:
    changes = [
        math.log(entry["joint"] / entry["base"]) for entry in entries if entry["base"] is not None
    ]
    if not changes:
        return "? nats (no place)"
    places = "1 place" if len(changes) == 1 else f"{len(changes)} places"
    return f"{sum(changes) / len(changes):+.3f} nats ({places})"


def _repeat(entry: dict[str, Any]) -> dict[str, Any]:
    models = (("base", "language model"), ("joint", "joint"))
    chances = ", ".join(
        f"{label} {'?' if entry[model] is None else format(entry[model], '.3f')}"
        for model, label in models
    )
    return {
        "context": tail_text(entry["context"]),
        "chances": f"Repeated: {entry['sampled']!r}; its probability: {chances}.",
        "columns": [
            (
                label,
                [
                    (one["token"], one["is_sampled"], f"{one['probability']:.2f}")
                    for one in entry[f"best_{model}"][:_SHOWN_TOKENS]
                ],
            )
            for model, label in models
        ],
    }


def _examples(results: dict[str, Any]) -> list[dict[str, Any]]:
    examples = []
    for example in results["examples"]:
        real = one_line(example["real"]["text"])
        samples = []
        for role, label in _ROLES.items():
            text = one_line(example[role]["text"])
            pieces = [Piece(text, False)] if role == "real" else compare_texts(text, real)
            energy = f"{example[role]['energy']:+.2f}"
            samples.append({"role": label, "energy": energy, "pieces": pieces})
        examples.append({"prefix": tail_text(example["prefix"]), "samples": samples})
    return examples


def examples_note(results: dict[str, Any]) -> str:
    return (
        f"Prefixes chosen by seed {results['seed']}, never by hand; samples by the energy"
        f" {results['best_energy']}. Marked: words that the real text has not in that place."
    )


DETECTION_HEADINGS = ("energy", "text", "prefixes", "NCE loss", "accuracy", "AUC")


def detection_rows(results: dict[str, Any]) -> list[list[str]]:
    """How well each energy tells real text from samples: on what it learnt from, and on other."""
    return [
        [
            row["energy"],
            split,
            str(found["num_prefixes"]),
            f"{found['loss']:.3f}",
            f"{found['accuracy']:.1%}",
            f"{found['auc']:.3f}",
        ]
        for row in results["joint_models"]
        if not row["scaled"]
        for split, found in (row["training"].get("detection") or {}).items()
    ]


def made_text(results: dict[str, Any]) -> str:
    commit = f", commit {short_commit(results['commit'])}" if results.get("commit") else ""
    recipe = results["resolved_recipe"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"rebm run {results['recipe']}, residual-ebm {results['version']}{commit}, seed"
        f" {results['seed']}; {recipe['precision']} on {recipe['threads']} threads; {versions}."
        f"{growth_text(results)}"
    )


def time_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
