"""The order of the paper's rows in a run of ours: roles from the recipe, verdicts from numbers."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from residual_ebm.report.paper_table import order_of_rows
from residual_ebm.report.published import Published
from residual_ebm.report.results_page import results_page
from residual_ebm.report.rows import comparison_texts

BELOW = {"low": -2.0, "high": -1.0}
ABOVE = {"low": 1.0, "high": 2.0}
OPEN = {"low": -1.0, "high": 1.0}


@pytest.fixture
def results(tiny_run: Path) -> dict[str, Any]:
    """A run of `tiny` with a RALM, a BALM and a pretrained BiT put in beside its rows."""
    found: dict[str, Any] = json.loads((tiny_run / "results.json").read_text())
    found["timings"] = {"evaluate": 60.0}
    for row in found["joint_models"]:  # so few samples are flagged
        row["test"]["flags"] = []
    recipe = found["resolved_recipe"]
    base = found["language_models"][0]
    config = recipe["language_models"][0]
    for name, change in (("ralm", {"residual_of": "base"}), ("balm", {})):
        more = 10 if name == "balm" else 0
        row = {**copy.deepcopy(base), "name": name, "parameters": base["parameters"] + more}
        found["language_models"].append(row)
        recipe["language_models"].append({**copy.deepcopy(config), "name": name, **change})
    for row in list(found["joint_models"]):
        if row["energy"] == "bit" and not row["scaled"]:
            found["joint_models"].append({**row, "energy": "star", "name": "joint star"})
    (bit,) = (entry for entry in recipe["energies"] if entry["name"] == "bit")
    recipe["energies"].append({**bit, "name": "star", "source": "asset:minilm-l6"})
    names = [row["name"] for row in found["language_models"]]
    names += [row["name"] for row in found["joint_models"] if not row["scaled"]]
    found["comparisons"] = [
        {"model": model, "other": other, "difference": OPEN}
        for number, model in enumerate(names)
        for other in names[:number]
    ]
    return found


def decide(
    results: dict[str, Any], model: str, other: str, interval: Mapping[str, float | None]
) -> None:
    (found,) = (
        one for one in results["comparisons"] if (one["model"], one["other"]) == (model, other)
    )
    found["difference"] = interval


def line_of(results: dict[str, Any], claim: str) -> str:
    (line,) = (line for line in order_of_rows(results) if line[0] == claim)
    return " | ".join(line)


def test_a_run_is_compared_by_evaluate(tiny_run: Path) -> None:
    """Every row but scaled ones, with every row above it; zero lies where bounds say."""
    results = json.loads((tiny_run / "results.json").read_text())
    plain = [row for row in results["joint_models"] if not row["scaled"]]
    names = [row["name"] for row in [*results["language_models"], *plain]]
    pairs = {(one["model"], one["other"]) for one in results["comparisons"]}
    assert pairs == {(b, a) for number, b in enumerate(names) for a in names[:number]}
    base = results["language_models"][0]["test"]["value"]
    for row in plain:
        (interval,) = (
            one["difference"]
            for one in results["comparisons"]
            if (one["model"], one["other"]) == (row["name"], "base")
        )
        # The upper end is that of the row's own difference; the lower end is from the lower bound.
        assert interval["high"] == pytest.approx(row["test"]["difference_from_base"]["high"])
        assert interval["low"] <= row["test"]["difference_from_base"]["low"] + 1e-12
        assert interval["low"] <= row["test"]["lower"] - base <= interval["high"]


def test_rows_are_known_by_what_they_are(results: dict[str, Any]) -> None:
    claims = [line[0] for line in order_of_rows(results)]
    order = ["base", "RALM", "BALM", "UniT", "BiT", "BiT*"]
    assert claims == [
        f"{lower} below {higher}"
        for place, higher in enumerate(order)
        for lower in order[place + 1 :]
    ]
    assert "joint unit" in line_of(results, "UniT below RALM")
    assert ", ralm " in line_of(results, "UniT below RALM")
    assert ", balm " in line_of(results, "BiT below BALM")
    assert "joint star" in line_of(results, "BiT* below BALM")


def test_parameters_stand_beside_each_row(results: dict[str, Any]) -> None:
    """An order says little of models whose sizes differ."""
    for row in [*results["language_models"], *results["joint_models"]]:
        row["parameters"] = {"balm": 30_500_000, "joint bit": 10_600_000}.get(row["name"], 2_000)
    here = line_of(results, "BiT below BALM").split(" | ")[2]
    bit, balm = here.split(", ")
    assert bit.startswith("joint bit ")
    assert bit.endswith(" (10.6 M)")
    assert balm.startswith("balm ")
    assert balm.endswith(" (30.5 M)")
    assert line_of(results, "UniT below base").split(" | ")[2].endswith(" (2.0 k)")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (1_000, "as many parameters"),
        (1_029, "as many parameters"),
        (972, "as many parameters"),
        (1_060, "1.1 times the parameters"),
        (2_600, "2.6 times the parameters"),
    ],
)
def test_whether_a_balm_is_as_large_is_said(
    results: dict[str, Any], parameters: int, words: str
) -> None:
    for row in [*results["language_models"], *results["joint_models"]]:
        row["parameters"] = {"balm": 1_000, "joint bit": parameters}.get(row["name"], 10)
    assert line_of(results, "BiT below BALM").endswith(f"; {words}")
    assert "the parameters" not in line_of(results, "BiT below UniT")


def test_a_sum_of_energies_stands_below_the_papers_rows(results: dict[str, Any]) -> None:
    (bit,) = (row for row in results["joint_models"] if row["name"] == "joint bit")
    results["joint_models"].append({**bit, "energy": "both", "name": "joint both"})
    for other in ("base", "balm", "joint bit"):
        results["comparisons"].append({"model": "joint both", "other": other, "difference": BELOW})
    claims = [line[0] for line in order_of_rows(results) if line[0].startswith("a sum")]
    assert claims == [f"a sum of energies below {higher}" for higher in ("base", "BALM", "BiT")]
    assert line_of(results, "a sum of energies below base").split(" | ")[1] == ""


def test_the_verdict_follows_from_the_interval(results: dict[str, Any]) -> None:
    decide(results, "joint bit", "joint unit", BELOW)
    decide(results, "joint unit", "ralm", ABOVE)
    assert line_of(results, "BiT below UniT").endswith("-2.00/-1.00 | so here")
    assert line_of(results, "UniT below RALM").endswith("+1.00/+2.00 | the other way round")
    assert "-1.00/+1.00 | undecided; " in line_of(results, "BiT below BALM")
    # Rows in another order: the difference is turned round.
    for one in results["comparisons"]:
        if (one["model"], one["other"]) == ("joint bit", "joint unit"):
            one.update(model="joint unit", other="joint bit", difference=ABOVE)
    assert line_of(results, "BiT below UniT").endswith("-2.00/-1.00 | so here")


def test_one_document_decides_nothing(results: dict[str, Any]) -> None:
    decide(results, "joint unit", "base", {"low": None, "high": None})
    assert line_of(results, "UniT below base").endswith("one document | undecided")
    (said,) = (text for text in comparison_texts(results) if text.startswith("joint unit: "))
    assert "undecided against base" in said


def test_every_model_beside_those_above_it(results: dict[str, Any]) -> None:
    decide(results, "joint unit", "base", BELOW)
    decide(results, "joint unit", "balm", ABOVE)
    (said,) = (text for text in comparison_texts(results) if text.startswith("joint unit: "))
    expected = "perplexity lower than base; undecided against ralm; higher than balm."
    assert said == f"joint unit: {expected}"
    page = results_page({"tiny": Published(results, None)})
    assert f"- {said}\n" in page
    assert f"with {len(results['comparisons'])} of them, about one in twenty would be wrong" in page
    assert (
        "| BiT below UniT | 14.61-14.64 and 15.57-15.58; 13.01-13.03 and 13.81-13.82 | joint bit "
        in page
    )


def test_results_from_before_comparisons_have_none(results: dict[str, Any]) -> None:
    del results["comparisons"]
    assert comparison_texts(results) == []
    assert order_of_rows(results) == []
    page = results_page({"tiny": Published(results, None)})
    assert "one in twenty" not in page


def test_an_order_that_rests_on_a_flagged_estimate_is_said_to(results: dict[str, Any]) -> None:
    decide(results, "joint unit", "base", BELOW)
    decide(results, "joint bit", "joint unit", BELOW)
    decide(results, "joint bit", "base", ABOVE)
    for row in results["joint_models"]:
        flags = ["wide: far apart"] if row["name"] == "joint bit" else []
        row["test"] = {**row["test"], "flags": flags}
    assert line_of(results, "UniT below base").endswith("| so here")
    assert line_of(results, "BiT below UniT").endswith("so here, if the flagged estimate holds")
    assert line_of(results, "BiT below base").endswith(
        "the other way round, if the flagged estimate holds"
    )
    # What resampling writes needs no flag to be believed, where it is still the lower one.
    for interval, said in (
        (BELOW, "resamples (-2.00/-1.00)"),
        (OPEN, "if the flagged estimate holds"),
    ):
        for one in results["comparisons"]:
            if (one["model"], one["other"]) == ("joint bit", "joint unit"):
                one["resampled_difference"] = interval
        assert line_of(results, "BiT below UniT").endswith(said)
    texts = {text.partition(":")[0]: text for text in comparison_texts(results)}
    assert "lower than joint unit" in texts["joint bit ⚠"]
    assert "undecided against base, ralm, balm, joint unit, joint bit ⚠" in texts["joint heat"]


def test_language_models_that_have_read_little_are_named(results: dict[str, Any]) -> None:
    """Some thousands of blocks for some hundred thousand parameters."""
    page = results_page({"tiny": Published(results, None)})
    recipe, base = results["resolved_recipe"], results["language_models"][0]
    training = recipe["language_models"][0]["training"]
    tokens = training["steps"] * training["batch_size"] * recipe["block"]["length"]
    assert f"parameter: base {tokens / base['parameters']:.1f}, balm" in page
    assert "ralm" not in page.partition("for each parameter:")[2].partition(".")[0]
    for row in results["language_models"]:
        row["parameters"] = tokens // 21
    results["language_models"][-1]["parameters"] = tokens // 20
    assert "for each parameter" not in results_page({"tiny": Published(results, None)})
