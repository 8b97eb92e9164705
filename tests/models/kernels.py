"""Attention's kernel where it can be tested, which is more than where it is used."""

import functools
from pathlib import Path

import pytest

from residual_ebm.models import packed_attention
from residual_ebm.models.amx import processor_lists


@functools.cache
def kernel_here() -> packed_attention._Kernel | None:
    """On other processors with AVX-512, the same source with its instructions written out."""
    known = packed_attention._kernel()
    if known is not None or not processor_lists("avx512f"):
        return known
    header = Path(__file__).with_name("pairs_one_by_one.h")
    flags = [flag for flag in packed_attention._FLAGS if "bf16" not in flag]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "processor_lists", lambda _feature: True)
        patch.setattr(packed_attention, "_FLAGS", [*flags, "-include", str(header)])
        return packed_attention._kernel.__wrapped__()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    known = kernel_here()
    if known is None:
        pytest.skip("no AVX-512 here, or no compiler")
    monkeypatch.setattr(packed_attention, "_kernel", lambda: known)
