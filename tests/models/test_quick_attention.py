"""Networks attend in the way that is quick where they run."""

from typing import Any

import kernels
import pytest
import torch
import toys
from transformers import PreTrainedModel

from residual_ebm.models import packed_attention, quick_attention
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.energy_networks import TransformerEnergy
from residual_ebm.models.quick_attention import quick_backward

kernel = kernels.kernel
BY_KERNEL = "residual_ebm_both_ways"


def backbone_of(energy: EnergyModel) -> PreTrainedModel:
    assert isinstance(energy.network, TransformerEnergy)
    return energy.network.backbone


def with_larger_heads(energy: EnergyModel) -> EnergyModel:
    """Its encoder with one head of 16 numbers for two of 8, which the kernel does not take."""
    assert energy.tokenizer is not None
    assert isinstance(energy.network, TransformerEnergy)
    energy.network.backbone = toys.bert(energy.tokenizer, num_attention_heads=1)
    energy.network.backbone.pooler = None
    return energy


@pytest.fixture
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_attention, "has_tiles", lambda: False)


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "_kernel", lambda: None)


def scored_with(energy: EnergyModel) -> set[str]:
    """The attention that its network has while it scores; it need not pad what the kernel reads."""
    backbone = backbone_of(energy)
    ids_BT = torch.full((4, toys.BLOCK_LENGTH), 3)
    energy.energy(ids_BT)  # may try what it has never tried
    seen: set[str] = set()
    lengths: set[int] = set()

    def note(_model: object, _given: object, output: Any) -> None:
        seen.add(backbone.config._attn_implementation)
        lengths.add(output.last_hidden_state.shape[1])

    backbone.register_forward_hook(note)
    energy.energy(ids_BT)
    assert backbone.config._attn_implementation == "sdpa"
    if energy._bridge is not None and not energy._bridge.same:
        assert {length % 16 == 0 for length in lengths} == {seen != {BY_KERNEL}}
    return seen


@pytest.mark.parametrize("name", ["bit", "bit_bpe"])
@pytest.mark.usefixtures("no_tiles", "kernel")
def test_encoders_are_scored_by_the_kernel_where_it_takes_them(name: str) -> None:
    energy = toys.fresh_energy(name)
    energy.network.to(torch.bfloat16)
    assert scored_with(energy) == {"eager"}  # heads of 8 numbers
    energy = with_larger_heads(toys.fresh_energy(name))
    energy.network.to(torch.bfloat16)
    assert scored_with(energy) == {BY_KERNEL}


@pytest.mark.parametrize("name", ["bit", "bit_bpe"])
@pytest.mark.usefixtures("no_tiles", "no_kernel")
def test_encoders_are_scored_with_plain_products_where_there_is_no_kernel(name: str) -> None:
    energy = with_larger_heads(toys.fresh_energy(name))
    energy.network.to(torch.bfloat16)
    assert scored_with(energy) == {"eager"}


@pytest.mark.parametrize(
    ("dtype", "tiles"), [(torch.bfloat16, True), (torch.float32, False)], ids=["tiles", "float32"]
)
@pytest.mark.usefixtures("kernel")
def test_fused_attention_scores_where_it_is_quick(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tiles: bool
) -> None:
    monkeypatch.setattr(quick_attention, "has_tiles", lambda: tiles)
    energy = with_larger_heads(toys.fresh_energy("bit"))
    energy.network.to(dtype)
    assert scored_with(energy) == {"sdpa"}


@pytest.mark.usefixtures("no_tiles", "kernel")
def test_unit_reads_left_to_right_all_the_same() -> None:
    energy = toys.fresh_energy("unit")
    energy.network.to(torch.bfloat16)
    assert scored_with(energy).isdisjoint({"eager", BY_KERNEL})


@pytest.mark.parametrize(("length", "attention"), [(160, "eager"), (512, "eager"), (513, "sdpa")])
def test_short_blocks_train_with_plain_attention(length: int, attention: str) -> None:
    energy = toys.fresh_energy("bit")
    with quick_backward(energy.network, length):
        assert backbone_of(energy).config._attn_implementation == attention
    assert backbone_of(energy).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("way", ["fused", "plain", "kernel"])
@pytest.mark.parametrize("name", ["bit", "bit_bpe"])
@pytest.mark.usefixtures("kernel")
def test_each_way_gives_the_energies_of_float32(
    monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    monkeypatch.setattr(quick_attention, "has_tiles", lambda: way == "fused")
    ids_NT = toys.everything("fixed").ids_NT
    energy = toys.trained_energy(name)
    if way == "kernel":
        with_larger_heads(energy)
    exact_N = energy.energy(ids_NT)
    energy.network.to(torch.bfloat16)
    difference_N = (energy.energy(ids_NT) - exact_N) / exact_N.std()
    assert difference_N.abs().max() < 0.1
    assert difference_N.abs().max() > 0  # in bfloat16, that is
