"""Attention in bfloat16 by kernels of our own, where the processor has the instructions.

Drawing asks for it at every step: many rows with one query for each head meet a prefix they share,
and each its own few tokens. Torch's fused attention takes the first for itself and a compiled loop
the second, and both spend their time around the products. `packed_attention.c` does both at once
with scores that never leave the processor's cache; and so it does for prefixes, and for what an
encoder reads, which are whole rows. It is used where it can be built: AVX-512 BF16, Linux, a C
compiler. Elsewhere `shared_prefix` and transformers compute the same in torch.

Shapes: N rows, G prefixes, H heads, K heads of keys and values, R = H / K, D head size, P tokens of
a prefix, S own tokens of a row so far, L tokens of a whole row.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from residual_ebm.models.amx import processor_lists
from residual_ebm.models.build import built

_LANES = 16  # tokens are padded to a multiple of it, and a head's numbers are one
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-mavx512f", "-mavx512bf16", "-mavx512vl")


class _Kernel(NamedTuple):
    attend: Callable[..., None]
    space_needed: Callable[..., int]
    attend_whole: Callable[..., None]
    whole_space_needed: Callable[..., int]


def can_attend(query_NHLD: Tensor) -> bool:
    """Whether the kernels are there and take queries like these."""
    return (
        query_NHLD.device.type == "cpu"
        and query_NHLD.dtype == torch.bfloat16
        and query_NHLD.shape[-1] % _LANES == 0
        and not torch.is_grad_enabled()  # there is no backward pass
        and _kernel() is not None
    )


def attend_causal(query_NHLD: Tensor, key_NKLD: Tensor, value_NKLD: Tensor, scale: float) -> Tensor:
    """Attention of each token to those before it and itself, (N, L, H, D)."""
    num_rows, length = query_NHLD.shape[0], query_NHLD.shape[2]
    length_N = torch.full((num_rows,), length)
    return _attend_whole(query_NHLD, key_NKLD, value_NKLD, length_N, scale, causal=True)


def attend_both_ways(
    query_NHLD: Tensor, key_NKLD: Tensor, value_NKLD: Tensor, length_N: Tensor, scale: float
) -> Tensor:
    """Attention of each token to all of its row, (N, L, H, D). What lies behind a row's length is
    padding: nobody sees it, and its own outcome is zero."""
    return _attend_whole(query_NHLD, key_NKLD, value_NKLD, length_N, scale, causal=False)


def _attend_whole(
    query_NHLD: Tensor,
    key_NKLD: Tensor,
    value_NKLD: Tensor,
    length_N: Tensor,
    scale: float,
    *,
    causal: bool,
) -> Tensor:
    kernel = _kernel()
    assert kernel is not None
    num_rows, num_heads, length, size = query_NHLD.shape
    kv_heads = key_NKLD.shape[1]
    # As projections have made them, and as the next one takes it.
    given = [part.transpose(1, 2).contiguous() for part in (query_NHLD, key_NKLD, value_NKLD)]
    length_N = length_N.contiguous()
    _refuse_unless(
        key_NKLD.shape == value_NKLD.shape == (num_rows, kv_heads, length, size)
        and num_heads % kv_heads == 0
        and size % _LANES == 0
        and all(states.dtype == torch.bfloat16 for states in given)
        and scale > 0
        and length_N.dtype == torch.int64
        and length_N.shape == (num_rows,)
        and bool(((length_N >= 0) & (length_N <= length)).all())
    )
    threads = torch.get_num_threads()
    sizes = (num_heads // kv_heads, size)
    needed = threads * kernel.whole_space_needed(*sizes, length)
    space = query_NHLD.new_empty(needed, dtype=torch.float32)
    out_NLHD = query_NHLD.new_empty(num_rows, length, num_heads, size)
    pointers = (states.data_ptr() for states in (*given, length_N, out_NLHD, space))
    kernel.attend_whole(*pointers, num_rows, length, kv_heads, *sizes, scale, causal, threads)
    return out_NLHD


def _refuse_unless(fits: bool) -> None:
    """The kernels believe what they are told, so this must hold under `python -O` too."""
    if not fits:
        raise ValueError("queries, keys and values that attention's kernel does not take")


@functools.cache
def _kernel() -> _Kernel | None:
    """None where it cannot be had."""
    if not processor_lists("avx512_bf16"):
        return None
    library = built(_SOURCE, _FLAGS, "attention")
    return None if library is None else _declared(library)


def _declared(library: ctypes.CDLL) -> _Kernel:
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    scale, threads = ctypes.c_float, ctypes.c_int32
    library.attend.argtypes = [*[pointer] * 9, *[size] * 8, scale, threads]
    library.attend_whole.argtypes = [*[pointer] * 6, *[size] * 5, scale, flag, threads]
    for function in (library.attend, library.attend_whole):
        function.restype = None
    library.space_needed.argtypes = [size] * 4
    library.whole_space_needed.argtypes = [size] * 3
    for needed in (library.space_needed, library.whole_space_needed):
        needed.restype = size
    return _Kernel(
        library.attend, library.space_needed, library.attend_whole, library.whole_space_needed
    )


class PackedLayer:
    """The keys and values of prefixes and of each row's own tokens, as the kernel reads them: two
    numbers of a token are neighbours among keys, two tokens' among values."""

    def __init__(self, key_GKPD: Tensor, value_GKPD: Tensor, num_tokens: int) -> None:
        _refuse_unless(
            key_GKPD.dtype == value_GKPD.dtype == torch.bfloat16
            and key_GKPD.shape == value_GKPD.shape
        )
        self._num_prefixes, self._kv_heads, self._prefix_length, self._size = key_GKPD.shape
        self._num_tokens, self._filled = num_tokens, 0
        key_GKTD, value_GKTD = (
            torch.nn.functional.pad(states, (0, 0, 0, -self._prefix_length % _LANES))
            for states in (key_GKPD, value_GKPD)
        )
        self._prefix = (
            key_GKTD.unflatten(3, (-1, 2)).transpose(2, 3).contiguous(),
            value_GKTD.unflatten(2, (-1, 2)).transpose(3, 4).contiguous(),
        )
        self._own = self._room_for(0)

    def _room_for(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Keys (N, K, D / 2, room, 2) and values (N, K, room / 2, D, 2)."""
        room = _room(self._num_tokens)
        heads, new = (num_rows, self._kv_heads), self._prefix[0].new_empty
        return new(*heads, self._size // 2, room, 2), new(*heads, room // 2, self._size, 2)

    def attend(
        self, query_NH1D: Tensor, key_NK1D: Tensor, value_NK1D: Tensor, scale: float
    ) -> Tensor:
        """Attention of each row's newest token to its prefix, its tokens before and itself,
        (N, 1, H, D)."""
        kernel = _kernel()
        assert kernel is not None
        num_rows, num_heads, num_new, size = query_NH1D.shape
        given = [states.contiguous() for states in (query_NH1D, key_NK1D, value_NK1D)]
        if self._filled == 0:
            self._own = self._room_for(num_rows)
        _refuse_unless(
            self._filled < self._num_tokens
            and num_new == 1
            and num_heads % self._kv_heads == num_rows % self._num_prefixes == 0
            and key_NK1D.shape == value_NK1D.shape == (num_rows, self._kv_heads, 1, self._size)
            and size == self._size
            and len(self._own[0]) == num_rows
            and all(states.dtype == torch.bfloat16 for states in given)
            and scale > 0
        )
        self._filled += 1
        sizes = (num_heads // self._kv_heads, size, self._prefix_length)
        threads = torch.get_num_threads()
        needed = threads * kernel.space_needed(*sizes, self._filled)
        space = query_NH1D.new_empty(needed, dtype=torch.float32)
        out_N1HD = query_NH1D.new_empty(num_rows, 1, num_heads, size)
        kernel.attend(
            *(states.data_ptr() for states in (*given, *self._own, *self._prefix, out_N1HD, space)),
            num_rows,
            self._num_prefixes,
            self._kv_heads,
            *sizes,
            _room(self._num_tokens),
            self._filled,
            scale,
            threads,
        )
        return out_N1HD

    def follow(self, before_N: Tensor) -> None:
        """From now on, each row goes on from what the row named for it has had so far."""
        (keys, values), self._own = self._own, self._room_for(len(before_N))
        pairs = -(-self._filled // 2)
        self._own[0][:, :, :, : self._filled] = keys[:, :, :, : self._filled][before_N]
        self._own[1][:, :, :pairs] = values[:, :, :pairs][before_N]


def _room(num_tokens: int) -> int:
    return -(-num_tokens // _LANES) * _LANES
