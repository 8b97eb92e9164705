"""What a person sees while a stage works: a sentence, a bar with the time left, notes.

Stages know only `Progress`; the command line hands them the one that draws. On a terminal that is a
rich bar; in a file or a pipe it is a line now and then, so that a log stays readable.
"""

import collections
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as RichProgress,
)

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_WORTH_A_LINE = 3.0
_LINES_TO_GO_BY = 6


class Bar:
    """Counts the units of one piece of work; this one draws nothing."""

    def advance(self, amount: int = 1, note: str = "") -> None:
        """`amount` more units are done; `note` (a loss, say) is shown beside the bar."""


class Progress:
    """Says nothing: for tests and for library use."""

    def stage(self, sentence: str) -> None:
        """A stage begins; `sentence` tells a newcomer what it does."""

    def note(self, text: str) -> None:
        """Something the user should know, once."""

    @contextmanager
    def bar(self, label: str, total: int, done: int = 0) -> Iterator[Bar]:
        """A piece of work of `total` units, of which `done` were done by an earlier run."""
        del label, total, done
        yield Bar()


QUIET = Progress()


class TerminalProgress(Progress):
    """Draws on standard error, so that standard output carries results alone."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)

    def stage(self, sentence: str) -> None:
        style = "bold" if self._console.is_terminal else None
        self._console.print(sentence, style=style, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, label: str, total: int, done: int = 0) -> Iterator[Bar]:
        if not self._console.is_terminal:
            yield _LineBar(label, total, done)
            return
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with RichProgress(*columns, console=self._console) as drawing:
            task = drawing.add_task(label, total=total, completed=done, note="")
            yield _DrawnBar(drawing, int(task))


class _DrawnBar(Bar):
    def __init__(self, drawing: RichProgress, task: int) -> None:
        self._drawing = drawing
        self._task = task

    def advance(self, amount: int = 1, note: str = "") -> None:
        fields = {"note": note} if note else {}
        self._drawing.update(self._task, advance=amount, **fields)  # type: ignore[arg-type]


class _LineBar(Bar):
    def __init__(self, label: str, total: int, done: int) -> None:
        self._label, self._total, self._done = label, total, done
        self._start = self._last = time.monotonic()
        # The time left goes by the last lines: the first (compiling) says little of the rest.
        self._seen = collections.deque([(self._start, done)], maxlen=_LINES_TO_GO_BY)

    def advance(self, amount: int = 1, note: str = "") -> None:
        self._done += amount
        now = time.monotonic()
        finished = self._done >= self._total and now - self._start > _SECONDS_WORTH_A_LINE
        if now - self._last < _SECONDS_BETWEEN_LINES and not finished:
            return
        self._last = now
        then, before = self._seen[0]
        self._seen.append((now, self._done))
        rate = (self._done - before) / max(now - then, 1e-9)
        left = (self._total - self._done) / rate if rate else 0.0
        print(
            f"  {self._label}: {self._done}/{self._total}, {now - self._start:.0f} s,"
            f" {left:.0f} s left {note}".rstrip(),
            file=sys.stderr,
            flush=True,
        )
