"""Ctrl-C, and what schedulers send instead: a wish to stop that leaves a run to be resumed."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def when_asked_to_stop(handler: Callable[..., Any]) -> Iterator[None]:
    """Within, both signals call `handler`; a signal that is ignored, as a shell has it for what
    runs in the background, stays so. Other threads than the main one cannot be asked."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def stop_now(*_: Any) -> NoReturn:
    raise KeyboardInterrupt
