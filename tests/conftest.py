"""What the tests of the whole pipeline share: a small finished run, and the command line."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from residual_ebm.bench.setting import Setting

# Before torch and the hub's libraries are imported, here and in the processes that tests start: the
# tests need no network, and models this small are slower on two threads.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
# Tests that run in a shell's background ignore Ctrl-C, and so would what they start; some press it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_TRAINING = {
    "language_models.base": {"steps": 40, "validate_every": 20, "checkpoint_every": 10},
    "encoders.encoder": {"steps": 20, "validate_every": 10, "checkpoint_every": 10},
    "energies.unit": {"steps": 20, "validate_every": 10, "checkpoint_every": 5},
    "energies.bit": {"steps": 20, "validate_every": 10, "checkpoint_every": 5},
    "energies.heat": {"steps": 20, "validate_every": 10, "checkpoint_every": 5},
}
_SIZES = {
    "corpus.num_generated": 300,
    "negatives.num_prefixes": 96,
    "negatives.num_validation_prefixes": 24,
    "negatives.samples_per_prefix": 2,
    "negatives.chunk_size": 64,
    "negatives.chunks_per_shard": 1,
    "proposals.num_validation_prefixes": 16,
    "proposals.num_test_prefixes": 24,
    "proposals.num_samples": 32,
    "proposals.chunk_size": 128,
    "proposals.chunks_per_shard": 2,
    "evaluation.bootstrap_resamples": 200,
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_overrides() -> list[str]:
    """What makes `tiny` run in seconds: the same models and stages, few steps and prefixes."""
    overrides = [f"{key}={value}" for key, value in _SIZES.items()]
    for place, training in _TRAINING.items():
        overrides += [f"{place}.training.{key}={value}" for key, value in training.items()]
    return overrides


@pytest.fixture(scope="session")
def set_options(tiny_overrides: list[str]) -> list[str]:
    """The same as arguments of the command line."""
    return [part for override in tiny_overrides for part in ("--set", override)]


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tiny_overrides: list[str]) -> Path:
    """A finished run of the shrunk `tiny` recipe; to be read, and copied by tests that alter it."""
    from residual_ebm.files.open_run import open_run
    from residual_ebm.recipe_file import load_recipe
    from residual_ebm.report.report_files import write_report
    from residual_ebm.stages.pipeline import run_all

    folder = tmp_path_factory.mktemp("tiny") / "run"
    recipe = load_recipe("tiny", tiny_overrides)
    with open_run(folder, recipe) as run_dir:
        run_all(recipe, run_dir)
    write_report([folder], None, "html", None)
    return folder


@pytest.fixture
def tiny_copy(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, for this test to alter."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


@pytest.fixture
def rebm(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: exit code, standard output, standard error."""
    from residual_ebm.cli import main

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:  # argparse leaves this way
            code = exit_.code if isinstance(exit_.code, int) else 1
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a file system with the given options; root alone can."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            pytest.skip(f"cannot mount: {error}")
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.strip()}")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def small_setting(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> "Setting":
    """Models of the tiny run and a text, for benchmarks that take a second."""
    from residual_ebm.bench.setting import Setting

    text = tmp_path_factory.mktemp("bench") / "text.txt"
    text.write_text("the cat sees a dog and the dog sees the cat . " * 200)
    return Setting(
        model=str(tiny_run / "language_models" / "base"),
        encoder=str(tiny_run / "encoders" / "encoder"),
        text=str(text),
        precision="float32",
        threads=1,
        prefix_length=12,
        num_tokens=4,
        hidden_size=16,
        vocabulary=50,
    )
