"""Functions that are compiled where it pays: for many rows, and where a C++ compiler is at hand.

A fused loop over a tensor reads it once where plain torch reads it once an operation. Compiling
takes some seconds, so small inputs take the plain way. Which way is taken depends on the inputs
alone, never on what was computed before: an interrupted run goes on with the same bits.
"""

import logging
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import torch._inductor.config

_FROM_ROWS = 256
_logger = logging.getLogger(__name__)
_broken: set[str] = set()
# Compile in this process: workers of its own would outlive the few functions there are.
torch._inductor.config.compile_threads = 1

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled_instead_of(plain: Function) -> Callable[[Function], Function]:
    """The decorated function takes the place of `plain` when its first argument has many rows."""

    def decorate(function: Function) -> Function:
        fused = torch.compile(function, dynamic=True, fullgraph=True)

        @wraps(plain)
        def choose(*arguments: Any) -> Any:
            first = arguments[0]
            if len(first) < _FROM_ROWS or first.device.type != "cpu" or plain.__name__ in _broken:
                return plain(*arguments)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of the compiler's own insides
                    return fused(*arguments)
            except Exception as error:  # whatever a missing or unusual compiler gives rise to
                _broken.add(plain.__name__)
                reason = " ".join(str(error).split())[:200]
                _logger.warning("%s is not compiled here: %s", plain.__name__, reason)
                return plain(*arguments)

        return choose  # type: ignore[return-value]

    return decorate
