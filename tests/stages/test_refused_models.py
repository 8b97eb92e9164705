"""Pretrained models that do not fit what the recipe asks of them."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from residual_ebm.errors import UserError
from residual_ebm.files.blocks import read_blocks
from residual_ebm.files.open_run import open_run
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages import prepare, train_energy, train_lm


def test_a_language_model_needs_its_own_tokenizer(
    tiny_run: Path, tmp_path: Path, tiny_overrides: list[str]
) -> None:
    """Ids of another tokenizer are in range and mean other words: every number would be wrong."""
    base = tiny_run / "language_models" / "base"
    recipe = load_recipe(
        "tiny",
        [
            *tiny_overrides,
            "language_models.base.architecture=null",
            f"language_models.base.source={base}",
            "tokenizer.vocab_size=60",
        ],
    )
    with open_run(tmp_path / "run", recipe) as run_dir:
        prepare.run(recipe, run_dir)
        with pytest.raises(UserError, match="not the tokenizer of") as caught:
            train_lm.run(recipe, run_dir)
    assert f"set tokenizer.source={base}" in str(caught.value)


def test_a_stated_architecture_is_checked(
    tiny_run: Path, tmp_path: Path, tiny_overrides: list[str]
) -> None:
    encoder = tiny_run / "encoders" / "encoder"
    recipe = load_recipe(
        "tiny",
        [
            *tiny_overrides,
            f"energies.bit.source={encoder}",
            "energies.bit.architecture={model_type: modernbert, hidden_size: 12345}",
        ],
    )
    with open_run(tmp_path / "run", recipe) as run_dir:
        prepare.run(recipe, run_dir)
        with pytest.raises(
            UserError, match=r"energies.bit.architecture.hidden_size = 12345: .* has"
        ):
            train_energy.check_pretrained(recipe, run_dir)


@pytest.mark.parametrize(
    ("energy", "folder", "reads"),
    [("bit", "language_models/base", "left to right"), ("unit", "encoders/encoder", "both ways")],
)
def test_a_backbone_of_the_other_direction_is_refused(
    tiny_copy: Path, tiny_overrides: list[str], energy: str, folder: str, reads: str
) -> None:
    recipe = load_recipe(
        "tiny", [*tiny_overrides, f"energies.{energy}.source={tiny_copy / folder}"]
    )
    for path in (tiny_copy / "energies").iterdir():
        path.rename(tiny_copy.parent / path.name)
    (tiny_copy / "recipe.yaml").write_text(recipe.to_yaml())
    with (
        open_run(tiny_copy, recipe) as run_dir,
        pytest.raises(UserError, match=reads) as caught,
    ):
        train_energy.run(recipe, run_dir)
    assert caught.value.field == f"energies.{energy}.source"


def test_words_unknown_to_the_tokenizer_leave_no_floor(
    tmp_path: Path, tiny_overrides: list[str]
) -> None:
    recipe = load_recipe("tiny", [*tiny_overrides, "tokenizer.vocab_size=20"])
    with open_run(tmp_path / "run", recipe) as run_dir:
        prepare.run(recipe, run_dir)
    blocks = read_blocks(run_dir.blocks / "test.arrow")
    assert all(value != value or value < 0 for value in blocks.true_log_prob_B)
    assert any(value != value for value in blocks.true_log_prob_B)


def test_end_of_text_is_learnt_as_any_other_token(tiny_run: Path) -> None:
    """It also pads, and torch freezes the embedding of a padding index."""
    before = load_file(tiny_run / "language_models" / "base" / "model.safetensors")
    after = load_file(tiny_run / "energies" / "unit" / "model.safetensors")
    name = "model.embed_tokens.weight"
    moved = (before[name] - after[name.removeprefix("model.")]).abs().amax(dim=1)
    assert moved[0] > 0
