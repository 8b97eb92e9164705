"""`precision: auto` is what the machine multiplies quicker, and what is named is taken."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from residual_ebm.models import device
from residual_ebm.models.device import resolve_precision


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
