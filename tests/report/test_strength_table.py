"""Energies on weaker and stronger language models, side by side, on results made up for it."""

from pathlib import Path
from typing import Any

import pytest

from residual_ebm.report.page import html_report, read_run
from residual_ebm.report.paper_figures import paper_figures
from residual_ebm.report.published import Published
from residual_ebm.report.results_page import results_page
from residual_ebm.report.strength_table import HEADINGS, strength_rows, strength_text

Numbers = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture
def several(tiny_run: Path) -> Numbers:
    """`unit` is of a weaker language model than the others, which are left out but for `heat`."""
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
    return results, analysis


def cells_of(numbers: Numbers) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(HEADINGS, row, strict=True)) for row in strength_rows(*numbers)}


def joint_row(results: dict[str, Any], energy: str) -> dict[str, Any]:
    (row,) = [
        row for row in results["joint_models"] if row["energy"] == energy and not row["scaled"]
    ]
    return row


def test_the_weakest_comes_first_with_its_numbers(several: Numbers) -> None:
    results, analysis = several
    cells = cells_of(several)
    assert list(cells) == ["weak", "base"]
    for name, energy in (("weak", "unit"), ("base", "heat")):
        row = joint_row(results, energy)
        test = row["test"]
        (base,) = [
            one["test"]["value"] for one in results["language_models"] if one["name"] == name
        ]
        assert cells[name]["energy"] == energy
        assert cells[name]["test"] == f"{base:.2f}"
        assert cells[name]["gain"] == f"{1 - test['resampled'] / base:.1%}"
        accuracy = row["training"]["detection"]["validation"]["accuracy"]
        assert cells[name]["NCE accuracy"] == f"{accuracy:.1%}"
        promoted = analysis["energies"][energy]["weights"]["promoted"]
        assert cells[name]["promoted"].startswith(f"{promoted:.1%} (")
    assert cells["weak"]["tokens read"] != cells["base"]["tokens read"]


def test_one_language_model_is_no_comparison(tiny_run: Path) -> None:
    run = read_run(tiny_run)
    assert strength_rows(run.results, run.analysis) == []
    assert "stronger language models" not in html_report([run])


def test_without_its_analysis_the_rest_is_told(several: Numbers) -> None:
    cells = cells_of((several[0], {}))
    assert [row["promoted"] for row in cells.values()] == ["", ""]
    assert all(row["gain"] for row in cells.values())


@pytest.mark.parametrize(
    ("weak", "strong", "found"), [(0.9, 0.6, "falls throughout"), (0.6, 0.9, "rises throughout")]
)
def test_trends_are_counted(several: Numbers, weak: float, strong: float, found: str) -> None:
    results, _ = several
    for energy, accuracy in (("unit", weak), ("heat", strong)):
        detection = joint_row(results, energy)["training"]["detection"]
        detection["validation"]["accuracy"] = accuracy
    assert f"NCE accuracy on validation {found}," in strength_text(results)


def test_the_page_of_results_has_it(several: Numbers) -> None:
    page = results_page({"tiny": Published(*several)})
    assert strength_text(several[0]) in page
    for row in strength_rows(*several):
        assert "| " + " | ".join(row) + " |" in page


@pytest.mark.parametrize(
    ("interval", "found"),
    [
        ((0.2, 0.4), "a few are promoted: unit"),
        ((0.6, 0.7), "the worst are demoted: unit"),
        ((0.4, 0.6), "undecided: unit"),
    ],
)
def test_what_the_paper_supposes_is_decided_by_the_interval(
    tiny_run: Path, interval: tuple[float, float], found: str
) -> None:
    run = read_run(tiny_run)
    assert run.analysis is not None
    weights = run.analysis["energies"]["unit"]["weights"]
    weights["promoted_interval"] = dict(zip(("low", "high"), interval, strict=True))
    (entry,) = [
        entry
        for entry in paper_figures(run.results, run.analysis)
        if entry.figure.name == "reweighting"
    ]
    assert found in entry.comparison
