"""Scoring many blocks gives what scoring them one by one gives, in the order they came.

Shapes: B blocks, T tokens of a block.
"""

import threading
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from residual_ebm.config import ContinuationMode
from residual_ebm.models import energy_batches
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.energy_networks import TransformerEnergy

each_energy = pytest.mark.parametrize("name", toys.ENERGIES)
CPU = torch.device("cpu")


def some_blocks(mode: ContinuationMode) -> tuple[Tensor, Tensor | None]:
    """Four prefixes, the first three with five blocks each, the last with two."""
    draw = torch.Generator().manual_seed(0)
    prefix_GP = torch.randint(3, 7, (4, toys.PREFIX_LENGTH), generator=draw)
    prefix_BP = prefix_GP.repeat_interleave(torch.tensor([5, 5, 5, 2]), dim=0)
    rest_BC = torch.randint(3, 7, (len(prefix_BP), toys.NUM_NEW), generator=draw)
    ids_BT = torch.cat([prefix_BP, rest_BC], dim=1)
    if mode == "fixed":
        return ids_BT, None
    length_B = torch.randint(
        toys.PREFIX_LENGTH + 1, toys.BLOCK_LENGTH + 1, (len(ids_BT),), generator=draw
    )
    for row, length in enumerate(length_B.tolist()):
        ids_BT[row, length:] = toys.END
    return ids_BT, length_B


@each_energy
@pytest.mark.parametrize("mode", toys.MODES)
@pytest.mark.parametrize("batch_size", [1, 5, 6, 100])
def test_many_blocks_are_scored_as_each_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, mode: ContinuationMode, batch_size: int
) -> None:
    monkeypatch.setattr(energy_batches, "_BATCHES_AT_ONCE", 2)
    energy = toys.trained_energy(name, mode)
    ids_BT, length_B = some_blocks(mode)
    scored_B = energy.energy(ids_BT, length_B, batch_size=batch_size)
    with torch.no_grad():
        alone_B = torch.cat(
            [
                energy(ids_BT[row : row + 1], None if length_B is None else length_B[row : row + 1])
                for row in range(len(ids_BT))
            ]
        )
    assert alone_B.std() > 0.1
    torch.testing.assert_close(scored_B, alone_B, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "qwen3", "gemma3_text"])
def test_causal_energies_of_other_families(model_type: str) -> None:
    backbone = toys.causal_model(model_type).base_model
    energy = EnergyModel.from_backbone(
        backbone, toys.word_tokenizer(), toys.energy_info("unit", "fixed"), toys.language_model()
    )
    with torch.no_grad():
        energy.network.scalar.weight.normal_()
    ids_BT, _ = some_blocks("fixed")
    scored_B = energy.energy(ids_BT[:15], batch_size=15)
    with torch.no_grad():
        torch.testing.assert_close(scored_B, energy(ids_BT[:15]), rtol=1e-4, atol=1e-4)


def test_a_causal_energy_reads_a_prefix_once() -> None:
    energy = toys.trained_energy("unit")
    assert isinstance(energy.network, TransformerEnergy)
    read: list[tuple[int, ...]] = []
    energy.network.backbone.get_input_embeddings().register_forward_pre_hook(
        lambda _module, inputs: read.append(tuple(inputs[0].shape))
    )
    ids_BT, _ = some_blocks("fixed")
    energy.energy(ids_BT[:15], batch_size=15)
    assert read == [(3, toys.PREFIX_LENGTH), (15, toys.NUM_NEW)]
    read.clear()
    energy.energy(ids_BT, batch_size=12)  # a batch of twelve would end within a prefix's five
    groups = [(2, 10), (1, 5), (1, 2)]
    own = [(blocks, toys.NUM_NEW) for _, blocks in groups]
    assert read[1::2] == own
    assert read[::2] == [(prefixes, toys.PREFIX_LENGTH) for prefixes, _ in groups]


def test_the_next_blocks_are_encoded_while_the_network_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not after it: on a larger machine the network would wait for them."""
    bridge = toys.trained_energy("bit_bpe")._bridge
    assert bridge is not None
    encode, begun = bridge.encode, [threading.Event() for _ in range(3)]
    pieces = iter(begun)

    def note(*blocks: Any) -> list[list[int]]:
        next(pieces).set()
        return encode(*blocks)

    monkeypatch.setattr(bridge, "encode", note)
    ids_BT = torch.full((3 * energy_batches._BATCHES_AT_ONCE, toys.BLOCK_LENGTH), 3)
    batches = energy_batches.encoder_batches(bridge, ids_BT, None, 1, CPU)
    next(batches)  # of the first piece, which the network would now read
    assert begun[1].wait(10)
    assert not begun[2].is_set()
    assert len(list(batches)) == len(ids_BT) - 1


def test_blocks_of_similar_length_share_a_batch() -> None:
    energy = toys.trained_energy("bit_bpe", "until_end")
    bridge = energy._bridge
    assert bridge is not None
    ids_BT, length_B = some_blocks("until_end")
    batches = list(energy_batches.encoder_batches(bridge, ids_BT, length_B, 4, CPU))
    assert sorted(torch.cat([rows for rows, _ in batches]).tolist()) == list(range(len(ids_BT)))
    longest = [int(inputs.mask_BL.sum(1).max()) for _, inputs in batches]
    assert longest == sorted(longest)
    assert longest[0] < longest[-1]


def test_batches_are_padded_to_lengths_that_fill_registers() -> None:
    bridge = toys.trained_energy("bit_bpe")._bridge
    assert bridge is not None
    assert [bridge.pad([[5] * length]).ids_BL.shape[1] for length in (1, 16, 17)] == [16, 16, 32]
    assert bridge.pad([[5] * 17, [5]], lengths_of=1).ids_BL.shape[1] == 17
    bridge._context_length = 20
    assert bridge.pad([[5] * 17]).ids_BL.shape[1] == 20


def test_no_blocks_have_no_energies() -> None:
    for name in toys.ENERGIES:
        energy = toys.trained_energy(name)
        assert energy.energy(torch.zeros(0, toys.BLOCK_LENGTH, dtype=torch.int64)).shape == (0,)


def test_a_processor_is_given_no_more_than_its_cache_holds() -> None:
    assert energy_batches.rows_at_once(100, 160, CPU) == 25
    assert energy_batches.rows_at_once(8, 160, CPU) == 8
    assert energy_batches.rows_at_once(8, 5000, CPU) == 1
    assert energy_batches.rows_at_once(100, 160, torch.device("cuda")) == 100


@pytest.mark.parametrize("name", ["bit", "bit_bpe"])
def test_energies_do_not_depend_on_how_many_are_read_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    energy = toys.trained_energy(name)
    ids_BT, length_B = some_blocks("fixed")
    expected = energy.energy(ids_BT, length_B)
    read: list[int] = []
    assert isinstance(energy.network, TransformerEnergy)
    energy.network.backbone.get_input_embeddings().register_forward_pre_hook(
        lambda _module, inputs: read.append(inputs[0].numel())
    )
    monkeypatch.setattr(energy_batches, "_TOKENS_AT_ONCE", 40)
    torch.testing.assert_close(energy.energy(ids_BT, length_B), expected, rtol=1e-4, atol=1e-4)
    assert len(read) > 1
    assert max(read) <= 48  # padded to a length that fills registers
