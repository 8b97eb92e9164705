"""Sums of energies in a run: from recipe to table, and back as a joint model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from residual_ebm.config import Recipe
from residual_ebm.errors import UserError
from residual_ebm.files.blocks import read_blocks
from residual_ebm.files.log_weights import REAL, read_log_weights, read_real
from residual_ebm.files.run_directory import RECIPE, RunDirectory
from residual_ebm.models.energy_sum import EnergySum
from residual_ebm.models.joint import JointModel
from residual_ebm.recipe_file import check_recipe, load_recipe
from residual_ebm.stages import evaluate, train_energy
from residual_ebm.stages.pipeline import progress_of


def with_sum(recipe: Recipe, *members: str, name: str = "both") -> Recipe:
    tree = recipe.model_dump(mode="json")
    return check_recipe({**tree, "sums": [{"name": name, "members": list(members)}]})


@pytest.fixture
def summed(tiny_copy: Path) -> tuple[Recipe, RunDirectory]:
    """The finished run, with a sum of two of its energies that was made afterwards."""
    recipe = with_sum(load_recipe(str(tiny_copy / RECIPE)), "heat", "bit")
    (tiny_copy / RECIPE).write_text(recipe.to_yaml(), encoding="utf-8")
    run_dir = RunDirectory(tiny_copy)
    run_dir.results.unlink()
    train_energy.run(recipe, run_dir)
    evaluate.run(recipe, run_dir)
    return recipe, run_dir


def test_a_sum_has_its_rows_and_its_parts_stay(summed: tuple[Recipe, RunDirectory]) -> None:
    recipe, run_dir = summed
    results = run_dir.read_results()
    rows = {row["energy"]: row for row in results["joint_models"] if not row["scaled"]}
    assert list(rows) == [*(energy.name for energy in recipe.energies), "both"]
    assert rows["both"]["kind"] == "sum"
    assert rows["both"]["energy_parameters"] == sum(
        rows[name]["energy_parameters"] for name in ("heat", "bit")
    )
    # One more energy can only help on the blocks that the weights were fitted on.
    losses = {name: row["training"]["validations"][-1]["loss"] for name, row in rows.items()}
    assert losses["both"] < min(losses["heat"], losses["bit"]) + 1e-3
    states = {entry["what"]: entry["state"] for entry in progress_of(recipe, run_dir)}
    assert states["energy both"] == states["log-weights of both, test"] == "done"


def test_log_weights_are_those_of_scoring_with_the_sum(
    summed: tuple[Recipe, RunDirectory],
) -> None:
    recipe, run_dir = summed
    joint = JointModel.from_pretrained(run_dir.path, "both")
    assert isinstance(joint.energy_model, EnergySum)
    real = read_real(run_dir.log_weights("both", "test") / REAL)
    blocks = read_blocks(run_dir.blocks / "test.arrow").select(real.block_P)
    energy_P = joint.energy(torch.from_numpy(blocks.ids_BT), torch.from_numpy(blocks.length_B))
    np.testing.assert_allclose(-real.log_weight_P, energy_P.numpy(), rtol=1e-3, atol=1e-3)
    parts = {
        name: dict(read_log_weights(run_dir.log_weights(name, "test")))
        for name in ("heat", "bit", "both")
    }
    weights = joint.energy_model.weights
    for prefix, log_weight_N in parts["both"].items():
        members_NM = np.stack([parts["heat"][prefix], parts["bit"][prefix]], axis=1)
        expected_N = members_NM @ weights.weight_M - weights.constant
        np.testing.assert_allclose(log_weight_N, expected_N, rtol=1e-5, atol=1e-5)
    assert len(parts["both"]) == recipe.proposals.num_test_prefixes


def test_a_sum_generates(summed: tuple[Recipe, RunDirectory]) -> None:
    joint = JointModel.from_pretrained(summed[1].path, "both")
    scored = joint.propose(torch.arange(3, 3 + joint.block.prefix_length), 8, seed=0)
    assert scored.energy_N.std() > 0.01


def test_a_member_that_changed_is_refused(summed: tuple[Recipe, RunDirectory]) -> None:
    _, run_dir = summed
    shutil.rmtree(run_dir.energy("heat"))
    shutil.copytree(run_dir.energy("bit"), run_dir.energy("heat"))
    with pytest.raises(UserError, match="is not what both was made of"):
        JointModel.from_pretrained(run_dir.path, "both")


def test_a_sum_that_was_made_again_keeps_no_old_log_weights(
    summed: tuple[Recipe, RunDirectory],
) -> None:
    recipe, run_dir = summed
    path = run_dir.energy("both") / "sum.json"
    parts = json.loads(path.read_text())
    parts["constant"] += 1
    shutil.rmtree(run_dir.energy("both"))
    train_energy.run(recipe, run_dir)
    path.write_text(json.dumps(parts))
    (run_dir.energy("both") / "manifest.json").write_text('{"files": {}}')
    run_dir.results.unlink()
    with pytest.raises(UserError, match=r"log_weights/both.* are of another energy"):
        evaluate.run(recipe, run_dir)


@pytest.mark.parametrize(
    ("members", "name", "message"),
    [
        (("heat", "nobody"), "both", "nobody.*not in the recipe, which has"),
        (("heat", "heat"), "both", "heat.*is there twice"),
        (("heat",), "both", "members"),
        (("heat", "bit"), "bit", "bit.*is there twice"),
    ],
)
def test_sums_that_cannot_be_are_refused(
    tiny_run: Path, members: tuple[str, ...], name: str, message: str
) -> None:
    recipe = load_recipe(str(tiny_run / RECIPE))
    with pytest.raises(UserError, match=message):
        with_sum(recipe, *members, name=name)


def test_energies_of_two_language_models_do_not_add(tiny_run: Path) -> None:
    recipe = load_recipe(str(tiny_run / RECIPE))
    tree = recipe.model_dump(mode="json")
    tree["language_models"].append({**tree["language_models"][0], "name": "other"})
    tree["energies"][0]["language_model"] = "other"
    tree["sums"] = [{"name": "both", "members": [e["name"] for e in tree["energies"][:2]]}]
    with pytest.raises(UserError, match="corrects another language model"):
        check_recipe(tree)
