"""What a recipe would cost: parameters against the paper's, FLOPs and bytes against arithmetic."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from residual_ebm.errors import UserError
from residual_ebm.recipe_file import check_recipe, load_recipe, recipe_names
from residual_ebm.report.plan_table import print_plan
from residual_ebm.stages.plan import plan

PAPER = [name for name in recipe_names() if name.startswith("paper-")]


def networks(recipe: str, *overrides: str) -> dict[str, dict[str, Any]]:
    planned = plan(load_recipe(recipe, list(overrides)))
    return {row["name"]: row for row in planned["networks"]}


def test_there_are_four_recipes_of_the_paper() -> None:
    assert len(PAPER) == 4


@pytest.mark.parametrize("recipe", PAPER)
def test_parameters_are_those_of_the_paper(recipe: str) -> None:
    tolerance = {"balm": 0.065}  # of 12 layers as the paper writes it: 433 M, not 408 M
    rows = networks(recipe)
    for name, row in rows.items():
        published = row["published_parameters"]
        allowed = tolerance.get(name, 0.01 if name in ("base", "ralm", "unit") else 0.02)
        assert row["parameters"] == pytest.approx(published, rel=allowed), name
    assert {"base", "ralm", "balm", "unit", "bit-large-pretrained"} <= set(rows)


def test_the_large_baseline_of_12_layers_does_not_add_up_in_the_paper() -> None:
    width, layers, vocabulary, positions = 1568, 12, 50257, 512
    each = 12 * width**2 + 13 * width
    by_hand = layers * each + (vocabulary + positions + 2) * width
    assert networks("paper-ccnews-12l")["balm"]["parameters"] == by_hand
    assert by_hand == pytest.approx(433e6, rel=0.005)


def test_costs_are_the_arithmetic_that_is_documented() -> None:
    recipe = load_recipe("tiny")  # float32 throughout
    planned = plan(recipe)
    rows = {row["name"]: row for row in planned["networks"]}
    base, config = rows["base"], recipe.language_models[0]
    assert config.training is not None
    assert config.architecture is not None
    length, batch = recipe.block.length, config.training.batch_size
    layers, width = config.architecture["num_hidden_layers"], config.architecture["hidden_size"]
    heads = config.architecture["num_attention_heads"]
    tokens = config.training.steps * batch * length
    assert base["tokens"] == tokens
    assert base["flops"] == 3 * tokens * (2 * base["parameters"] + 4 * layers * length * width)
    activations = 2 * batch * length * layers * width * (34 + 5 * heads * length / width)
    assert base["memory_bytes"] == pytest.approx(16 * base["parameters"] + activations)
    assert rows["heat"]["frozen_parameters"] == base["parameters"]
    new = recipe.block.num_new_tokens
    for name, read in {
        "unit": recipe.block.prefix_length + 2 * new,  # a prefix once for both its blocks
        "bit": 2 * length,
        "heat": 2 * new,
    }.items():
        learning = next(entry for entry in recipe.energies if entry.name == name)
        assert learning.negatives_per_positive == 1
        items = learning.training.steps * learning.training.batch_size
        assert rows[name]["tokens"] == items * read
    work = {row["what"]: row for row in planned["work"]}
    learnt = recipe.negatives.num_prefixes + recipe.negatives.num_validation_prefixes
    # The real block of each prefix is read beside its negatives, for HeaT.
    per_prefix = recipe.negatives.samples_per_prefix + 1
    assert work["negatives of base"]["blocks"] == learnt * per_prefix
    drawn = work["proposals of base"]
    prefixes = recipe.proposals.num_validation_prefixes + recipe.proposals.num_test_prefixes
    assert drawn["blocks"] == prefixes * recipe.proposals.num_samples
    assert drawn["tokens"] == drawn["blocks"] * new + prefixes * recipe.block.prefix_length
    total = sum(row["flops"] for row in [*planned["networks"], *planned["work"]])
    assert planned["flops"] == pytest.approx(total)
    assert planned["device_hours"] == pytest.approx(total / (0.3 * 15.7e12 * 3600))
    assert planned["downloads"] == []


def test_float32_costs_hours_and_memory() -> None:
    """The paper trained its language models in single precision, eight times as slow on a V100."""
    half = plan(load_recipe("tiny", ["language_models.base.training.precision=bfloat16"]))
    single = plan(load_recipe("tiny", ["language_models.base.training.precision=float32"]))
    base, same = single["networks"][0], half["networks"][0]
    assert base["flops"] == same["flops"]
    slower = base["flops"] / (0.3 * 3600) * (1 / 15.7e12 - 1 / 125e12)
    assert single["device_hours"] == pytest.approx(half["device_hours"] + slower)
    weights = 16 * base["parameters"]
    assert base["memory_bytes"] - weights == pytest.approx(2 * (same["memory_bytes"] - weights))


def test_a_residual_counts_the_model_below_it() -> None:
    rows = networks("paper-books-12l")
    assert rows["ralm"]["frozen_parameters"] == rows["base"]["parameters"]


def test_what_would_be_downloaded() -> None:
    planned = plan(load_recipe("paper-books-24l"))
    assert planned["downloads"] == [
        "hf:bookcorpus/bookcorpus",
        "FacebookAI/roberta-base",
        "FacebookAI/roberta-large",
    ]


def test_a_folder_that_is_here_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_texts").mkdir()
    monkeypatch.chdir(tmp_path)
    assert plan(load_recipe("tiny", ["corpus.path=my_texts/"]))["downloads"] == []


def test_an_asset_that_is_not_fetched_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("REBM_CACHE", str(tmp_path_factory.mktemp("cache")))
    with pytest.raises(UserError, match=r"tokenizer.source = asset:smollm2-135m.*rebm assets get"):
        plan(load_recipe("quickstart"))


def test_every_row_is_shown() -> None:
    planned = plan(load_recipe("paper-ccnews-24l"))
    output = io.StringIO()
    print_plan(planned, Console(file=output, width=100))
    for row in planned["networks"]:
        assert row["name"] in output.getvalue()
    assert "hours of one V100" in output.getvalue()


def test_an_architecture_is_only_stated_of_a_pretrained_source() -> None:
    with pytest.raises(UserError, match=r"architecture.*only of a pretrained source"):
        load_recipe("tiny", ["energies.bit.architecture={model_type: bert}"])


def test_sums_are_counted_and_layers_checked() -> None:
    tree = load_recipe("tiny").model_dump(mode="json")
    tree["sums"] = [{"name": "both", "members": ["heat", "bit"]}]
    work = {row["what"]: row for row in plan(check_recipe(tree))["work"]}
    negatives = tree["negatives"]
    blocks = negatives["num_validation_prefixes"] * (1 + negatives["samples_per_prefix"])
    assert work["heat for both"]["blocks"] == work["bit for both"]["blocks"] == blocks
    heat = next(entry for entry in tree["energies"] if entry["name"] == "heat")
    heat["head"]["layers"] = [3]
    with pytest.raises(UserError, match=r"energies\.heat\.head\.layers.*3.*has 2 layers"):
        plan(check_recipe(tree))
