"""The layer that gives a language model's logits, and logits that are rounded where they are small.

bfloat16 keeps 8 bits of a number: a logit of 20 is rounded to an eighth. Over a continuation of 40
tokens that was nearly half of the variance by which SmolLM2-135M, drawing in bfloat16, disagreed
with itself scoring. A distribution does not change when a number is taken from all of a row's
logits, and a product's sum is float32 until it is stored. So what is stored is

    h . w_v - guess,    guess = max of h . w_u over a few hundred tokens u,

which is smaller where there is mass: the variance of this rounding falls to a twentieth. Of many
rows the guess is one more of their numbers, and -1 one more weight of every token, so that logits
are written once; that takes a copy of the weights, which are laid out for the processor as well.

Shapes: R rows, H hidden size, V vocabulary, U tokens that are asked for a guess.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_ebm.models.at_rest import at_rest
from residual_ebm.models.packed_linear import FROM_ROWS, UP_TO, can_pack, multiply, pack
from residual_ebm.models.ralm import RalmForCausalLM

_ASKED = 256  # tokens, spread over the vocabulary
_known: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def factors_of(model: PreTrainedModel) -> tuple[PreTrainedModel, ...]:
    """The language models whose logits are added: two of a RALM, any other one by itself."""
    return model.parts if isinstance(model, RalmForCausalLM) else (model,)


def ends_in_a_plain_layer(model: PreTrainedModel) -> bool:
    """Whether logits are a product of states and weights and nothing else."""
    last = model.get_output_embeddings()
    # Not a subclass that multiplies in its own way, as quantised layers do.
    plain = isinstance(last, nn.Linear) and type(last).forward is nn.Linear.forward
    return plain and last.bias is None and _plain_logits(model)


def _plain_logits(model: PreTrainedModel) -> bool:
    """Whether logits are what leaves the last layer: some models scale or cap them. Tried once."""
    if model not in _known:
        left: list[Tensor] = []

        def leave(_layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            # Numbers of ours: a layer that starts at zero gives zeros, which no scale changes.
            number = torch.arange(output.numel(), device=output.device) % 97 - 48
            left.append(number.view_as(output).to(output.dtype))
            return left[-1]

        handle = model.get_output_embeddings().register_forward_hook(leave)
        ids_1T = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        try:
            with torch.no_grad(), at_rest(model):
                logits = model(ids_1T, use_cache=False).logits
        finally:
            handle.remove()
        whole = len(model.get_output_embeddings().weight)  # of a layer that no other process shares
        _known[model] = (
            len(left) == 1
            and left[0].shape[-1] == whole
            and torch.equal(logits.float(), left[0].float())
        )
    return _known[model]


@contextmanager
def relative_logits(model: PreTrainedModel, num_rows: int = 0) -> Iterator[None]:
    """Within, a model in half precision gives each row's logits less a guess of their largest. Who
    knows that many rows will go through its last layer says how many; its weights must not change
    then."""
    layers = [
        factor.get_output_embeddings()
        for factor in factors_of(model)
        if factor.dtype.itemsize < 4 and ends_in_a_plain_layer(factor)
    ]
    # One that somebody else has taken over already is left alone; factors may have one in common.
    ours = dict.fromkeys(layer for layer in layers if "forward" not in vars(layer))
    try:
        for layer in ours:
            weight_VH = layer.weight
            many = num_rows >= FROM_ROWS and weight_VH.numel() <= UP_TO and can_pack(weight_VH)
            layer.forward = (_OfMany if many else _LessAGuess)(weight_VH)
        yield
    finally:
        for layer in ours:
            vars(layer).pop("forward", None)


class _LessAGuess:
    def __init__(self, weight_VH: Tensor) -> None:
        self._weight_VH = weight_VH

    def __call__(self, hidden: Tensor) -> Tensor:
        hidden_RH = hidden.flatten(0, -2)
        asked_UH = self._weight_VH[:: max(1, len(self._weight_VH) // _ASKED)]
        guess_R1 = (hidden_RH @ asked_UH.T).amax(-1, keepdim=True)
        return self._logits(hidden_RH, guess_R1).unflatten(0, hidden.shape[:-1])

    def _logits(self, hidden_RH: Tensor, guess_R1: Tensor) -> Tensor:
        return torch.addmm(-guess_R1, hidden_RH, self._weight_VH.T)


class _OfMany(_LessAGuess):
    def __init__(self, weight_VH: Tensor) -> None:
        super().__init__(weight_VH)
        minus_V1 = weight_VH.new_full((len(weight_VH), 1), -1.0)
        self._packed = pack(torch.cat([weight_VH, minus_V1], dim=1))

    def _logits(self, hidden_RH: Tensor, guess_R1: Tensor) -> Tensor:
        return multiply(torch.cat([hidden_RH, guess_R1], dim=1), self._packed)
