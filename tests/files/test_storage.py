"""Files whole or not at all, manifests that tell good from broken, and who owns a run directory."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

from residual_ebm.errors import UserError
from residual_ebm.files import storage
from residual_ebm.files.open_run import open_run
from residual_ebm.files.run_directory import RECIPE, RunDirectory
from residual_ebm.files.storage import (
    MANIFEST,
    check_manifest,
    fingerprint,
    is_complete,
    new_folder,
    read_json,
    read_table,
    remove_leftovers,
    write_bytes,
    write_json,
    write_manifest,
    write_table,
)
from residual_ebm.recipe_file import load_recipe


def everything_in(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def message_of(caught: pytest.ExceptionInfo[UserError]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


class HalfWriter:
    """A file on a disk that fills up half-way through a write."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> "HalfWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        full_disk()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


# Files


def test_file_has_what_was_written(tmp_path: Path) -> None:
    write_bytes(tmp_path / "new" / "file", b"first")
    write_bytes(tmp_path / "new" / "file", b"second")
    assert everything_in(tmp_path) == {"new/file": b"second"}


@pytest.mark.parametrize("old", [None, b"old"])
@pytest.mark.parametrize("call", ["fsync", "write", "replace"])
def test_full_disk_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bytes | None, call: str
) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)
    before = everything_in(tmp_path)
    really_open = Path.open
    if call == "fsync":
        monkeypatch.setattr(os, "fsync", full_disk)
    elif call == "replace":
        monkeypatch.setattr(Path, "replace", full_disk)
    else:
        monkeypatch.setattr(Path, "open", lambda *args: HalfWriter(really_open(*args)))
    with pytest.raises(UserError) as caught:
        write_bytes(path, b"new content")
    monkeypatch.undo()
    assert "the disk is full" in message_of(caught)
    assert str(path) in message_of(caught)
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("exception", [KeyboardInterrupt, RuntimeError])
def test_exception_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exception: type[BaseException]
) -> None:
    def interrupt(_: int) -> None:
        raise exception

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(exception):
        write_bytes(tmp_path / "file", b"new content")
    assert everything_in(tmp_path) == {"file": b"old"}


def test_the_name_appears_after_the_content_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed at any moment leaves no half file under the name."""
    really_sync, seen = os.fsync, []

    def look(descriptor: int) -> None:
        seen.append((os.fstat(descriptor).st_size, (tmp_path / "file").exists()))
        really_sync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    write_bytes(tmp_path / "file", b"content")
    assert seen == [(len(b"content"), False)]


def test_device_without_space(tmp_path: Path) -> None:
    """/dev/full says what a full disk says, from the kernel itself."""
    (tmp_path / ".partial-file").symlink_to("/dev/full")
    with pytest.raises(UserError) as caught:
        write_bytes(tmp_path / "file", b"content")
    assert "the disk is full" in message_of(caught)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_disk_that_is_really_full(small_disk: Path) -> None:
    write_bytes(small_disk / "file", b"old")
    (small_disk / "filler").write_bytes(bytes(900_000))
    before = everything_in(small_disk)
    with pytest.raises(UserError) as caught:
        write_bytes(small_disk / "file", bytes(500_000))
    assert "the disk is full" in message_of(caught)
    assert everything_in(small_disk) == before
    (small_disk / "filler").unlink()
    write_bytes(small_disk / "file", bytes(500_000))


def test_folder_on_a_disk_that_is_really_full(small_disk: Path) -> None:
    """safetensors writes by itself and reports the error in its own way."""
    (small_disk / "filler").write_bytes(bytes(900_000))
    before = everything_in(small_disk)
    with pytest.raises(UserError) as caught, new_folder(small_disk / "model") as temporary:
        save_file({"weight": torch.zeros(200_000)}, temporary / "model.safetensors")
    assert "the disk is full" in message_of(caught)
    assert everything_in(small_disk) == before
    assert not (small_disk / "model").exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_disk_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError) as caught:
        write_bytes(tmp_path / "file", b"content")
    assert "cannot be written" in message_of(caught)


def test_json_round_trip(tmp_path: Path) -> None:
    value = {"name": "é", "numbers": [1, 2.5, None], "nested": {"deep": True}}
    write_json(tmp_path / "file.json", value)
    assert read_json(tmp_path / "file.json") == value


@pytest.mark.parametrize("data", [b"", b'{"half": ', b"\xff\xfe"])
def test_broken_json_is_a_user_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file.json").write_bytes(data)
    with pytest.raises(UserError, match="not valid JSON"):
        read_json(tmp_path / "file.json")


def test_missing_json_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing"):
        read_json(tmp_path / "file.json")


def test_table_round_trip(tmp_path: Path) -> None:
    table = pa.table({"number": [1, 2, 3], "text": ["a", "b", None]})
    write_table(tmp_path / "table.arrow", table)
    assert read_table(tmp_path / "table.arrow").equals(table)


@pytest.mark.parametrize("kept", [0, 1, 100])
def test_broken_table_is_a_user_error(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "table.arrow"
    write_table(path, pa.table({"number": list(range(100))}))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="not a whole Arrow file"):
        read_table(path)


def test_missing_table_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing"):
        read_table(tmp_path / "table.arrow")


# Folders and manifests


def test_folder_appears_when_complete(tmp_path: Path) -> None:
    with new_folder(tmp_path / "model", {"kind": "test"}) as temporary:
        (temporary / "deep").mkdir()
        (temporary / "deep" / "file").write_bytes(b"content")
        assert not (tmp_path / "model").exists()
    assert is_complete(tmp_path / "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    manifest = check_manifest(tmp_path / "model")
    assert manifest["kind"] == "test"
    assert list(manifest["files"]) == ["deep/file"]


@pytest.mark.parametrize("exception", [KeyboardInterrupt, RuntimeError])
def test_failed_folder_leaves_the_old_one(tmp_path: Path, exception: type[BaseException]) -> None:
    with new_folder(tmp_path / "model") as temporary:
        (temporary / "file").write_bytes(b"old")
    before = everything_in(tmp_path)
    with pytest.raises(exception), new_folder(tmp_path / "model") as temporary:  # noqa: PT012
        (temporary / "file").write_bytes(b"new")
        raise exception
    assert everything_in(tmp_path) == before


def test_new_folder_replaces_old_and_forgets_leftovers(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "stale").write_bytes(b"stale")
    (tmp_path / ".partial-model").mkdir()
    (tmp_path / ".partial-model" / "leftover").write_bytes(b"leftover")
    with new_folder(tmp_path / "model") as temporary:
        (temporary / "file").write_bytes(b"new")
    assert sorted(everything_in(tmp_path)) == ["model/file", f"model/{MANIFEST}"]


def test_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the manifest is not there, the folder is not complete, whatever else is."""
    (tmp_path / "file").write_bytes(b"content")
    assert not is_complete(tmp_path)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError):
        write_manifest(tmp_path, {})
    assert not is_complete(tmp_path)
    with pytest.raises(UserError, match="disk is full"), new_folder(tmp_path / "model") as folder:
        (folder / "file").write_bytes(b"content")
    assert everything_in(tmp_path) == {"file": b"content"}
    monkeypatch.undo()
    write_manifest(tmp_path, {})
    assert is_complete(tmp_path)


@pytest.fixture
def complete_folder(tmp_path: Path) -> Path:
    with new_folder(tmp_path / "model") as temporary:
        (temporary / "one").write_bytes(b"one" * 100)
        (temporary / "deep").mkdir()
        (temporary / "deep" / "two").write_bytes(b"two" * 100)
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["one", "deep/two"])
@pytest.mark.parametrize("fault", ["truncated", "grown", "altered", "missing"])
def test_manifest_tells_broken_files(complete_folder: Path, name: str, fault: str) -> None:
    path = complete_folder / name
    data = path.read_bytes()
    if fault == "missing":
        path.unlink()
    else:
        broken = {"truncated": data[:-1], "grown": data + b"x", "altered": b"x" + data[1:]}
        path.write_bytes(broken[fault])
    with pytest.raises(UserError) as caught:
        check_manifest(complete_folder)
    assert fault in message_of(caught)
    assert str(path) in message_of(caught)
    assert f"delete {complete_folder}" in message_of(caught)


def test_manifest_of_a_good_folder(complete_folder: Path) -> None:
    assert set(check_manifest(complete_folder)["files"]) == {"one", "deep/two"}


def test_folder_without_manifest_is_not_complete(complete_folder: Path) -> None:
    (complete_folder / MANIFEST).unlink()
    assert not is_complete(complete_folder)
    with pytest.raises(UserError, match=r"manifest\.json: is missing"):
        check_manifest(complete_folder)


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".partial-file", "deep/.partial-file", "deep/.partial-model/deep/file"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"leftover")
    (tmp_path / "deep" / "partial-file").write_bytes(b"kept")
    (tmp_path / ".hidden").write_bytes(b"kept")
    remove_leftovers(tmp_path)
    assert set(everything_in(tmp_path)) == {"deep/partial-file", ".hidden"}
    assert not (tmp_path / "deep" / ".partial-model").exists()


def checkpoint(folder: Path, weight: float, width: int = 8, shard: str = "model") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.full((4,), weight)}, folder / f"{shard}.safetensors")
    write_json(folder / "config.json", {"hidden_size": width})
    return fingerprint(folder)


def test_fingerprint_is_of_weights_and_configuration(tmp_path: Path) -> None:
    mark = checkpoint(tmp_path / "one", 1.0)
    assert checkpoint(tmp_path / "copy", 1.0) == mark
    assert checkpoint(tmp_path / "weights", 1.0 + 2**-23) != mark
    assert checkpoint(tmp_path / "config", 1.0, width=9) != mark
    assert checkpoint(tmp_path / "one", 1.0, shard="second") != mark
    (tmp_path / "copy" / "training.json").write_text("{}")
    assert fingerprint(tmp_path / "copy") == mark, "how it was trained is not what it is"


# Run directories

RECIPE_OF_RUN = load_recipe("tiny")

HOLDER = """
import sys, time
from pathlib import Path
from residual_ebm.files.open_run import open_run
from residual_ebm.recipe_file import load_recipe
with open_run(Path(sys.argv[1]), load_recipe("tiny")):
    print("open", flush=True)
    time.sleep(600)
"""


def test_run_directory_keeps_its_recipe(tmp_path: Path) -> None:
    with open_run(tmp_path / "deep" / "run", RECIPE_OF_RUN) as run_dir:
        assert run_dir.recipe() == RECIPE_OF_RUN
    with open_run(tmp_path / "deep" / "run", RECIPE_OF_RUN) as run_dir:
        assert run_dir.path == tmp_path / "deep" / "run"


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("seed", "seed"),
        ("energies.bit.training.steps", "energies.bit.training.steps"),
        ("negatives.chunk_size", "negatives.chunk_size"),
    ],
)
def test_another_recipe_is_refused_by_its_key(tmp_path: Path, key: str, shown: str) -> None:
    old, new = (load_recipe("tiny", [f"{key}={value}"]) for value in (7, 8))
    with open_run(tmp_path, old) as run_dir:
        run_dir.blocks.mkdir()
        (run_dir.blocks / "made").touch()
    before = everything_in(tmp_path)
    with pytest.raises(UserError) as caught, open_run(tmp_path, new):
        pass
    assert f"{shown} was 7, now 8" in message_of(caught)
    assert everything_in(tmp_path) == before


def test_recipe_that_a_person_wrote_there_is_left_as_it_is(tmp_path: Path) -> None:
    """`rebm run here/recipe.yaml --out here`: it says the same, and its comments are theirs."""
    written = f"# why I chose this\n{RECIPE_OF_RUN.to_yaml()}"
    (tmp_path / RECIPE).write_text(written)
    with open_run(tmp_path, load_recipe(str(tmp_path / RECIPE))):
        pass
    assert (tmp_path / RECIPE).read_text() == written


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "open\n"
            (run / ".partial-of-the-other").write_bytes(b"being written")
            with pytest.raises(UserError, match="another process"), open_run(run, RECIPE_OF_RUN):
                pass
            assert (run / ".partial-of-the-other").exists(), "not ours to remove"
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
    with open_run(run, RECIPE_OF_RUN):
        assert not (run / ".partial-of-the-other").exists()


def test_lock_is_free_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_run(tmp_path, RECIPE_OF_RUN):
        raise RuntimeError
    with open_run(tmp_path, RECIPE_OF_RUN):
        pass


def test_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    (tmp_path / ".partial-thesis").write_text("precious too")
    with pytest.raises(UserError, match="holds other files"), open_run(tmp_path, RECIPE_OF_RUN):
        pass
    kept = everything_in(tmp_path)
    assert kept["thesis.tex"] == b"precious"
    assert kept[".partial-thesis"] == b"precious too"
    assert RECIPE not in kept


def test_refused_folder_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError), open_run(tmp_path, RECIPE_OF_RUN):
        pass
    assert everything_in(tmp_path) == {"thesis.tex": b"precious"}


def test_run_killed_while_it_wrote_its_recipe_goes_on(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / f".partial-{RECIPE}").write_text("name: ti")
    with open_run(tmp_path, RECIPE_OF_RUN) as run_dir:
        assert run_dir.recipe() == RECIPE_OF_RUN


def test_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match="is a file"), open_run(tmp_path / "run", RECIPE_OF_RUN):
        pass


def test_folder_that_is_no_run_has_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        RunDirectory(tmp_path).recipe()


def metrics_of(run_dir: RunDirectory) -> list[tuple[str, str, int]]:
    entries = map(json.loads, run_dir.metrics.read_text().splitlines())
    return [(entry["stage"], entry["model"], entry["step"]) for entry in entries]


def test_metrics_past_the_last_checkpoint_are_forgotten(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    for step in (10, 20, 30):
        for stage, model in (("lm", "one"), ("lm", "two"), ("energy", "one")):
            run_dir.log_metrics(stage, model, step, {"loss": 1.0})
    run_dir.forget_metrics_after("lm", "one", 20)
    assert metrics_of(run_dir) == [
        *(("lm", "one", 10), ("lm", "two", 10), ("energy", "one", 10)),
        *(("lm", "one", 20), ("lm", "two", 20), ("energy", "one", 20)),
        *(("lm", "two", 30), ("energy", "one", 30)),
    ]


def test_half_written_line_of_a_killed_run_is_forgotten(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    run_dir.log_metrics("lm", "one", 10, {"loss": 1.0})
    with run_dir.metrics.open("a") as file:
        file.write('{"stage": "lm", "mod')
    run_dir.forget_metrics_after("lm", "one", 10)
    run_dir.log_metrics("lm", "one", 20, {"loss": 0.5})
    assert metrics_of(run_dir) == [("lm", "one", 10), ("lm", "one", 20)]


def test_nothing_to_forget(tmp_path: Path) -> None:
    RunDirectory(tmp_path).forget_metrics_after("lm", "one", 0)
    assert everything_in(tmp_path) == {}


def test_metrics_on_a_full_disk(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    run_dir.metrics.symlink_to("/dev/full")
    with pytest.raises(UserError) as caught:
        run_dir.log_metrics("lm", "one", 10, {"loss": 1.0})
    assert "the disk is full" in message_of(caught)


def test_timings_add_up_over_interrupted_runs(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    write_json(tmp_path / "timings.json", {"prepare": 100.0, "train-lm": 5.0})
    with run_dir.timed("prepare"):
        pass
    timings = read_json(tmp_path / "timings.json")
    assert 100 <= timings["prepare"] < 101
    assert timings["train-lm"] == 5


def test_a_deleted_folder_is_gone_at_once_or_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "states"
    storage.delete_folder(folder)  # which is not there
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("x")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_: None)  # killed half way
        storage.delete_folder(folder)
    assert not folder.exists()
    storage.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []
