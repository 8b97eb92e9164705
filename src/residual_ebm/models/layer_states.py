"""States of P_LM: those that enter the vocabulary layer, and those of further layers.

They are collected while the network runs, whoever runs it, and lie side by side: the last state
first, then those of the layers asked for, in rising order.

Shapes: B rows, L tokens of a pass, K of those that predict something, H hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_ebm.errors import UserError
from residual_ebm.models.ralm import RalmForCausalLM


def check_layers(model: PreTrainedModel, layers: Sequence[int], energy: str) -> None:
    """Refuse layers that a model does not have."""
    if not layers:
        return
    field, known = f"energies.{energy}.head.layers", _numbered_layers(model)
    if not known:
        name = type(model).__name__
        raise UserError(field, layers, f"the layers of a {name} cannot be told apart; leave it out")
    if max(layers) > len(known):
        raise UserError(field, max(layers), f"its language model has {len(known)} layers; lower it")


def _numbered_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers in the order they run, as wide as what enters the vocabulary layer; of a RALM,
    those of its base, whose vocabulary layer the states are taken before. None where they cannot
    be found."""
    if isinstance(model, RalmForCausalLM):
        return _numbered_layers(model.base)
    count = getattr(model.config, "num_hidden_layers", None)
    width = getattr(model.config, "hidden_size", None)
    if width != model.get_output_embeddings().weight.shape[1]:
        return []
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    return next((list(part) for part in lists if len(part) == count), [])


@contextmanager
def states_captured(
    model: PreTrainedModel, states: list[Tensor], layers: Sequence[int] = ()
) -> Iterator[None]:
    """Collect the states of every pass of the model, (B, K, (1 + layers) x H)."""
    below: list[Tensor] = []

    def keep_layer(_module: Any, _inputs: Any, output: Any) -> None:
        below.append(output[0] if isinstance(output, tuple) else output)

    def keep_last(_module: Any, inputs: Any) -> None:
        last_BKH = inputs[0]
        # Layers run over every token of a pass; the vocabulary layer over those that predict.
        lower = [state_BLH[:, -last_BKH.shape[1] :] for state_BLH in below]
        states.append(torch.cat([last_BKH, *lower], dim=-1) if lower else last_BKH)
        below.clear()

    every = _numbered_layers(model) if layers else []
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(every[layer - 1].register_forward_hook(keep_layer).remove)
        hook = model.get_output_embeddings().register_forward_pre_hook(keep_last)
        stack.callback(hook.remove)
        yield


def union_of(layers: Sequence[Sequence[int]]) -> list[int]:
    """The layers that several readers want, in rising order."""
    return sorted({layer for wanted in layers for layer in wanted})


def select_layers(states: Tensor, there: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """The states of some of the layers, out of those of more."""
    if list(there) == list(wanted):
        return states
    parts = states.chunk(1 + len(there), dim=-1)
    return torch.cat([parts[0], *(parts[1 + there.index(layer)] for layer in wanted)], dim=-1)
