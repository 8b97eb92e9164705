"""P_LM's states, kept while negatives are drawn: what HeaT would read of the blocks itself."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from residual_ebm.config import Precision, Recipe, SamplingConfig
from residual_ebm.errors import UserError
from residual_ebm.files.blocks import choose_blocks, read_blocks
from residual_ebm.files.log_weights import read_log_weights
from residual_ebm.files.open_run import open_run
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.samples import open_samples, read_rows, write_rows
from residual_ebm.files.states import REAL_SAMPLE, WantedStates, open_states
from residual_ebm.files.storage import fingerprint, is_complete
from residual_ebm.models import kept_features
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.kept_features import KeptFeatures
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.progress import QUIET
from residual_ebm.recipe_file import check_recipe, load_recipe
from residual_ebm.stages import evaluate, negatives, proposals, train_energy
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
        assert int((sample_N == REAL_SAMPLE).sum()) == len(contrast)
        assert len(sample_N) == len(contrast) * (1 + contrast.num_stored)
        for rows in shards[:1]:
            prefix_R, sample_R = rows.prefix_N[:50].numpy(), rows.sample_N[:50].numpy()
            ids_RJT = contrast.batch(prefix_R, np.maximum(sample_R, 0)[:, None])[0].view(50, 2, -1)
            chosen_RT = ids_RJT[torch.arange(50), torch.from_numpy(sample_R != REAL_SAMPLE).long()]
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


def test_states_that_are_needed_again_come_back_the_same(tiny_copy: Path) -> None:
    """A HeaT that was deleted is trained again to the same bytes, from the same negatives."""
    recipe = load_recipe(str(tiny_copy / "recipe.yaml"))
    run_dir = RunDirectory(tiny_copy)
    head = run_dir.energy("heat") / "energy_head.safetensors"
    drawn = run_dir.negatives("base", "train")
    before = {path: path.read_bytes() for path in (head, *drawn.iterdir())}
    negatives.run(recipe, run_dir)
    assert not run_dir.states.exists()  # nobody needs them
    shutil.rmtree(run_dir.energy("heat"))
    negatives.run(recipe, run_dir)
    assert is_complete(run_dir.states / "base" / "train")
    train_energy.run(recipe, run_dir)
    assert {path: path.read_bytes() for path in before} == before


def test_negatives_that_would_come_out_otherwise_stay(tiny_copy: Path) -> None:
    """Other energies have learnt from them; another processor might draw others."""
    recipe = load_recipe(str(tiny_copy / "recipe.yaml"))
    run_dir = RunDirectory(tiny_copy)
    shutil.rmtree(run_dir.energy("heat"))
    path = sorted(run_dir.negatives("base", "train").glob("shard-*"))[0]
    rows = read_rows(path)
    rows.ids_NC[0, -1] += 1
    write_rows(path, rows)
    before = path.read_bytes()
    with pytest.raises(UserError, match="come out otherwise than when they were drawn"):
        negatives.run(recipe, run_dir)
    assert path.read_bytes() == before


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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("chunk_size", "chunks_per_shard"), [(5, 1), (5, 2), (100, 1)])
def test_states_from_disk_stand_beside_their_blocks(
    tiny_run: Path,
    tmp_path: Path,
    chunk_size: int,
    chunks_per_shard: int,
    precision: Precision,
) -> None:
    run_dir = RunDirectory(tiny_run)
    recipe = run_dir.recipe()
    lm = LanguageModel.from_pretrained(run_dir.language_model("base"), precision=precision)
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
        states=WantedStates(tmp_path / "states", [1]),
    )
    samples = open_samples(tmp_path / "samples", lm.fingerprint)
    assert sum(len(rows) for rows in samples.rows()) == 15
    contrast = read_contrast(blocks, samples, recipe.block)
    read, kept = (KeptFeatures(energy, *contrast.every_block()) for _ in range(2))
    read.compute(6, QUIET)
    states = open_states(tmp_path / "states", lm.fingerprint)
    assert states.layers == [1]
    kept.load(states.rows(), states.layers, blocks_per_prefix=6)
    expected = read(torch.arange(18))
    assert expected.std() > 0.01
    close = {"float32": 1e-3, "bfloat16": 0.2}[precision]
    torch.testing.assert_close(kept(torch.arange(18)), expected, rtol=0, atol=close)
    with pytest.raises(AssertionError, match="states of 18 blocks are missing"):
        kept.load([], [], blocks_per_prefix=6)


def test_samples_of_a_prefix_in_several_batches_keep_none(tiny_copy: Path) -> None:
    """Those of the later batches would not be beside the real block."""
    recipe = load_recipe(str(tiny_copy / "recipe.yaml"))
    lm = LanguageModel.from_pretrained(tiny_copy / "language_models" / "base")
    arguments = (RunDirectory(tiny_copy), lm, "base", "train", 10)
    assert negatives._states(recipe, *arguments) is not None
    few = recipe.negatives.model_copy(update={"chunk_size": 1})
    assert negatives._states(recipe.model_copy(update={"negatives": few}), *arguments) is None


def test_heads_on_other_layers_in_one_run(tiny_copy: Path) -> None:
    """Two HeaTs of one language model: states are kept of the layers of both, each takes its own,
    and scores drawn with the proposals are those of scoring the files again."""
    recipe = load_recipe(str(tiny_copy / "recipe.yaml"))
    tree = recipe.model_dump(mode="json")
    heat = next(entry for entry in tree["energies"] if entry["name"] == "heat")
    heads = {"one": [1], "both": [1, 2]}
    tree["energies"] = [
        {**heat, "name": name, "head": {**heat["head"], "layers": layers}}
        for name, layers in heads.items()
    ]
    recipe = check_recipe(tree)
    for part in ("negatives", "proposals", "energies", "log_weights"):
        shutil.rmtree(tiny_copy / part)
    (tiny_copy / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    run_dir = RunDirectory(tiny_copy)
    run_dir.results.unlink()
    negatives.run(recipe, run_dir)
    mark = fingerprint(run_dir.language_model("base"))
    assert open_states(run_dir.states / "base" / "train", mark).layers == [1, 2]
    train_energy.run(recipe, run_dir)
    proposals.run(recipe, run_dir)
    drawn = {name: dict(read_log_weights(run_dir.log_weights(name, "test"))) for name in heads}
    shutil.rmtree(tiny_copy / "log_weights")
    evaluate.run(recipe, run_dir)
    for name, by_prefix in drawn.items():
        scored = dict(read_log_weights(run_dir.log_weights(name, "test")))
        for prefix, log_weight_N in by_prefix.items():
            assert log_weight_N.std() > 0
            np.testing.assert_allclose(log_weight_N, scored[prefix], rtol=1e-3, atol=1e-3)
    weights = {
        row["energy"]: row["energy_parameters"] for row in run_dir.read_results()["joint_models"]
    }
    assert weights["one"] < weights["both"]
