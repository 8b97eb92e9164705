"""The analysis token by token: what it reports, and that a kill loses no prefix."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from residual_ebm.estimation.importance import pareto_k_threshold
from residual_ebm.files.run_directory import RECIPE, RunDirectory
from residual_ebm.models.joint import JointModel
from residual_ebm.models.per_step import exact_last_link, step_chain
from residual_ebm.randomness import derive_seed
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages import analyze, step_analysis
from residual_ebm.stages.proposals import evaluation_prefixes, some_prefixes
from residual_ebm.stages.step_analysis import find_repeats


def prepared(run: Path) -> RunDirectory:
    settings = "{num_prefixes: 3, num_samples: 16, num_repeats: 2}"
    recipe = load_recipe(str(run / RECIPE), [f"evaluation.per_step={settings}"])
    (run / RECIPE).write_text(recipe.to_yaml(), encoding="utf-8")
    (run / "analysis.json").unlink()
    return RunDirectory(run)


def steps_of(run_dir: RunDirectory) -> dict[str, Any]:
    analyze.run(run_dir.recipe(), run_dir)
    found: dict[str, Any] = json.loads(run_dir.analysis.read_text())["per_step"]
    return found


def test_positions_and_the_last_step(tiny_copy: Path) -> None:
    run_dir = prepared(tiny_copy)
    found = steps_of(run_dir)
    recipe = run_dir.recipe()
    joint = JointModel.from_pretrained(tiny_copy, found["energy"])
    blocks, block_P = evaluation_prefixes(recipe, run_dir, "test")
    chains, exact = [], []
    numbers = some_prefixes(len(block_P), 3, recipe, "per-step").tolist()
    assert len(numbers) == 3
    for number in numbers:
        ids_T = torch.from_numpy(blocks.ids_BT[block_P[number]])
        seed = derive_seed(recipe.seed, "per_step", number)
        chains.append(step_chain(joint, ids_T, 16, seed=seed))
        exact.append(chains[-1].last_step_from(exact_last_link(joint, ids_T)))
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
    last = found["last_step"]
    middles = [float(sum(bound[-1] for bound in chain.log_prob_bounds())) / 2 for chain in chains]
    assert last["mean_error"] == pytest.approx(np.mean(middles) - np.mean(exact))
    inside = [
        float(chain.published()[0][-1]) <= value <= float(chain.published()[1][-1])
        for chain, value in zip(chains, exact, strict=True)
    ]
    assert last["inside"] == sum(inside)
    assert last["exact_perplexity"] == pytest.approx(np.exp(-np.mean(exact)))


def test_contexts_in_which_a_sample_repeats_itself(tiny_copy: Path) -> None:
    found = steps_of(prepared(tiny_copy))
    assert len(found["repeats"]) == 2
    for entry in found["repeats"]:
        for model in ("base", "joint"):
            assert sum(one["probability"] for one in entry[f"best_{model}"]) == pytest.approx(1)
            assert entry[model] is None or 0 < entry[model] <= 1
            marked = [one["token"] for one in entry[f"best_{model}"] if one["is_repeated"]]
            assert marked in ([], [entry["repeated"]])
        # The repeated token and the two before it are in the context already.
        words = entry["context"].split()
        said = list(zip(words, words[1:], words[2:], strict=False))
        assert (*words[-2:], entry["repeated"]) in said


def test_a_kill_loses_no_prefix(tiny_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = prepared(tiny_copy)
    real, limit = step_analysis._of_block, 2
    done: list[int] = []

    def of_block(*arguments: Any) -> dict[str, Any]:
        if len(done) == limit:
            raise KeyboardInterrupt
        done.append(arguments[3])
        return real(*arguments)

    monkeypatch.setattr(step_analysis, "_of_block", of_block)
    with pytest.raises(KeyboardInterrupt):
        steps_of(run_dir)
    limit = 3
    resumed = steps_of(run_dir)
    run_dir.analysis.unlink()
    assert steps_of(run_dir) == resumed
    recipe = run_dir.recipe()
    num_prefixes = recipe.proposals.num_test_prefixes
    assert done == some_prefixes(num_prefixes, 3, recipe, "per-step").tolist()


def test_another_energy_is_not_mistaken_for_it(tiny_copy: Path) -> None:
    run_dir = prepared(tiny_copy)
    energy = steps_of(run_dir)["energy"]
    path = sorted((run_dir.per_step / energy).glob("prefix-*.json"))[1]
    before = path.read_bytes()
    entry = json.loads(before)
    path.write_text(json.dumps({**entry, "energy_fingerprint": "other", "lower": [0.0]}))
    run_dir.analysis.unlink()
    steps_of(run_dir)
    assert path.read_bytes() == before


def test_repeats_by_hand() -> None:
    #               0  1  2  3  4  5  6  7  8
    ids_T = np.array([5, 6, 7, 5, 6, 7, 7, 7, 7])
    assert find_repeats(ids_T, 0) == [5, 8]  # 5 6 7, then 7 7 7
    assert find_repeats(ids_T, 6) == [8]
    assert find_repeats(np.array([5, 6, 5, 6]), 0) == []
    assert find_repeats(np.array([5]), 0) == []
