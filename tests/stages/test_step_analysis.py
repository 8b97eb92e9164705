"""The analysis token by token: what it reports, and that a kill loses no prefix."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from residual_ebm.estimation.importance import pareto_k_threshold
from residual_ebm.files.open_run import open_run
from residual_ebm.files.run_directory import RECIPE, RunDirectory
from residual_ebm.models.joint import JointModel
from residual_ebm.models.per_step import exact_last_link, step_chain
from residual_ebm.randomness import derive_seed
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages import analyze, evaluate, step_analysis
from residual_ebm.stages.proposals import evaluation_prefixes, some_prefixes
from residual_ebm.stages.repeats import find_repeats


def prepared(run: Path) -> RunDirectory:
    settings = "{num_prefixes: 3, num_samples: 16, num_enumerated: 5, num_repeats: 2}"
    recipe = load_recipe(str(run / RECIPE), [f"evaluation.per_step={settings}"])
    with open_run(run, recipe, grow=True) as run_dir:
        evaluate.run(recipe, run_dir)
    return run_dir


def steps_of(run_dir: RunDirectory) -> dict[str, Any]:
    analyze.run(run_dir.recipe(), run_dir)
    found: dict[str, Any] = json.loads(run_dir.analysis.read_text())["per_step"]
    return found


def blocks_of(run_dir: RunDirectory, what: str, count: int) -> dict[int, torch.Tensor]:
    recipe = run_dir.recipe()
    blocks, block_P = evaluation_prefixes(recipe, run_dir, "test")
    chosen = some_prefixes(len(block_P), count, recipe, what).tolist()
    assert len(chosen) == count
    return {number: torch.from_numpy(blocks.ids_BT[block_P[number]]) for number in chosen}


def test_positions(tiny_copy: Path) -> None:
    run_dir = prepared(tiny_copy)
    found = steps_of(run_dir)
    recipe = run_dir.recipe()
    joint = JointModel.from_pretrained(tiny_copy, found["energy"])
    chains = [
        step_chain(joint, ids_T, 16, seed=derive_seed(recipe.seed, "per-step", number))
        for number, ids_T in blocks_of(run_dir, "per-step", 3).items()
    ]
    assert len(found["positions"]) == recipe.block.num_new_tokens
    for row in found["positions"]:
        place = row["position"] - 1
        base = np.exp(-np.mean([chain.lm_log_prob_C[place] for chain in chains]))
        upper = np.exp(-np.mean([chain.log_prob_bounds()[0][place] for chain in chains]))
        lower = np.exp(-np.mean([chain.log_prob_bounds()[1][place] for chain in chains]))
        expected = (base, lower, upper)
        assert (row["base"], row["lower"], row["upper"]) == pytest.approx(expected)
        assert row["lower"] <= row["upper"]
        gain = np.log(base) - (np.log(lower) + np.log(upper)) / 2
        assert row["gain"] == pytest.approx(gain)
        assert row["gain_interval"]["low"] <= gain <= row["gain_interval"]["high"]
    sizes = torch.stack([chain.effective_sample_size_C for chain in chains])
    assert found["diagnostics"]["effective_sample_size"] == pytest.approx(float(sizes.mean()))
    least = found["diagnostics"]["least_effective_sample_size"]
    assert least == pytest.approx(float(sizes.min()))
    heavy = torch.stack([chain.pareto_k_C for chain in chains]) > pareto_k_threshold(16)
    share = found["diagnostics"]["share_past_pareto_k"]
    assert share == pytest.approx(float(heavy.double().mean()))


def test_the_last_step_is_checked_by_enumeration(tiny_copy: Path) -> None:
    run_dir = prepared(tiny_copy)
    found = steps_of(run_dir)
    joint = JointModel.from_pretrained(tiny_copy, found["energy"])
    exact, middle, inside = [], [], []
    for number, ids_T in blocks_of(run_dir, "last-step", 5).items():
        seed = derive_seed(run_dir.recipe().seed, "last-step", number)
        chain = step_chain(joint, ids_T, 16, seed=seed)
        exact.append(chain.last_step_from(exact_last_link(joint, ids_T)))
        middle.append(float(sum(bound_C[-1] for bound_C in chain.log_prob_bounds())) / 2)
        low_C, high_C = chain.published()
        inside.append(float(low_C[-1]) <= exact[-1] <= float(high_C[-1]))
    last = found["last_step"]
    assert last["num_prefixes"] == 5
    assert last["mean_error"] == pytest.approx(np.mean(middle) - np.mean(exact))
    assert last["inside"] == sum(inside)
    assert last["exact_perplexity"] == pytest.approx(np.exp(-np.mean(exact)))


def test_contexts_in_which_a_sample_repeats_itself(tiny_copy: Path) -> None:
    found = steps_of(prepared(tiny_copy))
    assert [entry["is_repeat"] for entry in found["repeats"]] == [True, True, False, False]
    for entry in found["repeats"]:
        for model in ("base", "joint"):
            assert sum(one["probability"] for one in entry[f"best_{model}"]) == pytest.approx(1)
            assert entry[model] is None or 0 < entry[model] <= 1
            marked = [one["token"] for one in entry[f"best_{model}"] if one["is_sampled"]]
            assert marked in ([], [entry["sampled"]])
        # A repeated token and the two before it are in the context already, a new one's are not.
        words = entry["context"].split()
        said = list(zip(words, words[1:], words[2:], strict=False))
        assert ((*words[-2:], entry["sampled"]) in said) == entry["is_repeat"]


def test_a_kill_loses_no_prefix(tiny_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = prepared(tiny_copy)
    real, limit = step_analysis._of_block, 2
    done: list[list[int]] = []

    def of_block(joint: JointModel, ids_T: torch.Tensor, *arguments: Any) -> dict[str, Any]:
        if len(done) == limit:
            raise KeyboardInterrupt
        done.append(ids_T.tolist())
        return real(joint, ids_T, *arguments)

    monkeypatch.setattr(step_analysis, "_of_block", of_block)
    with pytest.raises(KeyboardInterrupt):
        steps_of(run_dir)
    limit = 3
    resumed = steps_of(run_dir)
    run_dir.analysis.unlink()
    assert steps_of(run_dir) == resumed
    assert done == [ids_T.tolist() for ids_T in blocks_of(run_dir, "per-step", 3).values()]


def test_another_energy_is_not_mistaken_for_it(tiny_copy: Path) -> None:
    run_dir = prepared(tiny_copy)
    energy = steps_of(run_dir)["energy"]
    path = sorted((run_dir.per_step / energy).glob("per-step-*.json"))[1]
    before = path.read_bytes()
    entry = json.loads(before)
    path.write_text(json.dumps({**entry, "energy_fingerprint": "other", "lower": [0.0]}))
    run_dir.analysis.unlink()
    steps_of(run_dir)
    assert path.read_bytes() == before


def test_repeats_by_hand() -> None:
    def every(_: int) -> bool:
        return True

    #               0  1  2  3  4  5  6  7  8
    ids_T = np.array([5, 6, 7, 5, 6, 7, 7, 7, 7])
    assert find_repeats(ids_T, 0, every).repeated == [5, 8]  # 5 6 7, then 7 7 7
    assert find_repeats(ids_T, 0, every).new == [2, 3, 4, 6, 7]
    assert find_repeats(ids_T, 6, every) == ([8], [6, 7])
    assert find_repeats(np.array([5, 6, 5, 6]), 0, every).repeated == []
    assert find_repeats(np.array([5]), 0, every) == ([], [])
    # 6 is punctuation: what it is part of counts on neither side.
    assert find_repeats(ids_T, 0, lambda token: token != 6) == ([8], [7])


def test_does_the_gain_shrink() -> None:
    """Of three prefixes: 0.2 against 0.1 nats at either end, twice, and one too short to say."""
    base = np.full(24, -3.0)
    gains = np.concatenate([np.full(12, 0.2), np.full(12, 0.1)])
    entries = [
        {"lm_log_prob": base[:size], "lower": base[:size] + gains[:size] - 0.01 * wide}
        | {"upper": base[:size] + gains[:size] + 0.01 * wide}
        for size, wide in ((24, 1), (24, 0), (15, 0))
    ]
    made = step_analysis._Made(entries, np.array([4, 7, 7]))
    trend = step_analysis._trend(made, {"num_resamples": 50, "seed": 0})
    assert trend is not None
    assert (trend["num_prefixes"], trend["num_positions"]) == (2, 10)
    assert trend["difference"] == pytest.approx(0.1)
    assert tuple(trend["interval"]) == pytest.approx((0.1, 0.1))
    short = step_analysis._Made(entries[2:], np.array([7]))
    assert step_analysis._trend(short, {"num_resamples": 50, "seed": 0}) is None


@pytest.mark.parametrize("key", ["version", "num_samples"])
def test_what_another_version_or_number_of_samples_gave_is_made_anew(
    tiny_copy: Path, key: str
) -> None:
    run_dir = prepared(tiny_copy)
    energy = steps_of(run_dir)["energy"]
    paths = sorted((run_dir.per_step / energy).glob("*.json"))
    assert {path.name.partition("-")[0] for path in paths} == {"per", "last", "repeat"}
    before = [path.read_bytes() for path in paths]
    for path in paths:
        entry = json.loads(path.read_text())
        path.write_text(json.dumps({**entry, key: entry[key] - 1}))
    run_dir.analysis.unlink()
    steps_of(run_dir)
    assert [path.read_bytes() for path in paths] == before
