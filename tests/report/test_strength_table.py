"""Energies on weaker and stronger language models, side by side, on results made up for it."""

import math
from pathlib import Path
from typing import Any

import pytest

from residual_ebm.report.markdown import markdown_report
from residual_ebm.report.page import Run, html_report, read_run
from residual_ebm.report.paper_figures import paper_figures
from residual_ebm.report.published import Published
from residual_ebm.report.results_page import results_page
from residual_ebm.report.rows import marked_name
from residual_ebm.report.strength_table import HEADINGS, Strength, strength

Numbers = tuple[dict[str, Any], dict[str, Any]]
TITLE = "stronger language models?"


@pytest.fixture
def several(tiny_run: Path) -> Numbers:
    """`unit` is of a weaker language model than `heat`; the third energy is left out."""
    run = read_run(tiny_run)
    results, analysis = run.results, run.analysis
    assert analysis is not None
    results["timings"] = run.timings
    base = results["language_models"][0]
    weak = {**base, "name": "weak", "test": {**base["test"], "value": 2 * base["test"]["value"]}}
    results["language_models"].append(weak)
    recipe = results["resolved_recipe"]
    config = recipe["language_models"][0]
    training = {**config["training"], "batch_size": config["training"]["batch_size"] // 2}
    recipe["language_models"].append({**config, "name": "weak", "training": training})
    results["joint_models"] = [
        {**row, "language_model": {"unit": "weak", "heat": base["name"]}[row["energy"]]}
        for row in results["joint_models"]
        if row["energy"] in ("unit", "heat")
    ]
    del analysis["energies"]["bit"]
    return results, analysis


def found_in(results: dict[str, Any], analysis: dict[str, Any] | None) -> Strength:
    found = strength(results, analysis)
    assert found is not None
    return found


def cells_of(found: Strength) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(HEADINGS, row, strict=True)) for row in found.rows}


def joint_row(results: dict[str, Any], energy: str) -> dict[str, Any]:
    (row,) = [
        row for row in results["joint_models"] if row["energy"] == energy and not row["scaled"]
    ]
    return row


def test_the_weakest_comes_first_with_its_numbers(several: Numbers) -> None:
    results, analysis = several
    found = found_in(*several)
    cells = cells_of(found)
    assert list(cells) == ["weak", "base"]
    for name, energy in (("weak", "unit"), ("base", "heat")):
        row = joint_row(results, energy)
        test = row["test"]
        base = {one["name"]: one["test"]["value"] for one in results["language_models"]}[name]
        assert cells[name][""] == marked_name(row)
        assert cells[name]["its perplexity"] == f"{base:.2f}"
        gain = f"{1 - test['resampled'] / base:.1%}"
        assert cells[name]["resampled"] == f"{test['resampled']:.2f} ({gain})"
        assert cells[name]["nats a passage"] == f"{test['gap']:+.2f}"
        accuracy = row["training"]["detection"]["validation"]["accuracy"]
        assert cells[name]["NCE accuracy"] == f"{accuracy:.1%}"
        gains = analysis["energies"][energy]["weights"]["gains"]
        assert cells[name]["demoting alone"] == f"{gains['demoting']:+.2f}"
        assert cells[name]["promoting alone"] == f"{gains['promoting']:+.2f}"
        assert cells[name]["text outweighs all"] == f"{test['share_outweighed']:.0%}"
    assert cells["weak"]["tokens read"] != cells["base"]["tokens read"]
    assert f"{math.log(results['num_samples'] + 1):.2f}" in found.text


def test_sums_are_left_out(several: Numbers) -> None:
    results, analysis = several
    results["joint_models"].append({**joint_row(results, "heat"), "energy": "a sum"})
    assert len(found_in(results, analysis).rows) == 2


def test_one_language_model_is_no_comparison(tiny_run: Path) -> None:
    run = read_run(tiny_run)
    assert strength(run.results, run.analysis) is None
    assert TITLE not in html_report([run])


def test_what_older_runs_lack_is_left_empty(several: Numbers) -> None:
    results, _ = several
    for row in results["joint_models"]:
        row["training"].pop("detection", None)
    cells = cells_of(found_in(results, None))
    for row in cells.values():
        assert row["NCE accuracy"] == row["demoting alone"] == row["promoting alone"] == ""
        assert row["resampled"]


@pytest.mark.parametrize(
    ("weak", "strong", "found"),
    [
        ((1.0, 2.0), (3.0, 4.0), "larger on the stronger one"),
        ((3.0, 4.0), (1.0, 2.0), "larger on the weaker one"),
        ((1.0, 3.0), (2.0, 4.0), "undecided"),
        ((None, None), (2.0, 4.0), "undecided"),
    ],
)
def test_the_ends_are_compared_by_their_intervals(
    several: Numbers, weak: Any, strong: Any, found: str
) -> None:
    results, analysis = several
    for energy, (low, high) in (("unit", weak), ("heat", strong)):
        joint_row(results, energy)["test"]["gap_interval"] = {"low": low, "high": high}
    assert found in found_in(results, analysis).text


def test_the_page_of_results_and_reports_have_it(several: Numbers, tmp_path: Path) -> None:
    found = found_in(*several)
    page = results_page({"tiny": Published(*several)})
    assert found.text in page
    run = Run("several", *several, timings={})
    as_html, as_markdown = html_report([run]), markdown_report([run], {"several": tmp_path})
    assert TITLE in as_html
    for row in found.rows:
        assert "| " + " | ".join(row) + " |" in page
        for cell in row:
            assert f"<td>{cell}</td>" in as_html
            assert cell in as_markdown


@pytest.mark.parametrize(
    ("interval", "found"),
    [
        ((-0.4, -0.2), "promoting alone gains more: unit"),
        ((0.2, 0.7), "demoting alone gains more: unit"),
        ((-0.4, 0.6), "undecided: unit"),
        ((None, None), "undecided: unit"),
    ],
)
def test_what_the_paper_supposes_is_decided_by_the_interval(
    tiny_run: Path, interval: tuple[float, float], found: str
) -> None:
    run = read_run(tiny_run)
    assert run.analysis is not None
    gains = run.analysis["energies"]["unit"]["weights"]["gains"]
    gains["demoting_minus_promoting"] = dict(zip(("low", "high"), interval, strict=True))
    (entry,) = [
        entry
        for entry in paper_figures(run.results, run.analysis)
        if entry.figure.name == "reweighting"
    ]
    assert found in entry.comparison


def test_an_older_analysis_has_no_such_figure(tiny_run: Path) -> None:
    run = read_run(tiny_run)
    assert run.analysis is not None
    for entry in run.analysis["energies"].values():
        entry["weights"] = {"quantiles": entry["weights"]["quantiles"]}
    names = [entry.figure.name for entry in paper_figures(run.results, run.analysis)]
    assert "bounds" in names
    assert "reweighting" not in names
