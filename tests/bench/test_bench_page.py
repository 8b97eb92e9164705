"""The page of benchmarks says what was measured, what was not, and why."""

import json
from pathlib import Path
from typing import Any

from residual_ebm.report.bench_page import read_page, write_page


def row(name: str, rate: float | None, **more: Any) -> dict[str, Any]:
    measured = {
        "first_seconds": 12.5,
        "compile_seconds": 4.25,
        "seconds": [1.0],
        "peak_bytes": 3_000_000,
        "error": None,
    }
    broken: dict[str, Any] = {
        "first_seconds": None,
        "compile_seconds": None,
        "seconds": [],
        "peak_bytes": None,
        "error": "not installed",
    }
    return {"name": name, "rate": rate, **(broken if rate is None else measured), **more}


MEASURED = {
    "date": "2026-11-16",
    "version": "1.2.3",
    "commit": "0123456789abcdef",
    "cores": 2,
    "processor": "A processor",
    "python": "3.11",
}
RESULTS: dict[str, Any] = {
    "setting": {"threads": 2, "precision": "bfloat16", "repeats": 5},
    "benchmarks": {
        "decode": {
            "unit": "tokens/s",
            "rows": [
                row("residual-ebm", 3000.0),
                row("theirs", 1500.0, compile_seconds=0.0),
                row("matrix products alone", 3750.0),
                row("engine", None),
            ],
            "engines": {"an-engine": "4.5"},
            "sweep": [
                row("theirs, batch 16", 700.0),
                row("theirs, batch 32", None),
                row("theirs, batch 64", 600.0, seconds=[12.5]),
            ],
            "ours_to": {"theirs": 2.0, "matrix products alone": 0.8},
            "alternatives": ["theirs", "engine"],
            "products_to": {"residual-ebm": 1.25, "theirs": 2.5},
            "measured": MEASURED,
        },
        "evaluate": {
            "unit": "samples/s",
            "rows": [
                row("residual-ebm, n = 10", 20.0),
                row("residual-ebm, n = 1", 21.0),
                row("heat", 19.0),
                row("drawing", 20.0),
            ],
            "sweep": [],
            "remark": "Measured by night.",
            "settings_of": ["decode", "score"],
            "ours_to": {"residual-ebm, n = 1": 0.95, "slower": 5.5},
            "alternatives": ["slower"],
            "products_to": {},
            "time_at_many_to_few": 10.5,
            "time_with_heat_to_drawing": 1.05,
            "peak_at_many_to_few": 1.01,
            "measured": MEASURED,
        },
        "agreement": {
            "unit": "",
            "rows": [],
            "sweep": [],
            "ours_to": {},
            "products_to": {},
            "measured": {**MEASURED, "commit": None},
            "agreement": [
                {
                    "precision": "bfloat16",
                    "num_samples": 2000,
                    "mean_difference": -0.0025,
                    "standard_error": 0.001,
                    "largest_difference": 0.3,
                    "to_plain": {
                        "num_samples": 100,
                        "mean_difference": 0.001,
                        "standard_error": 0.002,
                        "largest_difference": 0.25,
                    },
                    "same_twice": True,
                    "error": None,
                }
            ],
        },
    },
}


def test_the_page_holds_every_number(tmp_path: Path) -> None:
    path = tmp_path / "speed.md"
    write_page(RESULTS, path)
    page = path.read_text()
    assert "medians of 5 rounds" in page
    assert "\n\nMeasured by night.\n\n| | samples/s |" in page
    assert "Settings of alternatives: what `decode` and `score` found" in page
    assert "| theirs | 1,500 | 2.00 x | 2.50 x | 12.5 s |  | 3 MB |" in page
    assert "| residual-ebm | 3,000 |  | 1.25 x | 12.5 s | 4.2 s | 3 MB |" in page
    assert (
        "| | tokens/s | we are | at most | first time | compiling | peak memory |\n| --- |" in page
    )
    assert "| residual-ebm, n = 10 | 20.0 |  |" in page
    assert "engine: not measured (not installed)." in page
    assert "- theirs, batch 16: 700 tokens/s\n" in page
    assert "- theirs, batch 64: 600 tokens/s in a first turn\n" in page
    assert "- theirs, batch 32: not installed" in page
    assert "Time of `residual-ebm, n = 10`: 10.50 times that of `residual-ebm, n = 1`." in page
    assert "2,000 samples in bfloat16: log-prob as drawn minus log-prob as scored -0.00250" in page
    assert "minus that of the plain model, of 100 of them, +0.00100 nats" in page
    assert "Peak memory of `residual-ebm, n = 10`: 1.01 times that of `residual-ebm" in page
    assert "- theirs, batch 16" in page
    assert "Time of `heat`: 1.05 times that of `drawing`." in page
    assert "![How many times as fast as each alternative](speed.svg)" in page
    by = "2026-11-16, version 1.2.3, commit 0123456789, on 2 cores (A processor)."
    assert f"{by} With an-engine 4.5.\n" in page
    assert f"{by}\n" in page
    assert "2026-11-16, version 1.2.3, on 2 cores (A processor)." in page
    assert json.loads((tmp_path / "speed.json").read_text()) == read_page(path) == RESULTS
    assert read_page(tmp_path / "other.md") is None


def test_processors_that_differ_are_told(tmp_path: Path) -> None:
    sentence = "Not everything was measured on the same processor"
    write_page(RESULTS, tmp_path / "page.md")
    assert sentence not in (tmp_path / "page.md").read_text()
    elsewhere = {**RESULTS["benchmarks"]["decode"], "measured": {**MEASURED, "processor": "B"}}
    benchmarks = {**RESULTS["benchmarks"], "decode": elsewhere}
    write_page({**RESULTS, "benchmarks": benchmarks}, tmp_path / "page.md")
    assert sentence in (tmp_path / "page.md").read_text()


def test_the_chart_has_a_bar_for_each_alternative_and_is_repeatable(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_page(RESULTS, tmp_path / f"{name}.md")
    chart = (tmp_path / "one.svg").read_bytes()
    assert chart == (tmp_path / "two.svg").read_bytes()
    text = chart.decode()
    for label in ("decode: theirs", "evaluate: slower", "2.0 x", "5.5 x"):
        assert label in text
    # We are no alternative to ourselves, nor are products with nothing between them.
    for label in ("n = 1", "products alone"):
        assert label not in text
