"""Where, in which numeric type and with which attention the networks run."""

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from residual_ebm.config import Precision, Recipe
from residual_ebm.errors import UserError
from residual_ebm.models.amx import has_amx

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CLEARLY = 1.25  # times as quick
# Tokens. Forward and backward, milliseconds for 2,560 tokens in 9 heads of 64 numbers, plain and
# fused: 22 and 49 in blocks of 160, 27 and 45 of 256, 62 and 73 of 512, 80 and 71 of 1,024.
_PLAIN_UP_TO = 512


def resolve_precision(precision: Precision, device: str = "auto") -> Precision:
    """`auto` is bfloat16 where that is quick: on a GPU, and on a CPU that multiplies it quicker."""
    if precision != "auto":
        return precision
    quick = resolve_device(device).type == "cuda" or _multiplies_bfloat16_quicker()
    return "bfloat16" if quick else "float32"


@functools.cache
def _multiplies_bfloat16_quicker() -> bool:
    """By a trial of some milliseconds. The features that a processor lists do not tell: with matrix
    tiles a bfloat16 product takes a fraction of the time of a float32 one, with AVX-512's
    instructions for it half of the time on some processors and twice the time on others."""
    left, right = torch.ones(1024, 512), torch.ones(512, 512)
    seconds: dict[str, float] = {}
    for _ in range(8):  # the first sets up kernels; of a busy machine the least counts
        for name, dtype in DTYPES.items():
            operands = left.to(dtype), right.to(dtype)
            begun = time.perf_counter()
            torch.nn.functional.linear(*operands)
            seconds[name] = min(seconds.get(name, float("inf")), time.perf_counter() - begun)
    return seconds["float32"] > _CLEARLY * seconds["bfloat16"]


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UserError("device", device, "this machine has no CUDA device; use auto or cpu")
    return torch.device("cuda" if available and device != "cpu" else "cpu")


def use_recipe_threads(recipe: Recipe) -> None:
    """The number of threads decides how sums are split, so the recipe fixes it."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    if limit.isdigit() and int(limit) < recipe.threads:
        # Torch splits work among the threads it asked for; what the missing ones had is garbage.
        raise UserError(
            "threads",
            recipe.threads,
            f"OMP_THREAD_LIMIT is {limit}, so results would be wrong; unset it or lower threads",
        )
    torch.set_num_threads(recipe.threads)


@contextmanager
def quick_backward(network: nn.Module, length: int) -> Iterator[None]:
    """On a CPU the backward pass of fused attention is slower than that of plain products, as long
    as blocks are short: their weights take memory by the square of the length."""
    with _plain_attention(network, lambda _model: length <= _PLAIN_UP_TO):
        yield


@contextmanager
def quick_scoring(network: nn.Module) -> Iterator[None]:
    """Without matrix tiles, fused attention multiplies bfloat16 at a fraction of the rate of plain
    products. The processor decides, not a trial: energies must round alike in every process."""
    with _plain_attention(network, lambda model: model.dtype == torch.bfloat16 and not has_tiles()):
        yield


has_tiles = functools.cache(has_amx)  # it reads a page for each of a server's many cores


@contextmanager
def _plain_attention(
    network: nn.Module, wanted: Callable[[PreTrainedModel], bool]
) -> Iterator[None]:
    # The first is the outermost, and answers for the models inside it; a head may have none.
    models = (part for part in network.modules() if isinstance(part, PreTrainedModel))
    switched = [
        model
        for model in itertools.islice(models, 1)
        if model.device.type == "cpu"
        and model.config._attn_implementation == "sdpa"
        and wanted(model)
    ]
    for model in switched:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for model in switched:
            model.set_attn_implementation("sdpa")
