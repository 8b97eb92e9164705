"""How fast decoding could be at most: its matrix products alone, at the model's own shapes."""

from collections import Counter

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from residual_ebm.bench.workers import Work
from residual_ebm.config import Precision
from residual_ebm.models.device import DTYPES
from residual_ebm.models.loading import load_pretrained


def products(*, model: str, precision: Precision, num_rows: int, threads: int) -> Work:
    """Every linear layer once for `num_rows` rows, nothing between them; a unit is a token."""
    torch.set_num_threads(threads)
    dtype = DTYPES[precision]
    loaded = load_pretrained(AutoModelForCausalLM, model, "model", dtype=dtype)
    shapes = Counter(
        tuple(module.weight.shape) for module in loaded.modules() if isinstance(module, nn.Linear)
    )
    layers = [
        (torch.randn(num_rows, columns, dtype=dtype), torch.randn(rows, columns, dtype=dtype))
        for (rows, columns), count in shapes.items()
        for _ in range(count)
    ]

    @torch.inference_mode()
    def run() -> None:
        for values, weight in layers:
            nn.functional.linear(values, weight)

    return Work(run, num_rows)
