"""Where and in which numeric type the networks run."""

import functools
import os
import time

import torch

from residual_ebm.config import Precision, Recipe
from residual_ebm.errors import UserError
from residual_ebm.models.amx import has_amx

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CLEARLY = 1.25  # times as quick


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


has_tiles = functools.cache(has_amx)  # it reads a page for each of a server's many cores
