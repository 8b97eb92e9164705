"""Candidates take turns, each in its own process, and none takes another with it."""

import atexit
import os
import platform
import signal
import time
from pathlib import Path

import pytest
import torch

from residual_ebm.bench.workers import Spec, Work, alternate
from residual_ebm.models.memory import KEEP_MEMORY

HERE = f"{__name__}:"


def sleeping(seconds: float, units: int) -> Work:
    return Work(lambda: time.sleep(seconds), units)


def noting(path: str, name: str, warm_up: str | None = None) -> Work:
    def note(what: str) -> None:
        with Path(path).open("a") as file:
            file.write(f"{what} {os.getpid()}\n")

    return Work(lambda: note(name), 1, (lambda: note(warm_up)) if warm_up else None)


def missing() -> Work:
    raise ModuleNotFoundError("No module named 'engine'")


def failing_later(times: int) -> Work:
    left = [times]

    def run() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("worn\nout")

    return Work(run, 1)


def dying() -> Work:
    return Work(lambda: os.kill(os.getpid(), signal.SIGKILL), 1)


def compiling() -> Work:
    function = torch.compile(lambda tensor: (tensor.sin() * 3 + tensor.cos()).exp())
    files = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert not list(files.iterdir()), "left by an earlier run"

    def run() -> None:
        function(torch.ones(10))
        assert list(files.iterdir())

    return Work(run, 1)


def holding(megabytes: int) -> Work:
    def run() -> None:
        bytearray(megabytes * 10**6)

    return Work(run, 1)


def freeing(path: str, megabytes: int) -> Work:
    """Notes how many bytes a process still has of a block that it gave back."""

    def run() -> None:
        before = _resident_bytes()
        bytearray(b"x" * (megabytes * 10**6))
        Path(path).write_text(str(_resident_bytes() - before))

    return Work(run, 1)


def tidying_up(path: str) -> Work:
    atexit.register(Path(path).touch)
    return Work(lambda: None, 1)


def _resident_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[1])


def test_rates_are_units_by_median_seconds() -> None:
    (reading,) = alternate(
        [Spec("s", f"{HERE}sleeping", {"seconds": 0.05, "units": 10})], 3, timeout=60
    )
    assert len(reading.seconds) == 3
    assert reading.rate is not None
    assert 100 < reading.rate <= 200
    assert reading.first_seconds is not None
    assert reading.error is None


def test_candidates_take_turns_in_processes_of_their_own(tmp_path: Path) -> None:
    path = str(tmp_path / "turns")
    specs = [Spec(name, f"{HERE}noting", {"path": path, "name": name}) for name in "abc"]
    alternate(specs, 4, timeout=60)
    turns = [line.split() for line in Path(path).read_text().splitlines()]
    assert "".join(name for name, _ in turns) == "abc" + "bca" + "cab" + "abc" + "bca"
    assert len({process for _, process in turns}) == 3
    assert str(os.getpid()) not in {process for _, process in turns}


def test_what_warms_up_otherwise_does_so_once(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    spec = Spec("a", f"{HERE}noting", {"path": str(path), "name": "a", "warm_up": "w"})
    (reading,) = alternate([spec], 2, timeout=60)
    assert path.read_text().split()[::2] == ["w", "a", "a"]
    assert len(reading.seconds) == 2


def test_a_broken_candidate_has_a_reason_and_no_rate() -> None:
    broken = [
        Spec("missing", f"{HERE}missing", {}),
        Spec("failing", f"{HERE}failing_later", {"times": 2}),
        Spec("dying", f"{HERE}dying", {}),
    ]
    fine = Spec("fine", f"{HERE}sleeping", {"seconds": 0.0, "units": 1})
    *readings, last = alternate([*broken, fine], 3, timeout=60)
    assert [reading.error for reading in readings] == [
        "ModuleNotFoundError: No module named 'engine'",
        "ValueError: worn out",
        "died with exit code -9",
    ]
    assert all(reading.rate is None for reading in readings)
    assert len(last.seconds) == 3


def test_a_candidate_that_hangs_is_given_up() -> None:
    begun = time.monotonic()
    (reading,) = alternate(
        [Spec("s", f"{HERE}sleeping", {"seconds": 100, "units": 1})], 1, timeout=2
    )
    assert reading.error == "no answer within 2 s"
    assert time.monotonic() - begun < 50


def test_a_candidate_leaves_by_itself_and_tidies_up(tmp_path: Path) -> None:
    alternate([Spec("tidy", HERE + "tidying_up", {"path": str(tmp_path / "left")})], 1, timeout=60)
    assert (tmp_path / "left").exists()


def test_compiling_is_told_apart_and_starts_from_nothing() -> None:
    compiling, plain = alternate(
        [
            Spec("c", f"{HERE}compiling", {}),
            Spec("s", f"{HERE}sleeping", {"seconds": 0.0, "units": 1}),
        ],
        1,
        timeout=120,
    )
    assert compiling.error is None
    assert compiling.compile_seconds is not None
    assert compiling.first_seconds is not None
    assert 0.2 < compiling.compile_seconds < compiling.first_seconds
    assert compiling.seconds[0] < 0.1
    assert plain.compile_seconds == 0


def test_peaks_of_memory_are_each_candidates_own() -> None:
    small, large = alternate(
        [Spec(str(size), f"{HERE}holding", {"megabytes": size}) for size in (1, 400)], 1, timeout=60
    )
    assert small.peak_bytes is not None
    assert large.peak_bytes is not None
    assert 300e6 < large.peak_bytes - small.peak_bytes < 500e6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is glibc's matter")
@pytest.mark.parametrize("before", ["0", None])
def test_only_who_keeps_memory_has_it_after_freeing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv(KEEP_MEMORY, raising=False)
    else:
        monkeypatch.setenv(KEEP_MEMORY, before)
    kept = {}
    for keeps_memory in (True, False):
        path = tmp_path / str(keeps_memory)
        arguments = {"path": str(path), "megabytes": 100}
        spec = Spec("s", f"{HERE}freeing", arguments, keeps_memory=keeps_memory)
        # The first turn alone: in the second, what was kept is used again.
        (reading,) = alternate([spec], 0, timeout=60)
        assert reading.error is None
        kept[keeps_memory] = int(path.read_text())
    assert kept[True] > 100e6
    assert kept[False] < 10e6
    assert os.environ.get(KEEP_MEMORY) == before
