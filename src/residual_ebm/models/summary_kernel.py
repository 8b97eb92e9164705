"""Rows of logits summarised by a kernel of our own, where the processor has the instructions.

In one pass over memory, as the compiled loop of `vocabulary` does it, but in a third of its time
and from the first row on. Linux, AVX-512, a C compiler; elsewhere `vocabulary` does it in torch.

Shapes: R rows, V vocabulary, K chunks of it.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from residual_ebm.models.amx import processor_lists
from residual_ebm.models.build import built

CHUNK = 256  # tokens; as in the kernel
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-mavx512f",)


def can_summarise(logits_RV: Tensor) -> bool:
    """Whether the kernel is there and takes such logits."""
    return (
        logits_RV.device.type == "cpu"
        and logits_RV.dtype == torch.bfloat16
        and logits_RV.numel() > 0
        and not (torch.is_grad_enabled() and logits_RV.requires_grad)
        and _kernel() is not None
    )


def summarise_rows(logits_RV: Tensor) -> tuple[Tensor, ...]:
    """The largest logit (R,), masses of chunks (R, K), the sum of mass x log mass (R,), and the
    largest logits of chunks (R, K); all float32."""
    kernel = _kernel()
    if kernel is None or logits_RV.ndim != 2 or logits_RV.dtype != torch.bfloat16:
        raise ValueError("logits that the kernel does not take")  # it believes what it is told
    logits_RV = logits_RV.contiguous()
    num_rows, vocabulary = logits_RV.shape
    num_chunks = -(-vocabulary // CHUNK)
    threads = torch.get_num_threads()
    shapes = ((num_rows,), (num_rows, num_chunks), (num_rows,), (num_rows, num_chunks))
    outcome = tuple(logits_RV.new_empty(shape, dtype=torch.float32) for shape in shapes)
    space = logits_RV.new_empty(threads * num_chunks, dtype=torch.float32)
    pointers = (part.data_ptr() for part in (logits_RV, *outcome, space))
    kernel(*pointers, num_rows, vocabulary, threads)
    return outcome


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """None where it cannot be had."""
    if not processor_lists("avx512f"):
        return None
    library = built(_SOURCE, _FLAGS, "the summary of logits")
    if library is None:
        return None
    function: Callable[..., None] = library.summarise
    library.summarise.argtypes = [*[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 2, ctypes.c_int32]
    library.summarise.restype = None
    return function
