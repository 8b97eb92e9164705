"""docs/results.md says what the published numbers say, and nothing else."""

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from residual_ebm.report.results_page import curves, results_page, write_results_page

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def tiny(tiny_run: Path, rebm: Callable[..., tuple[int, str, str]]) -> dict[str, Any]:
    code, out, _ = rebm("results", tiny_run, "--json")
    assert code == 0
    results: dict[str, Any] = json.loads(out)
    return results


def rows_of(page: str) -> dict[str, list[str]]:
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {row[0]: [cell.strip() for cell in row] for row in cells}


def test_the_page_in_the_docs_is_made_of_what_is_published(tmp_path: Path) -> None:
    write_results_page(tmp_path / "results.md")
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {path.name for path in DOCS.glob("results*")}, "run `make docs`"
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (DOCS / path.name).read_bytes(), "run `make docs`"


def test_every_row_has_its_numbers(tiny: dict[str, Any]) -> None:
    page = results_page({"tiny": tiny})
    rows = rows_of(page)
    block = tiny["resolved_recipe"]["block"]
    base = tiny["language_models"][0]
    training = tiny["resolved_recipe"]["language_models"][0]["training"]
    seen = training["steps"] * training["batch_size"] * block["length"]
    assert rows[base["name"]][2] == f"{seen / 1e3:.1f} k"
    assert rows[base["name"]][4] == f"{base['test']['value']:.2f}"
    for row in tiny["joint_models"]:
        cells = rows[row["name"]]
        test = row["test"]
        assert cells[4] == f"{test['lower']:.2f}-{test['upper']:.2f}"
        assert cells[7] == f"{1 - test['upper'] / base['test']['value']:.1%}"
        assert cells[9] == f"{1 - test['share_past_pareto_k']:.0%}"
        for flag in test["flags"]:
            assert row["scaled"] or flag in page
    config = next(entry for entry in tiny["resolved_recipe"]["energies"] if entry["name"] == "heat")
    (heat,) = (row for row in tiny["joint_models"] if row["name"] == "joint heat")
    steps = heat["training"]["validations"][-1]["step"]
    blocks = steps * config["training"]["batch_size"] * (1 + config["negatives_per_positive"])
    read = blocks * (block["length"] - block["prefix_length"])
    assert rows["joint heat"][2] == (
        f"{read / 1e6:.1f} M" if read >= 1e6 else f"{read / 1e3:.1f} k"
    )
    assert "minutes in all" in page
    assert tiny["resolved_recipe"]["description"] in page


def test_learning_rates_that_were_tried_are_told(tiny: dict[str, Any]) -> None:
    training = tiny["language_models"][0]["training"]
    training["trials"] = [
        {"learning_rate": 1e-3, "loss": 2.5},
        {"learning_rate": 1e-2, "loss": None},
    ]
    training["learning_rate"] = 1e-3
    page = results_page({"tiny": tiny})
    assert "0.001 2.500, 0.01 lost; 0.001 was taken." in page


def test_curves_are_repeatable_and_name_every_model(tiny: dict[str, Any]) -> None:
    drawn = curves(tiny)
    assert drawn == curves(tiny)
    for row in tiny["joint_models"]:
        assert row["scaled"] or row["name"] in drawn.decode()


def test_results_of_an_older_version_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: dict[str, Any]
) -> None:
    (tmp_path / "published").mkdir()
    old = {key: value for key, value in tiny.items() if key != "resolved_recipe"}
    for name, results in (("old", old), ("new", tiny)):
        (tmp_path / "published" / f"{name}.json").write_text(json.dumps(results))
    monkeypatch.setattr(resources, "files", lambda _: tmp_path)
    write_results_page(tmp_path / "results.md")
    page = (tmp_path / "results.md").read_text()
    assert "## new" in page
    assert "## old" not in page
    assert (tmp_path / "results-new.svg").exists()
