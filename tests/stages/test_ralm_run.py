"""A RALM in a recipe: trained on top of another model, evaluated and sampled as any other."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from residual_ebm.errors import UserError
from residual_ebm.files.blocks import read_blocks
from residual_ebm.files.open_run import open_run
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages import prepare, train_lm
from residual_ebm.stages.score_proposals import real_log_prob

ARCHITECTURE = (
    "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,"
    " num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 64,"
    " tie_word_embeddings: true}"
)
TRAINING = (
    "{steps: 120, batch_size: 16, learning_rate: 3e-3, validate_every: 40, checkpoint_every: 120}"
)
RALM = f"{{name: ralm, residual_of: base, architecture: {ARCHITECTURE}, training: {TRAINING}}}"


def with_ralm(tiny_overrides: list[str]) -> list[str]:
    recipe = load_recipe("tiny", tiny_overrides)
    base = recipe.language_models[0].model_dump_json()
    return [*tiny_overrides, f"language_models=[{base}, {RALM}]"]


def test_a_residual_learns_on_top_of_a_model_that_stays(
    tmp_path: Path, tiny_overrides: list[str]
) -> None:
    recipe = load_recipe("tiny", with_ralm(tiny_overrides))
    with open_run(tmp_path / "run", recipe) as run_dir:
        prepare.run(recipe, run_dir)
        train_lm.run(recipe, run_dir)
    base = load_file(run_dir.language_model("base") / "model.safetensors")
    joined = load_file(run_dir.language_model("ralm") / "model.safetensors")
    for name, weight in base.items():
        assert torch.equal(joined[f"base.{name}"], weight), name
    blocks = read_blocks(run_dir.blocks / "test.arrow")
    log_prob = {}
    for name in ("base", "ralm"):
        model = LanguageModel.from_pretrained(run_dir.language_model(name), precision="float32")
        log_prob[name] = real_log_prob(model, blocks, recipe.block.prefix_length, 64).mean()
    assert log_prob["ralm"] > log_prob["base"] + 0.1
    samples = model.sample(torch.from_numpy(blocks.ids_BT[0, :8]), 20, 5, seed=0)
    assert samples.ids_NT.shape == (20, 5)


def test_a_residual_that_can_speak_begins_close_to_the_model_below(
    tmp_path: Path, tiny_overrides: list[str]
) -> None:
    """As it is, it would say everything twice."""
    recipe = load_recipe("tiny", tiny_overrides)
    with open_run(tmp_path / "run", recipe) as run_dir:
        prepare.run(recipe, run_dir)
        train_lm.run(recipe, run_dir)
    folder = run_dir.language_model("base")
    hardly = TRAINING.replace("120", "1").replace("3e-3", "1e-9").replace("40", "1")
    overrides = [
        *tiny_overrides,
        f"language_models=[{{name: base, source: {folder}}},"
        f" {{name: ralm, source: {folder}, residual_of: base, training: {hardly}}}]",
        f"tokenizer.source={folder}",
    ]
    again = load_recipe("tiny", overrides)
    with open_run(tmp_path / "again", again) as run_dir:
        prepare.run(again, run_dir)
        train_lm.run(again, run_dir)
    blocks = read_blocks(run_dir.blocks / "test.arrow")
    log_prob = {}
    for name in ("base", "ralm"):
        model = LanguageModel.from_pretrained(run_dir.language_model(name), precision="float32")
        log_prob[name] = real_log_prob(model, blocks, recipe.block.prefix_length, 64).mean()
    assert log_prob["ralm"] == pytest.approx(log_prob["base"], abs=2.0)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("residual_of: base", "residual_of: nobody"),
        ("residual_of: base", "residual_of: ralm"),
    ],
)
def test_a_residual_needs_a_model_before_it(
    tiny_overrides: list[str], change: str, fault: str
) -> None:
    overrides = with_ralm(tiny_overrides)
    overrides[-1] = overrides[-1].replace(change, fault)
    with pytest.raises(UserError, match=r"language_models.ralm.residual_of = .*which has base"):
        load_recipe("tiny", overrides)


def test_a_residual_of_a_residual_is_refused(tmp_path: Path, tiny_overrides: list[str]) -> None:
    recipe = load_recipe("tiny", with_ralm(tiny_overrides))
    with open_run(tmp_path / "run", recipe) as run_dir:
        prepare.run(recipe, run_dir)
        train_lm.run(recipe, run_dir)
    overrides = with_ralm(tiny_overrides)
    folder = run_dir.language_model("ralm")
    overrides[-1] = overrides[-1].replace(f"architecture: {ARCHITECTURE}", f"source: {folder}")
    overrides.append(f"tokenizer.source={folder}")
    again = load_recipe("tiny", overrides)
    with open_run(tmp_path / "again", again) as run_dir:
        prepare.run(again, run_dir)
        with pytest.raises(UserError, match=r"ralm.source = .*: cannot be added to base"):
            train_lm.run(again, run_dir)


def test_a_residual_must_learn(tiny_overrides: list[str]) -> None:
    overrides = with_ralm(tiny_overrides)
    overrides[-1] = overrides[-1].replace(
        f"architecture: {ARCHITECTURE}, training: {TRAINING}", "source: x"
    )
    with pytest.raises(UserError, match="a residual must learn"):
        load_recipe("tiny", overrides)


def test_unit_cannot_start_from_a_product(tiny_overrides: list[str]) -> None:
    overrides = [*with_ralm(tiny_overrides), "energies.unit.source=lm:ralm"]
    with pytest.raises(
        UserError, match=r"energies.unit.source = ralm: not in the recipe, which has base"
    ):
        load_recipe("tiny", overrides)
