"""No seam between positives and negatives.

Positives are written as a shard of negatives and read by the real loader: no energy can tell the
two classes. With a planted seam it can, so the first result is worth something.

Shapes: B blocks, W = T + 1 tokens of a window, T of a block, C of a continuation.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedTokenizerFast,
)

from residual_ebm.config import (
    BlockConfig,
    ContinuationMode,
    EnergyConfig,
    SamplingConfig,
    TrainingConfig,
)
from residual_ebm.files.blocks import (
    Blocks,
    choose_blocks,
    cut_blocks,
    read_blocks,
    write_blocks,
)
from residual_ebm.files.grammar import generate_documents
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.samples import (
    SampleRows,
    open_samples,
    plan_shards,
    sample_manifest,
    shard_path,
    write_rows,
)
from residual_ebm.files.storage import write_manifest
from residual_ebm.files.tokenizers import train_tokenizer
from residual_ebm.models import energy_batches, energy_inputs
from residual_ebm.models.energy import EnergyInfo, EnergyModel
from residual_ebm.models.energy_networks import TransformerEnergy
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.progress import QUIET
from residual_ebm.randomness import torch_seed
from residual_ebm.stages.contrast import Contrast, read_contrast
from residual_ebm.stages.train_energy import train_nce

# Short, so that one token is much of a block and a small network soon sees that it is missing.
PREFIX_LENGTH, LENGTH = 3, 6
NUM_BLOCKS = {"train": 5000, "held out": 2000}
FINGERPRINT = "fingerprint of P_LM"
MODES: list[ContinuationMode] = ["fixed", "until_end"]
TOKENIZERS = ["same", "different"]

DECODE_BLOCKS = energy_inputs.decode_blocks
SHARDS = SamplingConfig(chunk_size=300, chunks_per_shard=2)

# What is written as a negative: continuations and their lengths, of windows of T + 1 tokens.
Seam = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def no_seam(ids_BW: np.ndarray, length_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return ids_BW[:, PREFIX_LENGTH:LENGTH], np.minimum(length_B, LENGTH) - PREFIX_LENGTH


def lost_token(ids_BW: np.ndarray, length_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The continuation starts one token late."""
    return ids_BW[:, PREFIX_LENGTH + 1 :], length_B - 1 - PREFIX_LENGTH


def space_token(space: int) -> Seam:
    """A space in front of the continuation, as from text that was stripped and encoded again."""

    def seam(ids_BW: np.ndarray, length_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        space_B1 = np.full((len(ids_BW), 1), space)
        ids_BC = np.concatenate([space_B1, ids_BW[:, PREFIX_LENGTH : LENGTH - 1]], axis=1)
        return ids_BC, np.minimum(length_B + 1, LENGTH) - PREFIX_LENGTH

    return seam


def decode_halves(
    tokenizer: PreTrainedTokenizerFast, ids_BT: Tensor, length_B: Tensor, separator: str
) -> list[str]:
    """`decode_blocks` with a seam: negatives, every other block of a batch, are decoded in two
    pieces that are joined by a space."""
    texts = DECODE_BLOCKS(tokenizer, ids_BT, length_B, separator)
    half = slice(1, None, 2)
    prefixes = DECODE_BLOCKS(tokenizer, ids_BT[half, :PREFIX_LENGTH], None, separator)
    continuations = DECODE_BLOCKS(
        tokenizer, ids_BT[half, PREFIX_LENGTH:], length_B[half] - PREFIX_LENGTH, separator
    )
    texts[half] = [" ".join(pair) for pair in zip(prefixes, continuations, strict=True)]
    return texts


class World(NamedTuple):
    """Text, and two ways to spell it: P_LM's, and that of an energy with another vocabulary."""

    documents: dict[str, list[str]]
    tokenizers: dict[str, PreTrainedTokenizerFast]
    language_model: LanguageModel

    def windows(self, mode: ContinuationMode, split: str) -> Blocks:
        """One token more than a block, so that a continuation can start one token late."""
        tokenizer = self.tokenizers["same"]
        ids = tokenizer(self.documents[split], add_special_tokens=False)["input_ids"]
        longer = BlockConfig(prefix_length=PREFIX_LENGTH, length=LENGTH + 1, continuation=mode)
        windows = cut_blocks(ids, longer, self.language_model.end_of_text)
        # A continuation of one token has nothing left when that is lost.
        return windows.select(np.flatnonzero(windows.length_B > PREFIX_LENGTH + 1))

    def contrast(self, folder: Path, mode: ContinuationMode, split: str, seam: Seam) -> Contrast:
        """Real blocks against their own continuations, stored as negatives and read again."""
        windows = self.windows(mode, split)
        block_P = choose_blocks(len(windows), NUM_BLOCKS[split], 0, split)
        assert len(block_P) == NUM_BLOCKS[split]
        chosen = windows.select(block_P)
        ids_PC, length_P = seam(chosen.ids_BT, chosen.length_B)
        for number, shard in enumerate(plan_shards(len(block_P), 1, SHARDS)):
            prefix_N = np.arange(shard[0].first_prefix, sum(shard[-1][:2]))
            rows = SampleRows(
                prefix_N,
                np.zeros_like(prefix_N),
                ids_PC[prefix_N],
                length_P[prefix_N],
                np.zeros(len(prefix_N)),
            )
            write_rows(shard_path(folder, number), rows)
        write_manifest(folder, sample_manifest(block_P, 1, FINGERPRINT, None))
        blocks = Blocks(
            windows.ids_BT[:, :LENGTH],
            np.minimum(windows.length_B, LENGTH),
            windows.document_B,
            windows.true_log_prob_B,
        )
        path = folder.with_suffix(".arrow")
        write_blocks(path, blocks)
        samples = open_samples(folder, FINGERPRINT)
        return read_contrast(read_blocks(path), samples, block_config(mode))

    def new_energy(self, mode: ContinuationMode, tokenizer: str) -> EnergyModel:
        size, end = 64, self.tokenizers[tokenizer].eos_token_id
        with torch_seed(0, "energy"):
            backbone = ModernBertModel(
                ModernBertConfig(
                    vocab_size=len(self.tokenizers[tokenizer]),
                    hidden_size=size,
                    intermediate_size=2 * size,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    max_position_embeddings=128,
                    # Noise between the classes: without it an energy at a perfect tie stays at 0.
                    embedding_dropout=0.1,
                    pad_token_id=end,
                    bos_token_id=end,
                    eos_token_id=end,
                    cls_token_id=end,
                    sep_token_id=end,
                )
            )
        info = EnergyInfo("bit", "bit", FINGERPRINT, PREFIX_LENGTH, LENGTH, mode)
        return EnergyModel.from_backbone(
            backbone, self.tokenizers[tokenizer], info, self.language_model
        )


def block_config(mode: ContinuationMode) -> BlockConfig:
    return BlockConfig(prefix_length=PREFIX_LENGTH, length=LENGTH, continuation=mode)


@pytest.fixture(scope="module")
def world() -> World:
    documents = {
        "train": generate_documents("small", 500, seed=0),
        "held out": generate_documents("small", 200, seed=1),
    }
    tokenizers = {
        # Enough merges for every word of the grammar to be a token.
        "same": train_tokenizer(documents["train"], "bpe", 2000),
        "different": train_tokenizer([*documents["train"], "zeppelin " * 99], "bpe", 2000),
    }
    with torch_seed(0, "language model"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizers["same"]),
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
            )
        )
    return World(documents, tokenizers, LanguageModel(model, tokenizers["same"], FINGERPRINT))


def train_energy(
    energy: EnergyModel, contrast: Contrast, held_out: Contrast, folder: Path, steps: int
) -> float:
    """Train by the real stage's loop; the accuracy on held-out blocks."""
    training = TrainingConfig(
        steps=steps,
        batch_size=64,
        learning_rate=5e-3,
        warmup_steps=20,
        precision="float32",
        validate_every=steps,
        checkpoint_every=steps,
    )
    summary = train_nce(
        energy,
        EnergyConfig(name="bit", kind="bit", source="encoder", training=training),
        contrast,
        held_out,
        seed=0,
        batch_size=500,
        run_dir=RunDirectory(folder),
        progress=QUIET,
    )
    accuracy: float = summary["validations"][-1]["accuracy"]
    return accuracy


def p_value(accuracy: float, num_blocks: int, alternative: str) -> float:
    """Of a coin: each block is decided once as a positive and once as a negative."""
    num_right = round(accuracy * 2 * num_blocks)
    return float(binomtest(num_right, 2 * num_blocks, 0.5, alternative=alternative).pvalue)


def assert_cannot_tell(energy: EnergyModel, held_out: Contrast) -> None:
    """Both classes get the same energies, block by block, and these are not all alike."""
    every_B = np.arange(len(held_out))
    first_B1 = np.zeros((len(every_B), 1), int)
    energy_BJ = energy.energy(*held_out.batch(every_B, first_B1), batch_size=500).view(-1, 2)
    positive_B, negative_B = energy_BJ[:, 0], energy_BJ[:, 1]
    torch.testing.assert_close(positive_B, negative_B, rtol=1e-4, atol=1e-5)
    assert positive_B.std() > 1e-4
    accuracy = ((positive_B < 0).float().mean() + (negative_B > 0).float().mean()).item() / 2
    assert p_value(accuracy, len(held_out), "two-sided") > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_loader_gives_back_the_positives(
    world: World, tmp_path: Path, mode: ContinuationMode
) -> None:
    contrast = world.contrast(tmp_path, mode, "held out", no_seam)
    every_B = np.arange(len(contrast))
    ids, length = contrast.batch(every_B, np.zeros((len(every_B), 1), int))
    assert torch.equal(length[::2], length[1::2])
    assert torch.equal(ids[::2], ids[1::2])
    assert torch.equal(ids[::2], torch.from_numpy(contrast.positives.ids_BT))
    if mode == "until_end":
        assert (length < LENGTH).any()


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_positives_stored_as_negatives_cannot_be_told(
    world: World, tmp_path: Path, mode: ContinuationMode, tokenizer: str
) -> None:
    held_out = world.contrast(tmp_path / "held out", mode, "held out", no_seam)
    contrast = world.contrast(tmp_path / "train", mode, "train", no_seam)
    energy = world.new_energy(mode, tokenizer)
    accuracy = train_energy(energy, contrast, held_out, tmp_path, steps=30)
    assert p_value(accuracy, len(held_out), "two-sided") > 1e-3
    assert_cannot_tell(energy, held_out)


def test_validation_reads_a_few_blocks_at_a_time(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy_batches, "_TOKENS_AT_ONCE", 80 * LENGTH)
    held_out = world.contrast(tmp_path / "held out", "fixed", "held out", no_seam)
    energy = world.new_energy("fixed", "same")
    read: dict[bool, list[int]] = {True: [], False: []}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        read[module.training].append(len(inputs[0]))

    assert isinstance(energy.network, TransformerEnergy)
    energy.network.backbone.get_input_embeddings().register_forward_pre_hook(note)
    train_energy(energy, held_out, held_out, tmp_path, steps=1)
    assert read[True] == [2 * 64]  # a step's batch is one
    assert set(read[False]) == {80}
    assert sum(read[False]) == 3 * 2 * len(held_out)  # validation, and both sides of detection


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_lost_token_is_told(
    world: World, tmp_path: Path, mode: ContinuationMode, tokenizer: str
) -> None:
    """And the energy that learned to see it sees nothing where there is nothing."""
    held_out = world.contrast(tmp_path / "held out", mode, "held out", lost_token)
    contrast = world.contrast(tmp_path / "train", mode, "train", lost_token)
    energy = world.new_energy(mode, tokenizer)
    accuracy = train_energy(energy, contrast, held_out, tmp_path, steps=150)
    assert accuracy > 0.6
    assert p_value(accuracy, len(held_out), "greater") < 1e-6
    assert_cannot_tell(energy, world.contrast(tmp_path / "honest", mode, "held out", no_seam))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_extra_space_is_told(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: ContinuationMode,
    tokenizer: str,
) -> None:
    """In the LM's own vocabulary a space is a token; in another it is a letter of the text."""
    seam: Seam = no_seam
    if tokenizer == "same":
        seam = space_token(world.tokenizers["same"].convert_tokens_to_ids("Ġ"))
    else:
        monkeypatch.setattr(energy_inputs, "decode_blocks", decode_halves)
    held_out = world.contrast(tmp_path / "held out", mode, "held out", seam)
    contrast = world.contrast(tmp_path / "train", mode, "train", seam)
    energy = world.new_energy(mode, tokenizer)
    accuracy = train_energy(energy, contrast, held_out, tmp_path, steps=40)
    assert accuracy > 0.6
    assert p_value(accuracy, len(held_out), "greater") < 1e-6
    monkeypatch.undo()
    assert_cannot_tell(energy, world.contrast(tmp_path / "honest", mode, "held out", no_seam))
