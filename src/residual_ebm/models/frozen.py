"""An encoder's layers compiled around their weights, which are laid out once as the processor
multiplies them.

Without that, torch lays a weight out anew for every product, copies the bias to where the product
goes and passes over its outcome once more for the activation. What is compiled knows the weights as
constants: it is made for one network as it is now, and made anew where a weight has changed. It
takes a second or two a layer, and a copy of the weights that torch does not let go, so there must
be much to read.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch._inductor.config
from torch import Tensor
from transformers import PreTrainedModel

from residual_ebm.models.compiled import (
    compile_whole,
    forwards_replaced,
    repeated_layers,
    try_compiled,
)
from residual_ebm.models.loading import context_length

# Tokens x weights of the layers: below, compiling takes longer than it saves.
_FROM_READ = 3 * 10**13
# Rows and tokens. The compiler makes its loops for the sizes that it sees first, which are always
# these: an interrupted run goes on to the bit. It takes equal sizes for the same, so these are the
# sizes of nothing else.
_SHOWN = (61, 17)
_FREEZING = torch._inductor.config.patch(freezing=True)  # made once: every patch stays alive


class _Frozen(NamedTuple):
    weights: tuple[tuple[int, int], ...]  # where each lies, and how often it was changed
    forwards: dict[Callable[..., Any], Callable[..., Any]]  # by what they take the place of


_known: WeakKeyDictionary[PreTrainedModel, _Frozen] = WeakKeyDictionary()


@contextmanager
def frozen_layers(
    model: PreTrainedModel, num_tokens: int, read: Callable[[Tensor, Tensor], Any]
) -> Iterator[bool]:
    """Within, the layers that a model repeats run so, if there are so many tokens to read in all
    that it pays, and whether they do; `read` gives ids and mask to the model as they will be given.
    No gradients."""
    layers = repeated_layers(model)
    weights = [weight for layer in layers for weight in (*layer.parameters(), *layer.buffers())]
    if num_tokens * sum(weight.numel() for weight in weights) < _FROM_READ:
        yield False
        return
    state = tuple((weight.data_ptr(), _times_changed(weight)) for weight in weights)
    is_new = model not in _known or _known[model].weights != state
    if is_new:
        _known[model] = _Frozen(state, {})
    with forwards_replaced(layers, partial(_frozen, _known[model].forwards)):
        if is_new:
            rows, tokens = _SHOWN
            tokens = min(tokens, context_length(model.config) or tokens)
            ids_BL = torch.zeros(rows, tokens, dtype=torch.int64, device=model.device)
            read(ids_BL, torch.ones_like(ids_BL))
        yield True


def _times_changed(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def _frozen(
    forwards: dict[Callable[..., Any], Callable[..., Any]], plain: Callable[..., Any]
) -> Callable[..., Any]:
    if plain not in forwards:
        forwards[plain] = compile_whole(_copy_of(plain))

    def choose(layer: Any, *arguments: Any, **named: Any) -> Any:
        # The compiler takes a size of 1 for a constant: all layers would be compiled once more.
        if not arguments or 1 in arguments[0].shape:
            return plain(layer, *arguments, **named)
        with _FREEZING:
            return try_compiled(forwards[plain], plain, layer, *arguments, **named)

    return choose


def _copy_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiler keeps what it has made with a function's code, and looks through all of it at
    every call."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    return copy
