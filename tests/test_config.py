"""Recipes: closed, typed, complete; overridden by path, compared key by key."""

import copy
from pathlib import Path

import pytest
import yaml

from residual_ebm.config import Recipe, SplitConfig
from residual_ebm.errors import UserError
from residual_ebm.recipe_file import (
    apply_override,
    check_recipe,
    differences,
    load_recipe,
    parse_yaml,
    recipe_names,
)


@pytest.fixture
def tiny() -> Recipe:
    return load_recipe("tiny")


def refusal(overrides: list[str]) -> UserError:
    with pytest.raises(UserError) as caught:
        load_recipe("tiny", overrides)
    return caught.value


def test_tiny_comes_with_the_package() -> None:
    assert "tiny" in recipe_names()


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_loads_under_its_own_name(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description


@pytest.mark.parametrize("name", recipe_names())
def test_a_resolved_recipe_is_complete_and_loads_back_the_same(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name, ["seed=3", "evaluation.num_examples=1"])
    file = tmp_path / "resolved.yaml"
    file.write_text(recipe.to_yaml(), encoding="utf-8")
    again = load_recipe(str(file))
    assert again == recipe
    assert differences(recipe, again) == []
    # Every default is written out: a later version with other defaults reads the same recipe.
    written = yaml.safe_load(file.read_text())
    assert set(written) == set(Recipe.model_fields)
    assert {"chunk_size", "chunks_per_shard"} <= set(written["proposals"])
    assert "threads" in written


def test_overrides_reach_items_of_lists_by_name_and_by_number(tiny: Recipe) -> None:
    number = [energy.name for energy in tiny.energies].index("bit")
    by_name = load_recipe("tiny", ["energies.bit.training.steps=7"])
    by_number = load_recipe("tiny", [f"energies.{number}.training.steps=7"])
    assert by_name == by_number
    assert by_name.energies[number].training.steps == 7
    assert tiny.energies[number].training.steps != 7


def test_a_name_goes_before_a_number() -> None:
    tree = {"models": [{"name": "1", "size": 0}, {"name": "b", "size": 0}]}
    apply_override(tree, "models.1.size=5")
    assert [model["size"] for model in tree["models"]] == [5, 0]


def test_overrides_apply_in_order_and_take_any_yaml_value() -> None:
    recipe = load_recipe(
        "tiny",
        [
            "seed=1",
            "seed=2",
            "corpus.max_documents=null",
            "evaluation.fit_energy_scale=false",
            "description=a = b",
            "corpus.split={train: 0.5, validation: 0.25, test: 0.25}",
        ],
    )
    assert recipe.seed == 2
    assert recipe.corpus.max_documents is None
    assert recipe.evaluation.fit_energy_scale is False
    assert recipe.description == "a = b"
    assert recipe.corpus.split == SplitConfig(train=0.5, validation=0.25, test=0.25)


def test_a_split_is_given_or_shares_and_an_override_goes_both_ways(tmp_path: Path) -> None:
    given = load_recipe("tiny", ["corpus.split=given"])
    assert given.corpus.split == "given"
    file = tmp_path / "given.yaml"
    file.write_text(given.to_yaml(), encoding="utf-8")
    assert load_recipe(str(file)) == given
    shares = "corpus.split={train: 0.8, validation: 0.1, test: 0.1}"
    assert load_recipe(str(file), [shares]) == load_recipe("tiny", [shares])
    (change,) = differences(given, load_recipe("tiny", [shares]))
    assert str(change) == "corpus.split was 'given', now ..."
    one = load_recipe("tiny", [shares, "corpus.split.test=0.05", "corpus.split.energy=0.05"])
    assert one.corpus.split == SplitConfig(train=0.8, energy=0.05, validation=0.1, test=0.05)


def test_an_override_can_fill_a_section_that_was_left_out(tiny: Recipe) -> None:
    tree = tiny.model_dump(mode="json", exclude={"evaluation"})
    apply_override(tree, "evaluation.batch_size=5")
    assert check_recipe(tree).evaluation.batch_size == 5


def test_a_section_written_once_and_used_twice_changes_apart() -> None:
    text = "a: &shared {steps: 1, deep: {x: [1]}}\nb: *shared\n"
    tree = parse_yaml(text, "text")
    apply_override(tree, "a.steps=2")
    apply_override(tree, "a.deep.x=3")
    assert tree == {"a": {"steps": 2, "deep": {"x": 3}}, "b": {"steps": 1, "deep": {"x": [1]}}}


def test_an_override_of_one_energy_leaves_the_others_alone(tiny: Recipe) -> None:
    changed = load_recipe("tiny", ["energies.heat.training.steps=7"])
    for before, after in zip(tiny.energies, changed.energies, strict=True):
        assert (before == after) == (before.name != "heat")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("3.5e+2", 350.0),
        ("-2e-4", -2e-4),
        (".5e1", 5.0),
        ("1.e-3", 1e-3),
        ("0.001", 0.001),
    ],
)
def test_a_learning_rate_in_any_notation_is_a_number(text: str, value: float) -> None:
    number = parse_yaml(text, "text")
    assert type(number) is float
    assert number == value


@pytest.mark.parametrize("text", ["e5", "1e", "1e5x", "1e-3 steps", "2e5f", "v1e3"])
def test_words_that_look_like_numbers_stay_words(text: str) -> None:
    assert parse_yaml(text, "text") == text


def test_numbers_are_not_guessed_from_words_nor_words_from_numbers() -> None:
    assert refusal(["energies.bit.training.learning_rate='1e-3'"]).field.endswith("learning_rate")
    assert refusal(["seed='3'"]).field == "seed"
    assert refusal(["seed=true"]).field == "seed"
    assert refusal(["description=3"]).field == "description"
    assert refusal(["evaluation.fit_energy_scale=1"]).field == "evaluation.fit_energy_scale"


@pytest.mark.parametrize(
    ("overrides", "field", "known"),
    [
        (["energies.unit.source=lm:nope"], "energies.unit.source", "base"),
        (["energies.bit.source=encoder:nope"], "energies.bit.source", "encoder"),
        (["energies.heat.language_model=nope"], "energies.heat.language_model", "base"),
    ],
)
def test_references_to_models_are_checked(overrides: list[str], field: str, known: str) -> None:
    error = refusal(overrides)
    assert error.field == field
    assert error.value == "nope"
    assert known in error.remedy


@pytest.mark.parametrize("kind", ["language_models", "encoders", "energies"])
def test_two_models_of_one_name_are_refused(tiny: Recipe, kind: str) -> None:
    tree = tiny.model_dump(mode="json")
    tree[kind].append(copy.deepcopy(tree[kind][0]))
    with pytest.raises(UserError, match="there twice"):
        check_recipe(tree)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["energies.heat.source=lm:base"], "energies.heat.source"),
        (["energies.unit.source=null"], "energies.unit.source"),
        (["energies.unit.head={num_heads: 2}"], "energies.unit.head"),
        (["language_models.base.source=gpt2"], "language_models.base.architecture"),
        (["language_models.base.architecture=null"], "language_models.base.architecture"),
        (
            ["language_models.base.architecture.attention_dropout=0.1"],
            "language_models.base.architecture.attention_dropout",
        ),
        (["language_models=[]"], "language_models"),
        (["corpus.split.validation=0", "corpus.split.train=0.8"], "corpus.split.validation"),
        (["energies.bit.training.adam_betas=[0.9]"], "energies.bit.training.adam_betas.1"),
    ],
)
def test_sections_that_do_not_fit_together_are_refused(overrides: list[str], field: str) -> None:
    assert refusal(overrides).field == field


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "a b", "ä", "a\n"])
def test_names_that_are_no_folders_are_refused(tiny: Recipe, name: str) -> None:
    tree = {**tiny.model_dump(mode="json"), "name": name}
    with pytest.raises(UserError, match="names a folder"):
        check_recipe(tree)


def test_a_model_may_not_be_named_like_the_training_of_another(tiny: Recipe) -> None:
    """base.training/ is where the resume state of base lives, and is deleted when base is done."""
    tree = tiny.model_dump(mode="json")
    tree["language_models"].append({**tree["language_models"][0], "name": "base.training"})
    with pytest.raises(UserError, match="training"):
        check_recipe(tree)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=5", ["seed", "0", "5"]),
        ("energies.unit.training.steps=5", ["energies.unit.training.steps", "5"]),
        ("block.continuation=until_end", ["block.continuation", "'fixed'", "'until_end'"]),
        ("corpus.max_documents=9", ["corpus.max_documents", "None", "9"]),
        ("energies=[]", ["energies.unit was left out"]),
        ("language_models.base.architecture.hidden_size=4", ["architecture.hidden_size", "4"]),
        ("language_models.base.architecture.rope_theta=4", ["architecture.rope_theta", "None"]),
    ],
)
def test_a_difference_names_the_key_and_both_values(
    tiny: Recipe, override: str, words: list[str]
) -> None:
    first, *_ = differences(tiny, load_recipe("tiny", [override]))
    assert all(word in str(first) for word in words)


def test_a_description_is_no_difference(tiny: Recipe) -> None:
    assert differences(tiny, load_recipe("tiny", ["description=another"])) == []


def test_all_differences_are_told_and_entries_go_by_their_names(tiny: Recipe) -> None:
    tree = tiny.model_dump(mode="json")
    unit, bit, heat = tree["energies"]
    more = {**bit, "name": "more"}
    unit["training"]["steps"] += 1
    tree["energies"] = [heat, more, unit]
    tree["seed"] = 9
    found = {change.place: change for change in differences(tiny, check_recipe(tree))}
    assert set(found) == {
        ("seed",),
        ("energies",),
        ("energies", "bit"),
        ("energies", "more"),
        ("energies", "unit", "training", "steps"),
    }
    assert str(found["energies",]) == "energies was 'unit, bit, heat', now 'heat, more, unit'"
    assert found["energies", "bit"].new is None
    assert found["energies", "more"].old is None


def test_only_corrected_language_models_are_sampled(tiny: Recipe) -> None:
    tree = tiny.model_dump(mode="json")
    tree["language_models"].append({**tree["language_models"][0], "name": "baseline"})
    recipe = check_recipe(tree)
    assert recipe.sampled_language_models == ["base"]
    tree["energies"][1]["language_model"] = "baseline"
    recipe = check_recipe(tree)
    assert recipe.sampled_language_models == ["base", "baseline"]
    assert recipe.language_model_of(recipe.energies[1]) == "baseline"
    tree["energies"] = []
    assert check_recipe(tree).sampled_language_models == []
