"""Functions that are compiled where it pays: for many rows, in long trainings, and where a C++
compiler is at hand.

A fused loop over a tensor reads it once where plain torch reads it once an operation. Compiling
takes some seconds, so small inputs take the plain way. Which way is taken, and for which shapes,
depends on the sizes of the inputs and on the recipe, not on how much there is left to do nor on
what came before: an interrupted run goes on as it began.
"""

import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.async_compile import AsyncCompile
from transformers import PreTrainedModel

FROM_ROWS = 256
_FROM_HIDDEN = 2**17  # rows x hidden size: below, a layer takes less than a second to earn back
# Tokens x weights of the layers: below, a training takes less than some minutes.
_FROM_TRAINED = 10**13
# A layer's number is no constant: each would be compiled anew. Made once: every patch stays alive.
_OPTIONS = torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=64)
# Backward passes at once as well: a failure in the middle of one could not be made good.
_WHOLE = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
_NOT_COMPILED = (TorchDynamoException, FailOnRecompileLimitHit)
_logger = logging.getLogger(__name__)
_broken: set[Callable[..., Any]] = set()
_shown: set[tuple[Any, ...]] = set()
_compiled_forwards: dict[tuple[Callable[..., Any], bool], Callable[..., Any]] = {}
# Calls of the C++ compiler beside each other, in threads: two take half of the time of one after
# the other, and more gain little where a layer is a few dozen loops.
torch._inductor.config.compile_threads = min(os.cpu_count() or 1, 4)
# Whether the C++ compiler knows AVX at all, torch tries for seconds in processes of their own; what
# is newer is tried apart, and where nothing can be built nothing is compiled anyway.
if torch._inductor.config.cpp.vec_isa_ok is None:
    torch._inductor.config.cpp.vec_isa_ok = True
# Where torch is built for GPUs it would start processes as well, for loops that we do not compile.
os.environ.setdefault("TORCH_WARM_POOL", "0")
if sys.platform != "win32":  # a child would wait for its parent's threads
    os.register_at_fork(after_in_child=AsyncCompile.pool.cache_clear)

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled_instead_of(
    plain: Function, from_numbers: int, first: Callable[..., tuple[Any, ...]] | None = None
) -> Callable[[Function], Function]:
    """The decorated function takes the place of `plain` when its first argument has many rows and
    `from_numbers` numbers in all.

    The compiler makes its loops for the sizes that it sees first; where these may be any, `first`
    cuts arguments down to what it is shown before.
    """

    def decorate(function: Function) -> Function:
        fused = compile_whole(function)

        @wraps(plain)
        def choose(*arguments: Any) -> Any:
            rows = arguments[0]
            if not _pays(rows.device, len(rows), rows.numel(), from_numbers):
                return plain(*arguments)
            if first is not None:
                shown = first(*arguments)
                kind = (fused, *((part.dtype, part.shape) for part in shown))
                if kind not in _shown:
                    _shown.add(kind)
                    try_compiled(fused, plain, *shown)
            return try_compiled(fused, plain, *arguments)

        return choose  # type: ignore[return-value]

    return decorate


@contextmanager
def compiled_layers(model: PreTrainedModel, num_rows: int) -> Iterator[None]:
    """Within, the layers that a model repeats run compiled: one compilation serves them all."""
    hidden = num_rows * int(getattr(model.config, "hidden_size", None) or 0)
    if _pays(model.device, num_rows, hidden, _FROM_HIDDEN):
        with forwards_replaced(repeated_layers(model), partial(_compiled, dynamic=True)):
            yield
    else:
        yield


@contextmanager
def compiled_training(
    network: nn.Module, num_tokens: int, *, dropout: bool = True
) -> Iterator[None]:
    """Within, the repeated layers of a network that will see so many tokens train compiled.

    Every batch must have the same shape. Layers that drop out, where `dropout` is on, are left
    alone: the compiler's random numbers cost more than its loops gain.
    """
    models = [part for part in network.modules() if isinstance(part, PreTrainedModel)][:1]
    layers = [layer for model in models for layer in repeated_layers(model)]
    weights = sum(weight.numel() for layer in layers for weight in layer.parameters())
    on_cpu = all(model.device.type == "cpu" for model in models)
    pays = on_cpu and num_tokens * weights >= _FROM_TRAINED
    if pays and not (dropout and any(map(_drops_out, layers))):
        with forwards_replaced(layers, partial(_compiled, dynamic=False)):
            yield
    else:
        yield


def _drops_out(layer: nn.Module) -> bool:
    """Dropout is a module in some networks, a number given to a function in others."""
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0)
        or any("dropout" in name and value for name, value in _numbers(module))
        for module in layer.modules()
    )


def _numbers(module: nn.Module) -> list[tuple[str, float]]:
    return [(name, value) for name, value in vars(module).items() if isinstance(value, float)]


def repeated_layers(model: PreTrainedModel) -> list[nn.Module]:
    """transformers names the layers that must stay whole on one device: those that repeat."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    count = Counter(map(type, layers))
    return [layer for layer in layers if count[type(layer)] > 1]  # embeddings may be named too


@contextmanager
def forwards_replaced(
    layers: list[nn.Module], instead_of: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Within, each layer runs what takes the place of its class's forward, layer first."""
    for layer in layers:
        layer.forward = partial(instead_of(type(layer).forward), layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _compiled(plain: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    if (plain, dynamic) not in _compiled_forwards:
        _compiled_forwards[plain, dynamic] = compile_whole(plain, dynamic)
    choose = try_compiled if dynamic else _try_to_learn
    return partial(choose, _compiled_forwards[plain, dynamic], plain)


def _pays(device: torch.device, num_rows: int, numbers: int, from_numbers: int) -> bool:
    return device.type == "cpu" and num_rows >= FROM_ROWS and numbers >= from_numbers


def compile_whole(function: Callable[..., Any], dynamic: bool = True) -> Callable[..., Any]:
    return torch.compile(function, dynamic=dynamic, fullgraph=True)


def _try_to_learn(
    fused: Callable[..., Any], plain: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Validation is too seldom to be compiled as well."""
    if not torch.is_grad_enabled():
        return plain(*arguments, **named)
    return try_compiled(fused, plain, *arguments, **named)


def try_compiled(
    fused: Callable[..., Any], plain: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """What `fused` gives, or from the time when it could not be compiled on what `plain` does."""
    if fused in _broken:
        return plain(*arguments, **named)
    try:
        with warnings.catch_warnings(), _OPTIONS, _WHOLE:
            warnings.simplefilter("ignore")  # of the compiler's own insides
            return fused(*arguments, **named)
    except _NOT_COMPILED as error:  # it could not be compiled, so nothing of it has run
        _broken.add(fused)
        reason = " ".join(str(error).split())[:200]
        _logger.warning("%s is not compiled here: %s", plain.__qualname__, reason)
        return plain(*arguments, **named)
