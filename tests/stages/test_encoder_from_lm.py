"""An encoder that starts from the language model's weights, and the BiT that starts from it."""

from pathlib import Path

import pytest

from residual_ebm.errors import UserError
from residual_ebm.files.open_run import open_run
from residual_ebm.files.storage import read_json
from residual_ebm.models.both_ways import is_bidirectional
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.models.loading import load_tokenizer
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages import prepare, train_encoder
from residual_ebm.stages.pipeline import run_all

TRAINING = (
    "{steps: 20, batch_size: 16, learning_rate: 3e-3, validate_every: 10, checkpoint_every: 10}"
)

OF_ITS_OWN = "source: scratch, tokenizer: {source: scratch}, architecture: {model_type: modernbert}"


def options(overrides: list[str], encoder: str = "source: lm:base") -> list[str]:
    bit = f"{{name: bit, kind: bit, source: encoder:both, training: {TRAINING}}}"
    return [
        *[option for option in overrides if not option.startswith(("encoders", "energies"))],
        f"encoders=[{{name: both, {encoder}, mask_probability: 0.3, training: {TRAINING}}}]",
        f"energies=[{bit}]",
    ]


def test_it_guesses_better_than_one_from_scratch_and_becomes_a_bit(
    tiny_run: Path, tmp_path: Path, tiny_overrides: list[str]
) -> None:
    recipe = load_recipe("tiny", options(tiny_overrides))
    with open_run(tmp_path / "run", recipe) as run_dir:
        run_all(recipe, run_dir)
    losses = {
        folder: min(entry["loss"] for entry in read_json(folder / "training.json")["validations"])
        for folder in (run_dir.encoder("both"), tiny_run / "encoders" / "encoder")
    }
    from_lm, from_scratch = losses.values()
    assert from_lm < from_scratch
    language_model = LanguageModel.from_pretrained(run_dir.language_model("base"))
    energy = EnergyModel.from_pretrained(run_dir.energy("bit"), language_model)
    assert is_bidirectional(energy.network.backbone)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ("source: lm:nobody", "not in the recipe, which has base"),
        ("source: asset:minilm-l6", "starts from scratch or lm:NAME"),
        ("source: lm:base, tokenizer: {source: scratch}", "comes with lm:base; remove it"),
        ("source: lm:base, architecture: {model_type: bert}", "comes with lm:base; remove it"),
        ("source: scratch", "source: scratch needs this section; add it"),
    ],
)
def test_other_sources_are_refused(encoder: str, message: str, tiny_overrides: list[str]) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe("tiny", options(tiny_overrides, encoder))


def test_a_tokenizer_without_a_mask_is_refused_before_the_language_model_learns(
    tiny_run: Path, tmp_path: Path, tiny_overrides: list[str]
) -> None:
    tokenizer = load_tokenizer(str(tiny_run / "blocks" / "tokenizer"), "tokenizer")
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "without-mask")
    source = f"tokenizer.source={tmp_path / 'without-mask'}"
    recipe = load_recipe("tiny", [*options(tiny_overrides), source])
    refused = pytest.raises(UserError, match=r"encoders\.both\.tokenizer = .*has no mask token")
    with refused, open_run(tmp_path / "run", recipe) as run_dir:
        run_all(recipe, run_dir)
    assert run_dir.blocks.exists()
    assert not run_dir.language_model("base").exists()

    own = load_recipe("tiny", [*options(tiny_overrides, OF_ITS_OWN), source])
    with open_run(tmp_path / "own", own) as run_dir:
        prepare.run(own, run_dir)
        train_encoder.check_tokenizers(own, run_dir)  # as the remedy says
