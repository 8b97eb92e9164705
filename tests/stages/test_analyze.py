"""The analyses of a finished run, each worked out a second time from its files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from residual_ebm.estimation.repetition import unique_among, unique_within
from residual_ebm.files.blocks import read_blocks
from residual_ebm.files.log_weights import REAL, read_log_weights, read_real
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.samples import join_rows, pick_rows, read_rows
from residual_ebm.models.loading import load_tokenizer
from residual_ebm.report.page import read_run
from residual_ebm.stages import analyze, evaluate

ENERGIES = ("unit", "bit", "heat")


@pytest.fixture(scope="module")
def analysis(tiny_run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tiny_run / "analysis.json").read_text())
    return found


@pytest.fixture(scope="module")
def proposals(tiny_run: Path) -> Any:
    folder = RunDirectory(tiny_run).proposals("base", "test")
    return join_rows([read_rows(path) for path in sorted(folder.glob("shard-*.arrow"))])


def test_rows_are_picked_in_the_order_asked_for(tiny_run: Path, proposals: Any) -> None:
    folder = RunDirectory(tiny_run).proposals("base", "test")
    prefix_K, sample_K = np.array([5, 0, 5, 23, 5]), np.array([3, 31, 0, 7, 3])
    found = pick_rows(folder, prefix_K, sample_K)
    assert found.prefix_N.tolist() == prefix_K.tolist()
    assert found.sample_N.tolist() == sample_K.tolist()
    for row in range(5):
        same = (proposals.prefix_N == prefix_K[row]) & (proposals.sample_N == sample_K[row])
        assert np.array_equal(proposals.ids_NC[same][0], found.ids_NC[row])
        assert proposals.lm_log_prob_N[same][0] == found.lm_log_prob_N[row]


def test_it_says_what_it_is_of(tiny_run: Path, analysis: dict[str, Any]) -> None:
    recipe = RunDirectory(tiny_run).recipe()
    assert list(analysis["energies"]) == [energy.name for energy in recipe.energies]
    assert analysis["num_prefixes"] == recipe.proposals.num_test_prefixes
    assert analysis["num_samples"] == recipe.proposals.num_samples
    assert analysis["num_draws"] == 10
    assert analysis["seed"] == recipe.seed


@pytest.mark.parametrize("energy", ENERGIES)
def test_bounds_meet_the_table(tiny_run: Path, analysis: dict[str, Any], energy: str) -> None:
    rows = {row["num_samples"]: row for row in analysis["energies"][energy]["bounds"]}
    assert list(rows) == [8, 16, 32]
    results = RunDirectory(tiny_run).read_results()
    (joint,) = [
        row["test"]
        for row in results["joint_models"]
        if row["energy"] == energy and not row["scaled"]
    ]
    for entry in joint["bounds_at"]:
        assert rows[entry["num_samples"]]["lower"] == pytest.approx(entry["lower"])
        assert rows[entry["num_samples"]]["upper"] == pytest.approx(entry["upper"])
        assert rows[entry["num_samples"]]["resampled"] == pytest.approx(entry["resampled"])


def test_repetition_of_real_text_and_base_samples(
    tiny_run: Path, analysis: dict[str, Any], proposals: Any
) -> None:
    run_dir = RunDirectory(tiny_run)
    real = read_real(run_dir.log_weights("heat", "test") / REAL)
    blocks = read_blocks(run_dir.blocks / "test.arrow").select(real.block_P)
    start = run_dir.recipe().block.prefix_length
    passages = [ids[start:end] for ids, end in zip(blocks.ids_BT, blocks.length_B, strict=True)]
    for row in analysis["energies"]["heat"]["repetition"]:
        order = row["order"]
        assert row["real"]["among"] == pytest.approx(unique_among(passages, order))
        real_P = unique_within(passages, order)
        assert row["real"]["within"] == pytest.approx(real_P.mean())
        assert row["real"]["among_spread"] is None
        among, within = [], []
        for draw in range(10):
            chosen = proposals.sample_N == draw
            samples = [
                ids[:end]
                for ids, end in zip(
                    proposals.ids_NC[chosen], proposals.length_N[chosen], strict=True
                )
            ]
            among.append(unique_among(samples, order))
            within.append(unique_within(samples, order))
        assert row["base"]["among"] == pytest.approx(np.mean(among))
        assert row["base"]["within_spread"] == pytest.approx(np.mean(within, axis=1).std(ddof=1))
        interval = row["differences"]["joint-base"]
        assert interval["low"] <= row["joint"]["within"] - row["base"]["within"] <= interval["high"]
    assert [row["order"] for row in analysis["energies"]["heat"]["repetition"]] == [2, 3, 4]


def test_joint_draws_follow_the_weights_and_z_is_of_the_other_half(tiny_run: Path) -> None:
    """One proposal of the first half outweighs all others; the second half has weights of its own,
    the same for all."""
    run_dir = RunDirectory(tiny_run)
    recipe = run_dir.recipe()
    real = read_real(run_dir.log_weights("heat", "test") / REAL)
    heavy_P = np.arange(len(real.block_P)) % 16
    log_weights = []
    for heavy in heavy_P:
        log_weight_N = np.repeat([0.0, 1.25], 16)
        log_weight_N[heavy] = 50.0
        log_weights.append(log_weight_N)
    drawn = analyze._draw(recipe, run_dir, "heat", real, log_weights)
    assert drawn.joint.sample_N.tolist() == np.repeat(heavy_P, 10).tolist()
    assert drawn.joint_log_weight_PD.tolist() == [[50.0] * 10] * len(heavy_P)
    assert drawn.log_partition_P == pytest.approx(1.25)
    assert drawn.base.sample_N.tolist() == [*range(10)] * len(heavy_P)
    (row, *_) = analyze._repetition(recipe, run_dir, real, drawn)
    passages = [
        ids[:end] for ids, end in zip(drawn.joint.ids_NC, drawn.joint.length_N, strict=True)
    ]
    assert row["joint"]["within"] == pytest.approx(unique_within(passages, 2).mean())
    assert row["joint"]["among_spread"] == pytest.approx(0, abs=1e-12)


def test_passages_come_with_what_was_written_there(
    tiny_run: Path, analysis: dict[str, Any], proposals: Any
) -> None:
    tokenizer = load_tokenizer(str(RunDirectory(tiny_run).blocks / "tokenizer"), "tokenizer")
    real = read_real(RunDirectory(tiny_run).log_weights("heat", "test") / REAL)
    for found in analysis["energies"]["heat"]["passages"].values():
        for passage in found:
            (prefix,) = np.flatnonzero(real.block_P == passage["block"])
            first = (proposals.prefix_N == prefix) & (proposals.sample_N == 0)
            (ids_C,), (length,) = proposals.ids_NC[first], proposals.length_N[first]
            assert passage["base"] == tokenizer.decode(ids_C[:length])
            own = proposals.prefix_N == prefix
            texts = {tokenizer.decode(ids_C) for ids_C in proposals.ids_NC[own]}
            assert passage["joint"] in texts


@pytest.mark.parametrize("energy", ENERGIES)
def test_densities(tiny_run: Path, analysis: dict[str, Any], proposals: Any, energy: str) -> None:
    folder = RunDirectory(tiny_run).log_weights(energy, "test")
    real = read_real(folder / REAL)
    base_PN = proposals.lm_log_prob_N.reshape(len(real.block_P), -1)
    density = analysis["energies"][energy]["density"]
    expected = base_PN[:, :10].mean() - real.lm_log_prob_P.mean()
    assert density["base"]["difference"] == pytest.approx(expected)
    # Under the joint model the mean over draws is near that of exact resampling of the first half.
    differences = []
    for prefix, log_weight_N in read_log_weights(folder):
        first_N, second_N = np.split(log_weight_N, 2)
        share_N = np.exp(first_N - np.logaddexp.reduce(first_N))
        mean = share_N @ (base_PN[prefix, : len(first_N)] + first_N)
        log_partition = np.logaddexp.reduce(second_N) - np.log(len(second_N))
        real_log_prob = real.lm_log_prob_P[prefix] + real.log_weight_P[prefix]
        differences.append((mean - log_partition) - (real_log_prob - log_partition))
    spread = base_PN.std() / np.sqrt(10 * len(differences))
    assert density["joint"]["difference"] == pytest.approx(np.mean(differences), abs=4 * spread)
    assert density["joint"]["interval"]["low"] <= density["joint"]["difference"]
    # The curve of real text lies where log P - log Z does, with Z of the second half.
    grid = np.array(density["joint"]["log_prob_K"])
    curve = np.array(density["joint"]["real_K"])
    halves = [np.split(values, 2)[1] for _, values in read_log_weights(folder)]
    log_partition_P = np.array([np.logaddexp.reduce(half) - np.log(len(half)) for half in halves])
    mean = (real.lm_log_prob_P + real.log_weight_P - log_partition_P).mean()
    assert np.trapezoid(curve * grid, grid) / np.trapezoid(curve, grid) == pytest.approx(
        mean, abs=0.2
    )


@pytest.mark.parametrize("energy", ENERGIES)
def test_detector(tiny_run: Path, analysis: dict[str, Any], energy: str) -> None:
    folder = RunDirectory(tiny_run).log_weights(energy, "test")
    real = read_real(folder / REAL)
    detector = analysis["energies"][energy]["detector"]
    log_weights = [values for _, values in read_log_weights(folder)]
    every = np.concatenate(log_weights)
    won = (real.log_weight_P[:, None] > every).mean()
    assert detector["auc"] == pytest.approx(won, abs=1e-3)
    correct = ((real.log_weight_P > 0).mean() + (every < 0).mean()) / 2
    assert detector["accuracy"] == pytest.approx(correct, abs=1e-6)
    assert sum(entry["weight"] for entry in detector["calibration"]["bins"]) == pytest.approx(1)
    for rank, mine, others in zip(detector["ranks"], real.log_weight_P, log_weights, strict=True):
        assert rank == pytest.approx((others > mine).mean(), abs=1e-9)
    curve = detector["roc"]
    area = np.trapezoid(curve["true_positive"], curve["false_positive"])
    assert area == pytest.approx(detector["auc"], abs=0.02)
    for axis in curve.values():
        assert (axis[0], axis[-1]) == (0.0, 1.0)
        assert np.diff(axis).max() < 0.1  # also where the other axis hardly moves


@pytest.mark.parametrize("energy", ENERGIES)
def test_weights(tiny_run: Path, analysis: dict[str, Any], energy: str) -> None:
    folder = RunDirectory(tiny_run).log_weights(energy, "test")
    found = analysis["energies"][energy]["weights"]
    ratio_PN = np.array([np.exp(values) for _, values in read_log_weights(folder)])
    ratio_PN /= ratio_PN.mean(axis=1, keepdims=True)
    (median,) = [row["log_weight"] for row in found["quantiles"] if row["share"] == 0.5]
    assert median == pytest.approx(np.log(np.quantile(ratio_PN, 0.5)), abs=1e-2)
    sorted_PN = np.sort(ratio_PN, axis=1) / 32
    lighter = np.array(found["curve"]["share"]) <= 0.5
    assert np.array(found["curve"]["mass"])[lighter][-1] == pytest.approx(
        sorted_PN[:, :16].sum(1).mean()
    )
    real = read_real(folder / REAL)
    gains = found["gains"]
    results = RunDirectory(tiny_run).read_results()
    (row,) = [
        row for row in results["joint_models"] if row["energy"] == energy and not row["scaled"]
    ]
    assert gains["both"] == pytest.approx(row["test"]["gap"])
    weights = [np.exp(values) for _, values in read_log_weights(folder)]
    demoting = []
    for values, text in zip(weights, np.exp(real.log_weight_P), strict=True):
        mean = (values.sum() + text) / 33
        cut = np.minimum(values, mean).sum() + min(text, mean)
        demoting.append(np.log(min(text, mean) / (cut / 33)))
    assert gains["demoting"] == pytest.approx(np.mean(demoting))
    interval = gains["demoting_minus_promoting"]
    assert interval["low"] < gains["demoting"] - gains["promoting"] < interval["high"]


def test_new_results_have_their_analysis_made_anew(tiny_copy: Path) -> None:
    run_dir = RunDirectory(tiny_copy)
    recipe = run_dir.recipe()
    before = run_dir.analysis.read_bytes()
    analyze.run(recipe, run_dir)
    assert run_dir.analysis.read_bytes() == before
    run_dir.results.unlink()
    evaluate.run(recipe, run_dir)
    assert not run_dir.analysis.exists()
    analyze.run(recipe, run_dir)
    assert run_dir.analysis.read_bytes() == before


def test_an_analysis_of_an_older_version_is_made_anew(tiny_copy: Path) -> None:
    run_dir = RunDirectory(tiny_copy)
    before = run_dir.analysis.read_bytes()
    old = {key: value for key, value in json.loads(before).items() if key != "version"}
    run_dir.analysis.write_text(json.dumps(old))
    assert run_dir.read_analysis() is None
    assert read_run(tiny_copy).analysis is None, "a report does without"
    analyze.run(run_dir.recipe(), run_dir)
    assert run_dir.analysis.read_bytes() == before
