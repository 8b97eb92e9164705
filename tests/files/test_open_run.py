"""A run that grows: what is there stays, what is new is made, and nothing else may change."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from residual_ebm.config import Recipe
from residual_ebm.errors import UserError
from residual_ebm.files.open_run import open_run
from residual_ebm.files.run_directory import RECIPE, RunDirectory, resume_folder
from residual_ebm.files.storage import is_complete, write_json
from residual_ebm.progress import Progress
from residual_ebm.recipe_file import check_recipe, load_recipe
from residual_ebm.report.page import made_text
from residual_ebm.stages import analyze, negatives, train_energy
from residual_ebm.stages.gap import gap_report
from residual_ebm.stages.pipeline import progress_of, run_all

Change = Callable[[dict[str, Any]], None]


def changed(folder: Path, change: Change) -> Recipe:
    tree = load_recipe(str(folder / RECIPE)).model_dump(mode="json")
    change(tree)
    return check_recipe(tree)


def more_rows(tree: dict[str, Any]) -> None:
    """One more of each kind of model, and more of the evaluation; new energies are not last."""
    base, (unit, bit, heat) = tree["language_models"][0], tree["energies"]
    tree["language_models"].append({**base, "name": "ralm", "residual_of": "base"})
    short = {**bit["training"], "steps": 5, "validate_every": 5, "learning_rate": 1e-3}
    more = {**bit, "name": "more", "training": short}
    tree["energies"] = [unit, more, bit, heat]
    tree["sums"].append({"name": "both", "members": ["unit", "more"]})
    tree["proposals"]["deep"] = {"num_prefixes": 2, "num_samples": 64}
    tree["evaluation"]["num_draws"] = 4
    tree["evaluation"]["per_step"] = {"num_prefixes": 1, "num_samples": 8, "num_enumerated": 1}


def made(run: Path) -> dict[str, bytes]:
    """What a recipe decides; logs tell in which order things were made."""
    logs = ("metrics.jsonl", "timings.json", "growth.json", ".lock", "report.html", "results.json")
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name not in logs and "tensorboard" not in path.parts
    }


def test_a_grown_run_is_the_run_that_its_recipe_makes_at_once(
    tiny_run: Path, tiny_copy: Path, tmp_path: Path
) -> None:
    before = made(tiny_copy)
    recipe = changed(tiny_copy, more_rows)
    with open_run(tiny_copy, recipe, grow=True) as run_dir:
        grown = run_all(recipe, run_dir)
    with open_run(tmp_path / "at-once", recipe) as run_dir:
        at_once = run_all(recipe, run_dir)
    assert {entry["state"] for entry in progress_of(recipe, RunDirectory(tiny_copy))} == {"done"}
    assert made(tiny_copy) == made(tmp_path / "at-once")
    assert {key: value for key, value in grown.items() if key != "growth"} == {
        key: value for key, value in at_once.items() if key != "growth"
    }
    after = made(tiny_copy)
    kept = [path for path in before if path not in (RECIPE, "analysis.json")]
    assert all(after[path] == before[path] for path in kept)
    assert [row["name"] for row in grown["language_models"]] == ["base", "ralm"]
    # Said, and only of the run that grew.
    assert at_once["growth"] == []
    assert "was changed" not in made_text(at_once)
    (entry,) = grown["growth"]
    assert "energies.more was added" in entry["changes"]
    assert "evaluation.num_draws was 10, now 4" in made_text(grown)
    # New rows after a table had been made are no secret.
    table_by = json.loads((tiny_run / "results.json").read_text())["commit"]
    assert f"after a table had been made, by commit {table_by[:10]}" in made_text(grown)


def test_only_who_asks_for_it_has_a_run_grow(tiny_copy: Path) -> None:
    before = made(tiny_copy)
    recipe = changed(tiny_copy, more_rows)
    with (
        pytest.raises(UserError, match=r"language_models\.ralm was added.*add --grow"),
        open_run(tiny_copy, recipe),
    ):
        pass
    assert made(tiny_copy) == before
    assert (tiny_copy / "results.json").exists()


def _set(*path: str, to: Any) -> Change:
    def change(tree: dict[str, Any]) -> None:
        *parents, last = path
        node: Any = tree
        for key in parents:
            names = [item["name"] for item in node] if isinstance(node, list) else []
            node = node[names.index(key)] if names else node[key]
        node[last] = to

    return change


def _another_first_model(tree: dict[str, Any]) -> None:
    tree["language_models"].insert(0, {**tree["language_models"][0], "name": "first"})


def _drop(section: str) -> Change:
    return lambda tree: tree[section].pop()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set("seed", to=5), "seed was 0"),
        (_set("block", "prefix_length", to=9), "block.prefix_length"),
        (_set("threads", to=3), "threads"),
        (_set("language_models", "base", "training", "steps", to=41), "language_models.base"),
        (_set("encoders", "encoder", "mask_probability", to=0.5), "encoders.encoder"),
        (_set("energies", "bit", "training", "steps", to=21), "energies.bit.training.steps"),
        (_drop("energies"), "energies.heat"),
        (_another_first_model, "language_models.first"),
        (_set("negatives", "num_prefixes", to=97), "negatives.num_prefixes"),
        (_set("proposals", "num_samples", to=33), "proposals.num_samples"),
        (_set("evaluation", "batch_size", to=3), "evaluation.batch_size"),
    ],
)
def test_what_things_were_made_from_cannot_change(
    tiny_run: Path, change: Change, named: str
) -> None:
    before = made(tiny_run)
    recipe = changed(tiny_run, change)
    with pytest.raises(UserError) as caught, open_run(tiny_run, recipe, grow=True):
        pass
    assert named in caught.value.remedy
    assert "--grow" not in caught.value.remedy
    assert made(tiny_run) == before
    assert (tiny_run / "results.json").exists()


def test_the_fault_that_is_told_is_one_in_the_way(tiny_run: Path) -> None:
    def both(tree: dict[str, Any]) -> None:
        more_rows(tree)
        _set("negatives", "num_prefixes", to=97)(tree)

    with (
        pytest.raises(UserError, match=r"negatives\.num_prefixes"),
        open_run(tiny_run, changed(tiny_run, both), grow=True),
    ):
        pass


def test_a_training_may_change_until_it_begins(tiny_copy: Path) -> None:
    run_dir = RunDirectory(tiny_copy)
    recipe = changed(tiny_copy, _set("energies", "bit", "training", "steps", to=21))
    shutil.rmtree(run_dir.energy("bit"))
    resume_folder(run_dir.energy("bit")).mkdir()
    with (
        pytest.raises(UserError, match=r"energies\.bit\.training\.steps was 20, now 21"),
        open_run(tiny_copy, recipe, grow=True),
    ):
        pass
    resume_folder(run_dir.energy("bit")).rmdir()
    with open_run(tiny_copy, recipe, grow=True) as run_dir:
        assert run_dir.recipe() == recipe
    with open_run(tiny_copy, recipe):  # once is enough
        pass


def test_deep_proposals_come_once(tiny_copy: Path) -> None:
    deep = {"num_prefixes": 2, "num_samples": 64}
    with open_run(tiny_copy, changed(tiny_copy, _set("proposals", "deep", to=deep)), grow=True):
        (tiny_copy / "proposals" / "base" / "deep").mkdir()
    again = changed(tiny_copy, _set("proposals", "deep", "num_samples", to=128))
    with (
        pytest.raises(UserError, match=r"proposals\.deep\.num_samples was 64, now 128"),
        open_run(tiny_copy, again, grow=True),
    ):
        pass


def test_a_first_heat_and_the_loss_of_the_last_are_refused_once_negatives_are_drawn(
    tiny_copy: Path,
) -> None:
    recipe = load_recipe(str(tiny_copy / RECIPE))
    heat = recipe.energies[-1].model_dump(mode="json")
    without = changed(tiny_copy, _drop("energies"))
    RunDirectory(tiny_copy).write_recipe(without)
    second = changed(tiny_copy, lambda tree: tree["energies"].append({**heat, "name": "new"}))
    with pytest.raises(UserError, match=r"energies\.new"), open_run(tiny_copy, second, grow=True):
        pass
    RunDirectory(tiny_copy).write_recipe(recipe)
    shutil.rmtree(RunDirectory(tiny_copy).energy("heat"))
    refused = pytest.raises(UserError, match=r"energies\.heat was left out")
    with refused, open_run(tiny_copy, without, grow=True):
        pass
    beside = changed(tiny_copy, lambda tree: tree["energies"].append({**heat, "name": "new"}))
    with open_run(tiny_copy, beside, grow=True):
        pass


def test_a_kill_between_note_and_recipe_is_told_once(tiny_copy: Path) -> None:
    recipe = changed(tiny_copy, _set("evaluation", "num_draws", to=4))
    before = (tiny_copy / RECIPE).read_bytes()
    for _ in range(2):
        with open_run(tiny_copy, recipe, grow=True):
            pass
        (tiny_copy / RECIPE).write_bytes(before)
    assert len(json.loads((tiny_copy / "growth.json").read_text())) == 1


def test_a_heat_of_other_layers_is_added_while_another_is_in_training(tiny_copy: Path) -> None:
    """Kept states have the layers of the recipe that drew them."""
    recipe = load_recipe(str(tiny_copy / RECIPE))
    run_dir = RunDirectory(tiny_copy)
    shutil.rmtree(run_dir.energy("heat"))
    negatives.run(recipe, run_dir)
    assert run_dir.states.exists()

    def reads_more(tree: dict[str, Any]) -> None:
        heat = tree["energies"][-1]
        tree["energies"].append({**heat, "name": "deeper", "head": {**heat["head"], "layers": [1]}})

    grown = changed(tiny_copy, reads_more)
    before = shards(run_dir)
    with open_run(tiny_copy, grown, grow=True) as run_dir:
        negatives.run(grown, run_dir)
        train_energy.run(grown, run_dir)
    assert shards(run_dir) == before
    assert is_complete(run_dir.energy("deeper"))


def test_kept_states_stay_where_no_energy_reads_other_layers(tiny_copy: Path) -> None:
    recipe = load_recipe(str(tiny_copy / RECIPE))
    run_dir = RunDirectory(tiny_copy)
    shutil.rmtree(run_dir.energy("heat"))
    negatives.run(recipe, run_dir)

    def trains_longer(tree: dict[str, Any]) -> None:
        tree["energies"][-1]["training"]["steps"] += 1
        tree["evaluation"]["num_examples"] += 1

    with open_run(tiny_copy, changed(tiny_copy, trains_longer), grow=True) as run_dir:
        assert is_complete(run_dir.states / "base" / "train")


def shards(run_dir: RunDirectory) -> list[bytes]:
    return [path.read_bytes() for path in sorted(run_dir.path.glob("negatives/*/*/*.arrow"))]


def test_the_table_of_before_stays_until_there_is_a_new_one(tiny_copy: Path) -> None:
    before = (tiny_copy / "results.json").read_bytes()
    recipe = changed(tiny_copy, more_rows)
    said = Said()
    with open_run(tiny_copy, recipe, grow=True, progress=said) as run_dir:
        assert not run_dir.has_results()
        with pytest.raises(UserError, match="older version or recipe"):
            analyze.run(recipe, run_dir)
    assert "the run grows: energies.more was added" in said.notes
    assert (tiny_copy / "results.json").read_bytes() == before
    states = {entry["what"]: entry["state"] for entry in progress_of(recipe, run_dir)}
    assert states["results"] == states["analysis"] == states["energy more"] == "missing"


def test_a_training_that_is_given_up_can_be_taken_back(tiny_copy: Path) -> None:
    """And the refusal names what is in the way."""
    old = load_recipe(str(tiny_copy / RECIPE))
    recipe = changed(tiny_copy, more_rows)
    with open_run(tiny_copy, recipe, grow=True) as run_dir:
        folder = resume_folder(run_dir.energy("more"))
        folder.mkdir()
    with pytest.raises(UserError) as caught, open_run(tiny_copy, old, grow=True):
        pass
    assert "energies/more.training too" in caught.value.remedy
    assert "or delete that folder" in caught.value.remedy
    folder.rmdir()
    with open_run(tiny_copy, old, grow=True) as run_dir:
        assert run_dir.has_results()  # those of before, which were never lost


def test_a_grown_run_says_how_it_goes_on(tiny_copy: Path) -> None:
    old = load_recipe(str(tiny_copy / RECIPE))
    with open_run(tiny_copy, changed(tiny_copy, more_rows), grow=True):
        pass
    with pytest.raises(UserError) as caught, open_run(tiny_copy, old):
        pass
    command = f"`rebm run {tiny_copy / RECIPE} --out {tiny_copy}` goes on as it is"
    assert command in caught.value.remedy


def test_the_batch_size_of_scoring_decides_energies_as_well(tiny_copy: Path) -> None:
    shutil.rmtree(tiny_copy / "log_weights")
    recipe = changed(tiny_copy, _set("evaluation", "batch_size", to=3))
    refused = pytest.raises(UserError, match=r"evaluation\.batch_size was .*, energies too")
    with refused, open_run(tiny_copy, recipe, grow=True):
        pass
    shutil.rmtree(tiny_copy / "energies")
    with open_run(tiny_copy, recipe, grow=True):
        pass


class Said(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_results_that_lack_what_is_resampled_are_made_anew(tiny_copy: Path) -> None:
    """Their gap was another number, which is no bound at every n."""
    run_dir = RunDirectory(tiny_copy)
    results = run_dir.read_results()
    assert run_dir.has_results()
    del results["joint_models"][-1]["test"]["resampled"]
    write_json(run_dir.results, results)
    assert not run_dir.has_results()
    with pytest.raises(UserError, match="of an older version or recipe"):
        gap_report(run_dir, None, 0)
