"""Exact perplexities of a run's joint model, and the calibration made with them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from residual_ebm.errors import UserError
from residual_ebm.estimation.coverage import coverage, true_perplexity
from residual_ebm.estimation.flags import KINDS
from residual_ebm.files.grammar import build_grammar
from residual_ebm.files.open_run import open_run
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.models.joint import JointModel
from residual_ebm.progress import QUIET
from residual_ebm.randomness import derive_seed
from residual_ebm.recipe_file import load_recipe
from residual_ebm.report.charts import image_of
from residual_ebm.report.figures import run_figures
from residual_ebm.report.paper_figures import paper_figures
from residual_ebm.stages import calibrate
from residual_ebm.stages.pipeline import run_all
from residual_ebm.stages.proposals import evaluation_prefixes

SMALL = [
    "corpus.num_generated=400",
    "block={prefix_length: 6, length: 8, continuation: fixed}",
    "language_models.base.training.steps=20",
    "language_models.base.training.validate_every=20",
    "energies.heat.training.steps=20",
    "energies.heat.training.validate_every=20",
    "negatives.num_prefixes=100",
    "negatives.num_validation_prefixes=20",
    "proposals.num_validation_prefixes=8",
    "proposals.num_test_prefixes=10",
    "proposals.num_samples=16",
    "evaluation.calibration={num_samples: [8, 64], scales: [1.0, 3.0], num_documents: 4,"
    " num_replicates: 5, bootstrap_resamples: 20}",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    recipe = load_recipe("calibration", SMALL)
    with open_run(tmp_path_factory.mktemp("calibration") / "run", recipe) as run_dir:
        run_all(recipe, run_dir)
    return run_dir


def test_rows_of_the_calibration(run: RunDirectory) -> None:
    found = json.loads(run.analysis.read_text())["calibration"]
    assert [(row["scale"], row["num_samples"]) for row in found["rows"]] == [
        (1.0, 8),
        (1.0, 64),
        (3.0, 8),
        (3.0, 64),
    ]
    vocabulary = len(build_grammar("brackets").words) + 3  # unknown, mask and end-of-text
    assert found["num_continuations"] == vocabulary**2
    assert found["num_prefixes"] == 10
    prefixes = calibrate._exact_prefixes(run.recipe(), run, found["energy"], QUIET)
    config = run.recipe().evaluation.calibration
    assert config is not None
    for row in found["rows"]:
        scaled = [prefix.scaled(row["scale"]) for prefix in prefixes]
        expected = coverage(
            scaled,
            row["num_samples"],
            num_documents=config.num_documents,
            num_replicates=config.num_replicates,
            num_resamples=config.bootstrap_resamples,
            seed=derive_seed(run.recipe().seed, "calibration"),
        )
        assert row["covered"] == expected.covered
        assert row["between_bounds"] == expected.between_bounds
        assert row["truth"] == pytest.approx(true_perplexity(scaled))
        assert set(row["warnings"]) == {"any", *KINDS}


def test_figures_of_the_calibration(run: RunDirectory) -> None:
    analysis = json.loads(run.analysis.read_text())
    figures = {figure.name: figure for figure in run_figures(run.read_results(), analysis)}
    for name in ("coverage", "bias", "between", "warnings", "warnings-k-hat", "warnings-ess"):
        assert "5 estimates of 4 documents each" in figures[name].made_of
        assert len(image_of(figures[name].chart(alone=True), "svg")) > 1000


def test_what_the_docs_say_of_it(run: RunDirectory) -> None:
    analysis = json.loads(run.analysis.read_text())
    rows = analysis["calibration"]["rows"]
    covered = (0.9, 0.8, 0.7, 0.95)
    biases = ((-0.5, 0.1), (-0.01, 0.0), (-0.3, -0.2), (-0.01, 0.015))
    flagged = (0.75, 0.1, 1.0, 0.0)
    for row, share, (lower, upper), warned in zip(rows, covered, biases, flagged, strict=True):
        row.update(covered=share, covered_with_known_partition=0.9, between_bounds=share / 2)
        row.update(lower_bias=lower, upper_bias=upper)
        row["warnings"]["any"]["overall"] = warned
        row.update(covered_difference=share + 0.05, gap_holds=share - 0.1)
    coverage_of, bias_of, between, warnings, difference, gap = (
        made.comparison for made in paper_figures(run.read_results(), analysis)
    )
    assert coverage_of.startswith("With log Z known 90% of the intervals hold the truth; of")
    assert coverage_of.endswith("at least 70% (energy x 3, n = 8).")
    # exp(-0.5) = 0.607, exp(-0.2) = 0.819, exp(0.1) = 1.105
    assert bias_of == (
        "At its worst the lower bound is off by -39.3% (energy x 1, n = 8); the upper one by -18.1%"
        " (energy x 3, n = 8) on one side and +10.5% (energy x 1, n = 8) on the other."
    )
    assert difference == (
        "Here between 85% and 100% in the 2 settings where no flag was raised as a rule; between"
        " 75% and 95% in the 2 settings where a flag was raised as a rule."
    )
    assert gap.startswith("Here between 70% and 85% in the 2 settings where no flag")
    assert between == "Here it is between 35% and 48%."
    assert warnings == (
        "In the 2 settings where a bound is off by more than 2%, between 75% and 100% of the"
        " estimates are flagged; in the 2 settings where a bound is off by less, between 0% and 10%"
        " of the estimates are flagged."
    )


def test_log_z_is_the_sum_over_all_continuations(run: RunDirectory) -> None:
    """Against many samples, which see all of them."""
    recipe = run.recipe()
    prefixes = calibrate._exact_prefixes(recipe, run, "heat", QUIET)
    joint = JointModel.from_pretrained(run.path, "heat")
    blocks, block_P = evaluation_prefixes(recipe, run, "test")
    for number in (0, 7):
        exact = prefixes[number]
        assert np.exp(exact.lm_log_prob_K).sum() == pytest.approx(1, abs=1e-4)
        ids_T = torch.from_numpy(blocks.ids_BT[block_P[number]])
        scored = joint.propose(ids_T[:6], 4000, seed=1)
        spread = float(scored.log_weight_N.exp().std()) / np.exp(exact.log_partition)
        assert float(scored.log_partition().lower) == pytest.approx(
            exact.log_partition, abs=4 * spread / 4000**0.5 + 1e-4
        )
        log_prob, energy = joint.score(blocks.select(block_P[[number]]))
        assert exact.lm_log_prob == pytest.approx(log_prob[0], abs=1e-4)
        assert exact.log_weight == pytest.approx(-energy[0], abs=1e-4)


def test_a_language_that_cannot_be_enumerated(tiny_copy: Path) -> None:
    run_dir = RunDirectory(tiny_copy)
    config = load_recipe("calibration").evaluation.calibration
    assert config is not None
    with pytest.raises(UserError, match=r"evaluation\.calibration = \d+\^16 continuations"):
        calibrate.calibrate(run_dir.recipe(), run_dir, "heat", config, QUIET)
