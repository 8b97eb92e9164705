"""Dropout whose random numbers do not cost as much as the network.

On a CPU torch draws one random number an element, on one thread: half the time of a training step
of a small encoder. Eight elements can share the 64 bits of one number, if probabilities may be
multiples of 1/256; what is kept is scaled by the share that is really kept.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def quick_dropout(values: Tensor, probability: float) -> Tensor:
    threshold = round(256 * probability)
    count = values.numel()
    # From the lowest number on: by default the highest bit would always be zero.
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None)
    kept = words.view(torch.uint8)[:count].view(values.shape) >= threshold
    return values * kept.to(values.dtype).mul_(256 / (256 - threshold))


class QuickDropout(TorchFunctionMode):
    """Within, `torch.nn.functional.dropout` on a CPU is quick, wherever a model calls it."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: Any,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        if function is functional.dropout:
            return _dropout(*arguments, **options)
        return function(*arguments, **options)


@functools.wraps(functional.dropout)
def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    # At one, and where rounding gives it, everything is dropped: torch's own does that without a
    # division by zero.
    if training and p > 0 and round(256 * p) < 256 and not inplace and input.device.type == "cpu":
        return quick_dropout(input, p)
    return functional.dropout(input, p, training, inplace)
