"""Where and in which numeric type the networks run."""

import torch

from residual_ebm.config import Recipe
from residual_ebm.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UserError("device", device, "this machine has no CUDA device; use auto or cpu")
    return torch.device("cuda" if available and device != "cpu" else "cpu")


def use_recipe_threads(recipe: Recipe) -> None:
    """The number of threads decides how sums are split, so the recipe fixes it."""
    torch.set_num_threads(recipe.threads)
