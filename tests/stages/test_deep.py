"""A few test prefixes with many more samples: drawn, scored by every energy, shown by n."""

import json
from pathlib import Path

import numpy as np
import pytest

from residual_ebm.files.log_weights import REAL, read_log_weights, read_real
from residual_ebm.files.open_run import open_run
from residual_ebm.files.run_directory import RECIPE, RunDirectory
from residual_ebm.recipe_file import load_recipe
from residual_ebm.report.page import read_run
from residual_ebm.report.paper_figures import paper_figures
from residual_ebm.stages import analyze, evaluate, proposals
from residual_ebm.stages.pipeline import progress_of


@pytest.fixture
def deep(tiny_copy: Path) -> RunDirectory:
    changes = ["proposals.deep={num_prefixes: 2, num_samples: 256}"]
    recipe = load_recipe(str(tiny_copy / RECIPE), changes)
    with open_run(tiny_copy, recipe, grow=True) as run_dir:
        for stage in (proposals, evaluate, analyze):
            stage.run(recipe, run_dir)
    return run_dir


def test_deep_samples_are_of_a_few_test_prefixes_by_seed(deep: RunDirectory) -> None:
    for energy in ("unit", "bit", "heat"):
        test, more = (
            read_real(deep.log_weights(energy, split) / REAL) for split in ("test", "deep")
        )
        chosen = proposals.some_prefixes(len(test.block_P), 2, deep.recipe(), proposals.DEEP)
        assert len(chosen) == 2
        assert more.block_P.tolist() == test.block_P[chosen].tolist()
        np.testing.assert_allclose(more.lm_log_prob_P, test.lm_log_prob_P[chosen], atol=1e-4)
        drawn = dict(read_log_weights(deep.log_weights(energy, "deep")))
        assert [len(drawn[prefix]) for prefix in (0, 1)] == [256, 256]
    states = {entry["what"]: entry["state"] for entry in progress_of(deep.recipe(), deep)}
    assert states["proposals of base, deep"] == states["log-weights of bit, deep"] == "done"


def test_they_are_drawn_anew(deep: RunDirectory) -> None:
    test, more = (
        dict(read_log_weights(deep.log_weights("heat", split))) for split in ("test", "deep")
    )
    chosen = proposals.some_prefixes(len(test), 2, deep.recipe(), proposals.DEEP)
    for number, prefix in enumerate(chosen.tolist()):
        assert not np.isin(test[prefix], more[number]).all()


def test_results_analysis_and_figure(deep: RunDirectory) -> None:
    results = deep.read_results()
    assert results["num_prefixes"]["deep"] == 2
    for row in results["joint_models"]:
        assert row["deep"]["bounds_at"][-1]["num_samples"] == 256
    found = json.loads(deep.analysis.read_text())["energies"]["heat"]["deep"]
    assert [row["num_samples"] for row in found["bounds"]] == [8, 16, 32, 64, 128, 256]
    (row,) = [
        row for row in results["joint_models"] if row["energy"] == "heat" and not row["scaled"]
    ]
    assert found["bounds"][-1]["upper"] == pytest.approx(row["deep"]["upper"])
    assert found["bounds"][-1]["resampled"] == pytest.approx(row["deep"]["resampled"])
    names = [figure.name for figure in read_run(deep.path).figures]
    assert names[:2] == ["bounds", "bounds-deep"]
    shown = paper_figures(results, json.loads(deep.analysis.read_text()))
    (said,) = (one.comparison for one in shown if one.figure.name == "bounds-deep")
    gain = f"{1 - row['deep']['resampled'] / found['base']:.1%}"
    assert f"resampled {gain}" in said.partition("joint heat lower")[2].partition(";")[0]
