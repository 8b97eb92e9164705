"""Bars where there is no terminal: a line now and then, with the time left."""

import re

import pytest

from residual_ebm.progress import TerminalProgress


def test_the_time_left_goes_by_the_last_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A first unit that took long, while something was compiled, is soon forgotten."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with TerminalProgress().bar("drawing", 100) as bar:
        for seconds in (200.0, *[10.0] * 20):
            now += seconds
            bar.advance()
    lines = capsys.readouterr().err.splitlines()
    left = [int(found[1]) for line in lines if (found := re.search(r" (\d+) s left", line))]
    assert len(left) == 21
    assert left[0] == 99 * 200
    assert left[-1] == 79 * 10
