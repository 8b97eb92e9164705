"""A run that is killed and started again ends with the same bytes as one that never stopped."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

# Ten are asked for before a release; four are what every test run can afford.
KILLS = int(os.environ.get("REBM_KILLS", "4"))
STOPPED = "rebm: stopped; the same command goes on from here"


def start(out: Path, set_options: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "residual_ebm.cli", "run", "tiny", *set_options]
    return subprocess.Popen(
        [*command, "--out", str(out), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Until `condition` holds or the process has ended."""
    deadline = time.monotonic() + 120
    while process.poll() is None and not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_work(process: subprocess.Popen[str], out: Path) -> None:
    """Imports take seconds in which nothing can go wrong; opening the run touches its lock."""
    lock = out / ".lock"
    before = lock.stat().st_mtime_ns if lock.exists() else None
    wait_until(process, lambda: lock.exists() and lock.stat().st_mtime_ns != before)


def shards(run: Path) -> dict[str, bytes]:
    folders = ("blocks", "negatives", "proposals", "log_weights")
    return {
        str(path.relative_to(run)): path.read_bytes()
        for folder in folders
        for path in (run / folder).rglob("*")
        if path.is_file()
    }


def assert_same_as_uninterrupted(out: Path, tiny_run: Path) -> None:
    assert shards(out) == shards(tiny_run)
    assert (out / "results.json").read_bytes() == (tiny_run / "results.json").read_bytes()
    lines = (out / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    keys = [(e["stage"], e["model"], e["step"], *sorted(e)) for e in entries]
    assert len(set(keys)) == len(keys)
    assert lines == (tiny_run / "metrics.jsonl").read_text().splitlines()
    assert not list(out.rglob(".partial-*"))
    assert not list(out.rglob("*.training"))


@pytest.fixture(scope="session")
def seconds_of_work(tiny_run: Path) -> float:
    return float(sum(json.loads((tiny_run / "timings.json").read_text()).values()))


def test_a_run_killed_at_random_moments_ends_the_same(
    tiny_run: Path, tmp_path: Path, set_options: list[str], seconds_of_work: float
) -> None:
    out, draw, num_killed = tmp_path / "run", random.Random(0), 0
    for _ in range(KILLS):
        process = start(out, set_options)
        wait_for_work(process, out)
        # The delays add up to about all of the work, so that every stage is hit.
        time.sleep(draw.uniform(0, 2 * seconds_of_work / (KILLS + 1)))
        process.kill()
        _, err = process.communicate()
        num_killed += process.returncode == -signal.SIGKILL
        assert process.returncode in (-signal.SIGKILL, 0), err
        assert "rebm: " not in err
    assert num_killed >= 2
    process = start(out, set_options)
    answer, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(answer) == json.loads((tiny_run / "results.json").read_text())
    assert_same_as_uninterrupted(out, tiny_run)


def test_ctrl_c_is_one_line_and_the_same_command_goes_on(
    tiny_run: Path, tmp_path: Path, set_options: list[str]
) -> None:
    out = tmp_path / "run"
    moments: list[Callable[[], bool]] = [
        lambda: (
            (out / "metrics.jsonl").exists()  # amid the steps of the language model
            and len((out / "metrics.jsonl").read_text().splitlines()) > 7
        ),
        lambda: (out / "log_weights").exists(),  # amid evaluation
    ]
    for moment in moments:
        process = start(out, set_options)
        wait_until(process, moment)
        process.send_signal(signal.SIGINT)
        answer, err = process.communicate()
        assert process.returncode == 130, err
        assert answer == ""
        assert err.splitlines()[-1] == STOPPED
        assert "Traceback" not in err
        assert not list(out.rglob(".partial-*"))
        assert not (out / "results.json").exists()
    process = start(out, set_options)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert_same_as_uninterrupted(out, tiny_run)


def test_steps_before_an_interrupt_are_not_done_again(
    tiny_run: Path, tmp_path: Path, set_options: list[str]
) -> None:
    """Ctrl-C saves where the training is: less is lost than by a kill."""
    out = tmp_path / "run"
    process = start(out, set_options)
    wait_until(process, lambda: (out / "metrics.jsonl").exists())
    process.send_signal(signal.SIGINT)
    process.communicate()
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").open()]
    assert (out / "language_models" / "base.training" / "state.safetensors").exists()
    process = start(out, set_options)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert f"base: {max(steps)}/" not in err
    assert_same_as_uninterrupted(out, tiny_run)
