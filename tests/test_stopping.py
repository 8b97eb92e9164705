"""Signals that ask a process to stop."""

import os
import signal

import pytest

from residual_ebm.stopping import stop_now, when_asked_to_stop


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_either_signal_stops_and_then_means_again_what_it_meant(asked: signal.Signals) -> None:
    before = signal.getsignal(asked)
    with pytest.raises(KeyboardInterrupt), when_asked_to_stop(stop_now):
        os.kill(os.getpid(), asked)
    assert signal.getsignal(asked) is before


def test_what_is_ignored_stays_ignored() -> None:
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with when_asked_to_stop(lambda *_: asked.append(1)):
            os.kill(os.getpid(), signal.SIGTERM)
        assert not asked
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
