"""`precision: auto` is what the machine multiplies quicker, and what is named is taken; networks
attend in the way that is quick there."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch
import toys
from torch import Tensor

from residual_ebm.models import device
from residual_ebm.models.device import resolve_precision
from residual_ebm.models.energy_networks import TransformerEnergy


@pytest.fixture
def slow_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[torch.dtype, float], None]]:
    """Makes products of one type take so many seconds longer than all others."""

    def make(slow: torch.dtype, seconds: float) -> None:
        def linear(left: Tensor, _right: Tensor) -> Tensor:
            time.sleep(0.002 + (seconds if left.dtype == slow else 0.0))
            return left

        monkeypatch.setattr(torch.nn.functional, "linear", linear)

    device._multiplies_bfloat16_quicker.cache_clear()
    yield make
    device._multiplies_bfloat16_quicker.cache_clear()


def test_auto_is_what_is_multiplied_quicker(
    slow_in: Callable[[torch.dtype, float], None],
) -> None:
    slow_in(torch.float32, 0.02)
    assert resolve_precision("auto", "cpu") == "bfloat16"
    assert resolve_precision("float32", "cpu") == "float32"


def test_auto_is_float32_where_bfloat16_is_slow(
    slow_in: Callable[[torch.dtype, float], None],
) -> None:
    slow_in(torch.bfloat16, 0.02)
    assert resolve_precision("auto", "cpu") == "float32"
    assert resolve_precision("bfloat16", "cpu") == "bfloat16"


def test_auto_is_float32_where_both_are_as_quick(
    slow_in: Callable[[torch.dtype, float], None],
) -> None:
    slow_in(torch.float32, 0.0)
    assert resolve_precision("auto", "cpu") == "float32"


@pytest.mark.parametrize(
    ("name", "dtype", "tiles", "attention"),
    [
        ("bit", torch.bfloat16, False, "eager"),
        ("bit_bpe", torch.bfloat16, False, "eager"),
        ("bit", torch.bfloat16, True, "sdpa"),
        ("bit", torch.float32, False, "sdpa"),
        ("unit", torch.bfloat16, False, "sdpa"),
    ],
)
def test_encoders_are_scored_with_plain_products_where_those_are_quicker(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, tiles: bool, attention: str
) -> None:
    monkeypatch.setattr(device, "has_tiles", lambda: tiles)
    energy = toys.fresh_energy(name)
    energy.network.to(dtype)
    assert isinstance(energy.network, TransformerEnergy)
    backbone = energy.network.backbone
    seen: list[str] = []
    backbone.register_forward_pre_hook(lambda *_: seen.append(backbone.config._attn_implementation))
    energy.energy(torch.full((4, toys.BLOCK_LENGTH), 3))
    assert seen[0] == attention
    assert backbone.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("length", "attention"), [(160, "eager"), (512, "eager"), (513, "sdpa")])
def test_short_blocks_train_with_plain_attention(length: int, attention: str) -> None:
    network = toys.fresh_energy("bit").network
    assert isinstance(network, TransformerEnergy)
    with device.quick_backward(network, length):
        assert network.backbone.config._attn_implementation == attention
    assert network.backbone.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["bit", "bit_bpe"])
def test_either_attention_gives_the_energies_of_float32(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ids_NT = toys.everything("fixed").ids_NT
    energy = toys.trained_energy(name)
    exact_N = energy.energy(ids_NT)
    energy.network.to(torch.bfloat16)
    for tiles in (True, False):
        monkeypatch.setattr(device, "has_tiles", lambda tiles=tiles: tiles)
        difference_N = energy.energy(ids_NT) - exact_N
        assert difference_N.abs().max() < 0.1
        assert difference_N.abs().max() > 0  # in bfloat16, that is
