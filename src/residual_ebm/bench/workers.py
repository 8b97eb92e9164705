"""Candidates of a benchmark, each in a process of its own, taking turns.

Machines drift: what is measured one after the other is not comparable, what alternates is. Each has
its own peak of memory, and one that crashes or hangs takes no other with it.
"""

import contextlib
import importlib
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from residual_ebm.models.memory import KEEP_MEMORY, give_back_freed_memory
from residual_ebm.progress import QUIET, Progress

_COMPILING = ("_compile.compile_inner", "backward._backward_impl")  # torch's names
_LEAVING = 5.0  # seconds that a worker has to end by itself


class Work(NamedTuple):
    """What a candidate does when it is its turn, and how much that is."""

    run: Callable[[], object]
    units: int  # tokens, blocks or samples: what rates count
    warm_up: Callable[[], object] | None = None  # for the first turn, where `run` takes long


class Spec(NamedTuple):
    """A candidate: `factory` names a function, "module:name", that returns its Work."""

    name: str
    factory: str
    arguments: dict[str, Any]
    keeps_memory: bool = True  # that it has freed, as our own processes do


@dataclass
class Reading:
    """What one candidate's turns took; `error` is why there are none."""

    name: str
    units: int = 0
    first_seconds: float | None = None  # compilation and warming up included
    compile_seconds: float | None = None  # of these
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    error: str | None = None

    @property
    def rate(self) -> float | None:
        return self.units / statistics.median(self.seconds) if self.seconds else None


def alternate(
    specs: Sequence[Spec],
    repeats: int,
    *,
    timeout: float,
    label: str = "",
    progress: Progress = QUIET,
) -> list[Reading]:
    """One turn of each to warm up, then `repeats` rounds in which all take a turn. Each round
    begins with another: what one leaves behind in caches must not always meet the same one."""
    workers: list[_Worker] = []
    try:
        with progress.bar(label, len(specs) * (2 + repeats)) as bar:
            for spec in specs:  # one after the other: loading is work too
                workers.append(_Worker(spec, timeout))
                bar.advance(note=spec.name)
            for number in range(1 + repeats):
                begin = number % len(workers)
                for worker in workers[begin:] + workers[:begin]:
                    worker.turn(first=number == 0)
                    bar.advance(note=worker.reading.name)
    finally:
        for worker in workers:
            worker.stop()
    return [worker.reading for worker in workers]


class _Worker:
    def __init__(self, spec: Spec, timeout: float) -> None:
        self.reading = Reading(spec.name)
        self._timeout = timeout
        # Spawned: a fork would inherit this process's threads and memory.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # The compiler's files: none may be left from an earlier run.
        self._compiled = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        arguments = (theirs, spec, self._compiled.name)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with _environment(KEEP_MEMORY, str(int(spec.keeps_memory))):
            self._process.start()
        theirs.close()
        answer = self._answer()
        if answer is not None:
            self.reading.units = answer["units"]

    def turn(self, *, first: bool) -> None:
        if self.reading.error is not None:
            return
        answer = self._answer(ask="warm up" if first else "run")
        if answer is None:
            return
        self.reading.peak_bytes = answer["peak_bytes"]
        if first:
            self.reading.first_seconds = answer["seconds"]
            self.reading.compile_seconds = answer["compile_seconds"]
        else:
            self.reading.seconds.append(answer["seconds"])

    def stop(self) -> None:
        self._connection.close()  # on which a worker that waits leaves, and tidies up behind itself
        self._process.join(_LEAVING)
        self._process.kill()
        self._process.join()
        self._compiled.cleanup()

    def _answer(self, ask: str | None = None) -> dict[str, Any] | None:
        """What the worker says; None when it cannot go on, with the reason in the reading."""
        try:
            if ask is not None:
                self._connection.send(ask)
            if not self._connection.poll(self._timeout):
                self.reading.error = f"no answer within {self._timeout:.0f} s"
            else:
                answer: dict[str, Any] = self._connection.recv()
                if "error" not in answer:
                    return answer
                self.reading.error = answer["error"]
        except (EOFError, ConnectionError):
            self._process.join()
            self.reading.error = f"died with exit code {self._process.exitcode}"
        self.reading.seconds.clear()  # a candidate that breaks off has no rate
        self._process.kill()
        return None


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """For processes that are started within: memory is set up while they import this file."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _serve(connection: Connection, spec: Spec, compiled: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled
    try:
        module, _, name = spec.factory.partition(":")
        work: Work = getattr(importlib.import_module(module), name)(**spec.arguments)
        _forget_peak()
        connection.send({"units": work.units})
        while True:
            asked = connection.recv()
            begun = time.perf_counter()
            (work.warm_up if asked == "warm up" and work.warm_up else work.run)()
            connection.send(
                {
                    "seconds": time.perf_counter() - begun,
                    "compile_seconds": _compile_seconds(),
                    "peak_bytes": _peak_bytes(),
                }
            )
    except (EOFError, KeyboardInterrupt):
        return  # the parent is gone, or going
    except Exception as error:
        reason = " ".join(str(error).split())
        connection.send({"error": f"{type(error).__name__}: {reason[:300]}"})


def _compile_seconds() -> float:
    """What torch has compiled for so far in this process; an engine may do without torch."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0.0
    names, seconds = dynamo.compile_times(repr="csv", aggregate=True)
    spent = dict(zip(names, seconds, strict=True))
    # A backward pass may be compiled when it is first needed, outside of the first.
    return sum(float(spent.get(part, 0.0)) for part in _COMPILING)


def _forget_peak() -> None:
    """What loading and converting took is not what the work takes."""
    give_back_freed_memory()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_bytes() -> int:
    """The most memory this process has held; getrusage would count the parent's too on Linux."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(row for row in status.read_text().splitlines() if row.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
