"""P_LM's states, kept while negatives are drawn: what HeaT would read of the blocks itself."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from residual_ebm.config import Recipe, SamplingConfig
from residual_ebm.errors import UserError
from residual_ebm.files.blocks import choose_blocks, read_blocks
from residual_ebm.files.run_directory import RunDirectory, open_run
from residual_ebm.files.samples import open_samples
from residual_ebm.files.states import REAL, WantedStates, open_states
from residual_ebm.files.storage import is_complete
from residual_ebm.models import kept_features
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.kept_features import KeptFeatures
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.progress import QUIET
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages import negatives, train_energy
from residual_ebm.stages.contrast import read_contrast
from residual_ebm.stages.sampling import draw_samples


def drawn_again(folder: Path) -> tuple[Recipe, RunDirectory]:
    """A finished run whose negatives are drawn anew; its HeaT is not there yet."""
    recipe = load_recipe(str(folder / "recipe.yaml"))
    shutil.rmtree(folder / "negatives")
    shutil.rmtree(folder / "energies" / "heat")
    with open_run(folder, recipe) as run_dir:
        negatives.run(recipe, run_dir)
    return recipe, run_dir


def test_kept_states_are_those_of_reading_the_blocks(tiny_copy: Path) -> None:
    recipe, run_dir = drawn_again(tiny_copy)
    lm = LanguageModel.from_pretrained(
        run_dir.language_model("base"), precision=recipe.precision, device="cpu"
    )
    for split in negatives.SPLITS:
        samples = open_samples(run_dir.negatives("base", split), lm.fingerprint)
        blocks = read_blocks(run_dir.blocks / f"{negatives.source_split(run_dir, split)}.arrow")
        contrast = read_contrast(blocks, samples, recipe.block)
        shards = list(open_states(run_dir.states / "base" / split, lm.fingerprint).rows())
        sample_N = torch.cat([rows.sample_N for rows in shards])
        assert int((sample_N == REAL).sum()) == len(contrast)
        assert len(sample_N) == len(contrast) * (1 + contrast.num_stored)
        for rows in shards[:1]:
            prefix_R, sample_R = rows.prefix_N[:50].numpy(), rows.sample_N[:50].numpy()
            ids_RJT = contrast.batch(prefix_R, np.maximum(sample_R, 0)[:, None])[0].view(50, 2, -1)
            chosen_RT = ids_RJT[torch.arange(50), torch.from_numpy(sample_R != REAL).long()]
            read = lm.features(chosen_RT, recipe.block.prefix_length)
            for kept, expected in (
                (rows.hidden_NCH, read.hidden_BCH),
                (rows.log_prob_NC, read.log_prob_BC),
                (rows.entropy_NC, read.entropy_BC),
            ):
                assert expected.std() > 0.01
                torch.testing.assert_close(kept[:50], expected, rtol=1e-3, atol=1e-3)


def test_heat_learns_from_them_and_then_they_go(
    tiny_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (tiny_copy / "energies" / "heat" / "energy_head.safetensors").read_bytes()
    recipe, run_dir = drawn_again(tiny_copy)
    assert is_complete(run_dir.states / "base" / "train")

    def compute(*_: object) -> None:
        raise AssertionError("nothing is to be read again")

    monkeypatch.setattr(KeptFeatures, "compute", compute)
    train_energy.run(recipe, run_dir)
    assert (run_dir.energy("heat") / "energy_head.safetensors").read_bytes() == before
    assert not run_dir.states.exists()


def test_an_interrupted_drawing_goes_on_with_both(tiny_copy: Path) -> None:
    recipe, run_dir = drawn_again(tiny_copy)
    states, drawn = run_dir.states / "base" / "train", run_dir.negatives("base", "train")
    whole = {path: path.read_bytes() for folder in (states, drawn) for path in folder.iterdir()}
    shards = sorted(states.glob("shard-*"))
    for folder in (states, drawn):
        (folder / "manifest.json").unlink()
    shards[-1].unlink()  # of two shards that a kill left, one is without its states
    with open_run(tiny_copy, recipe):
        negatives.run(recipe, run_dir)
    assert {path: path.read_bytes() for path in whole} == whole


def test_states_of_another_language_model_are_refused(tiny_copy: Path) -> None:
    _, run_dir = drawn_again(tiny_copy)
    with pytest.raises(UserError, match="another language model"):
        open_states(run_dir.states / "base" / "train", "another")


def test_too_many_states_are_not_kept(tiny_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_features, "_MAX_BYTES", 1000)
    _, run_dir = drawn_again(tiny_copy)
    assert not run_dir.states.exists()


@pytest.mark.parametrize(("chunk_size", "chunks_per_shard"), [(2, 1), (2, 4), (100, 1)])
def test_samples_of_a_prefix_may_lie_in_several_chunks(
    tiny_run: Path, tmp_path: Path, chunk_size: int, chunks_per_shard: int
) -> None:
    run_dir = RunDirectory(tiny_run)
    recipe = run_dir.recipe()
    lm = LanguageModel.from_pretrained(run_dir.language_model("base"), precision="float32")
    energy = EnergyModel.from_pretrained(run_dir.energy("heat"), lm, precision="float32")
    blocks = read_blocks(run_dir.blocks / "train.arrow")
    block_P = choose_blocks(len(blocks), 3, 0, "some")
    draw_samples(
        lm,
        blocks,
        block_P,
        5,
        block=recipe.block,
        sampling=SamplingConfig(chunk_size=chunk_size, chunks_per_shard=chunks_per_shard),
        folder=tmp_path / "samples",
        seed=0,
        progress=QUIET,
        label="negatives",
        states=WantedStates(tmp_path / "states", []),
    )
    samples = open_samples(tmp_path / "samples", lm.fingerprint)
    assert sum(len(rows) for rows in samples.rows()) == 15
    contrast = read_contrast(blocks, samples, recipe.block)
    every_block = contrast.batch(np.arange(3), np.tile(np.arange(5), (3, 1)))
    read, kept = KeptFeatures(energy, *every_block), KeptFeatures(energy, *every_block)
    read.compute(6, QUIET)
    kept.load(open_states(tmp_path / "states", lm.fingerprint).rows(), [], blocks_per_prefix=6)
    expected = read(torch.arange(18))
    assert expected.std() > 0.01
    torch.testing.assert_close(kept(torch.arange(18)), expected, rtol=1e-3, atol=1e-3)
