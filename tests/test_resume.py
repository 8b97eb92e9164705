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

from safetensors import safe_open

from residual_ebm.files.open_run import open_run
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages.pipeline import run_all

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
        time.sleep(0.01)


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


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def assert_same_as_uninterrupted(out: Path, tiny_run: Path) -> None:
    assert shards(out) == shards(tiny_run)
    assert (out / "results.json").read_bytes() == (tiny_run / "results.json").read_bytes()
    lines = read_lines(out / "metrics.jsonl")
    entries = [json.loads(line) for line in lines]
    keys = [(e["stage"], e["model"], e["step"], *sorted(e)) for e in entries]
    assert len(set(keys)) == len(keys)
    assert lines == read_lines(tiny_run / "metrics.jsonl")
    assert not list(out.rglob(".partial-*"))
    assert not list(out.rglob("*.training"))
    assert not (out / "states").exists()


def progress(out: Path) -> int:
    """How far a run is: lines logged and shards written."""
    metrics = out / "metrics.jsonl"
    lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    # os.walk passes over a folder that the running process renames meanwhile; rglob raises.
    names = (name for _, _, names in os.walk(out) for name in names)
    return lines + sum(name.endswith(".arrow") for name in names)


def test_a_run_killed_at_random_moments_ends_the_same(
    tiny_run: Path, tmp_path: Path, set_options: list[str]
) -> None:
    out, draw, num_killed = tmp_path / "run", random.Random(0), 0
    # By progress, not by the clock: the moments cover all stages however fast the machine is.
    for moment in sorted(draw.uniform(0, progress(tiny_run)) for _ in range(KILLS)):
        process = start(out, set_options)
        wait_for_work(process, out)
        wait_until(process, lambda moment=moment: progress(out) >= moment)  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.3))
        process.kill()
        _, err = process.communicate()
        num_killed += process.returncode == -signal.SIGKILL
        assert process.returncode in (-signal.SIGKILL, 0), err
        assert "rebm: " not in err
    assert num_killed >= KILLS // 2
    process = start(out, set_options)
    answer, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(answer) == json.loads((tiny_run / "results.json").read_text())
    assert_same_as_uninterrupted(out, tiny_run)


def test_a_wish_to_stop_is_one_line_and_the_same_command_goes_on(
    tiny_run: Path, tmp_path: Path, set_options: list[str]
) -> None:
    out, num_saved = tmp_path / "run", 0
    state = out / "language_models" / "base.training" / "state.safetensors"
    moments: list[tuple[Callable[[], bool], signal.Signals]] = [
        # 7 files of blocks at most: amid the steps of the LM
        (lambda: progress(out) > 7, signal.SIGTERM),
        (lambda: (out / "log_weights").exists(), signal.SIGINT),  # amid evaluation
    ]
    for moment, asked in moments:
        process = start(out, set_options)
        wait_until(process, moment)
        process.send_signal(asked)
        answer, err = process.communicate()
        assert process.returncode == 130, err
        assert answer == ""
        assert err.splitlines()[-1] == STOPPED
        assert "Traceback" not in err
        assert not list(out.rglob(".partial-*"))
        assert not (out / "results.json").exists()
        if state.exists():  # saved at the very step: less is lost than by a kill
            steps = [json.loads(line)["step"] for line in read_lines(out / "metrics.jsonl")]
            with safe_open(state, framework="pt") as file:
                assert json.loads(file.metadata()["history"])["step"] == max(steps)
            num_saved += 1
    assert num_saved == 1
    process = start(out, set_options)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert_same_as_uninterrupted(out, tiny_run)


def test_what_a_killed_process_left_half_written_is_cleared_away(
    tiny_run: Path, tiny_copy: Path, tiny_overrides: list[str]
) -> None:
    shard = tiny_copy / "proposals" / "base" / "test" / "shard-00001.arrow"
    shard.with_name(f".partial-{shard.name}").write_bytes(shard.read_bytes()[:100])
    shard.unlink()
    shard.with_name("manifest.json").unlink()
    (tiny_copy / "blocks" / ".partial-old.arrow").write_bytes(b"")  # that nothing writes again
    energy = tiny_copy / "energies" / "unit"
    energy.rename(energy.with_name(".partial-unit"))
    (tiny_copy / "results.json").unlink()
    with (tiny_copy / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"stage": "train-energy", "model": "unit", "st')
    recipe = load_recipe("tiny", tiny_overrides)
    with open_run(tiny_copy, recipe) as run_dir:
        run_all(recipe, run_dir)
    assert shards(tiny_copy) == shards(tiny_run)
    assert (tiny_copy / "results.json").read_bytes() == (tiny_run / "results.json").read_bytes()
    assert not list(tiny_copy.rglob(".partial-*"))
    assert sorted(read_lines(tiny_copy / "metrics.jsonl")) == sorted(
        read_lines(tiny_run / "metrics.jsonl")
    )
