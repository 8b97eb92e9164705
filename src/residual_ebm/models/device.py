"""Where, in which numeric type and with which attention the networks run."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from residual_ebm.config import Precision, Recipe
from residual_ebm.errors import UserError
from residual_ebm.models.amx import has_amx

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_precision(precision: Precision, device: str = "auto") -> Precision:
    """`auto` is bfloat16 where that is quick: on a GPU, and on a CPU with matrix tiles.

    Elsewhere a bfloat16 product takes about twice as long as a float32 one.
    """
    if precision != "auto":
        return precision
    return "bfloat16" if resolve_device(device).type == "cuda" or has_amx() else "float32"


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
def quick_backward(network: nn.Module) -> Iterator[None]:
    """On a CPU the backward pass of fused attention is slower than that of plain products."""
    # The first is the outermost, and answers for the models inside it; a head may have none.
    models = (part for part in network.modules() if isinstance(part, PreTrainedModel))
    switched = [
        model
        for model in itertools.islice(models, 1)
        if model.device.type == "cpu" and model.config._attn_implementation == "sdpa"
    ]
    for model in switched:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for model in switched:
            model.set_attn_implementation("sdpa")
