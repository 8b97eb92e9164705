"""Attention of one new token a row, in a kernel of our own where the processor can.

Drawing asks for it at every step: many rows with one query for each head meet a prefix they share,
and each its own few tokens. Torch's fused attention takes the first for itself and a compiled loop
the second, and both spend their time around the products. `packed_attention.c` does both at once
with scores that never leave the processor's cache. It is built when it is first needed, in a
second, and used where that succeeds: AVX-512 BF16, Linux, a C compiler. Elsewhere `shared_prefix`
computes the same in torch.

Shapes: N rows, G prefixes, H heads, K heads of keys and values, R = H / K, D head size, P tokens of
a prefix, S own tokens of a row so far.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from residual_ebm.models.amx import processor_lists

_LANES = 16  # tokens are padded to a multiple of it, and a head's numbers are one
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-mavx512f", "-mavx512bf16", "-mavx512vl", "-fopenmp", "-shared", "-fPIC")
_SECONDS = 120  # for what takes one


class _Kernel(NamedTuple):
    attend: Callable[..., None]
    space_needed: Callable[..., int]


def can_attend(query_NH1D: Tensor) -> bool:
    """Whether the kernel is there and takes queries like these."""
    return (
        query_NH1D.device.type == "cpu"
        and query_NH1D.dtype == torch.bfloat16
        and query_NH1D.shape[-1] % _LANES == 0
        and _kernel() is not None
    )


@functools.cache
def _kernel() -> _Kernel | None:
    """None where it cannot be had."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if sys.platform != "linux" or not processor_lists("avx512_bf16") or compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:  # a library once loaded needs no file
        path = Path(folder) / "packed_attention.so"
        try:
            subprocess.run(
                [compiler, *_FLAGS, str(_SOURCE), "-o", str(path)],
                check=True,
                capture_output=True,
                timeout=_SECONDS,
            )
            library = ctypes.CDLL(str(path))
        except (OSError, subprocess.SubprocessError):
            return None
    pointers, sizes = [ctypes.c_void_p] * 9, [ctypes.c_int64] * 8
    library.attend.argtypes = [*pointers, *sizes, ctypes.c_float, ctypes.c_int32]
    library.attend.restype = None
    library.space_needed.argtypes = [ctypes.c_int64] * 4
    library.space_needed.restype = ctypes.c_int64
    return _Kernel(library.attend, library.space_needed)


class PackedLayer:
    """The keys and values of prefixes and of each row's own tokens, as the kernel reads them."""

    def __init__(self, key_GKPD: Tensor, value_GKPD: Tensor, room: int) -> None:
        self._num_prefixes, self._kv_heads, self._prefix_length, self._size = key_GKPD.shape
        self._room = _padded(room)
        self._filled = 0
        self._own: list[Tensor] = []
        key_GKTD, value_GKTD = (
            torch.nn.functional.pad(states, (0, 0, 0, -self._prefix_length % _LANES))
            for states in (key_GKPD, value_GKPD)
        )
        # Two numbers of a token are neighbours among keys, two tokens' among values.
        self._prefix = (
            key_GKTD.unflatten(3, (-1, 2)).transpose(2, 3).contiguous(),
            value_GKTD.unflatten(2, (-1, 2)).transpose(3, 4).contiguous(),
        )

    def attend(
        self, query_NH1D: Tensor, key_NK1D: Tensor, value_NK1D: Tensor, scale: float
    ) -> Tensor:
        """Attention of each row's newest token to its prefix, its tokens before and itself,
        (N, 1, H, D)."""
        kernel = _kernel()
        assert kernel is not None
        num_rows, num_heads, _, size = query_NH1D.shape
        if not self._own:
            shape = (num_rows, self._kv_heads, self._room, size)
            # Zeros: a token that has not come yet has no mass, but what is no number would stay.
            self._own = [torch.zeros(shape, dtype=query_NH1D.dtype) for _ in ("keys", "values")]
        self._filled += 1
        sizes = (num_heads // self._kv_heads, size, self._prefix_length)
        threads = torch.get_num_threads()
        space = torch.empty(threads * kernel.space_needed(*sizes, self._filled))
        given = [states.contiguous() for states in (query_NH1D, key_NK1D, value_NK1D)]
        out_N1HD = torch.empty((num_rows, 1, num_heads, size), dtype=query_NH1D.dtype)
        kernel.attend(
            *(states.data_ptr() for states in (*given, *self._own, *self._prefix, out_N1HD, space)),
            num_rows,
            self._num_prefixes,
            self._kv_heads,
            *sizes,
            self._room,
            self._filled,
            scale,
            threads,
        )
        return out_N1HD

    def follow(self, before_N: Tensor) -> None:
        """From now on, each row goes on from what the row named for it has had so far."""
        self._own = [states.index_select(0, before_N) for states in self._own]


def _padded(tokens: int) -> int:
    return -(-tokens // _LANES) * _LANES
