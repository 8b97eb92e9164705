"""Files written whole or not at all, with checksums, manifest last.

A file appears under its name only when all of it is on disk (temporary name, fsync, rename). A
folder that belongs together (a checkpoint, a set of shards) gets a `manifest.json` last: its
existence means the folder is complete, and its checksums tell a truncated or altered file from a
good one.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from residual_ebm.errors import UserError

MANIFEST = "manifest.json"
_TEMPORARY = ".partial-"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into one line for a person.

    Compiled writers (safetensors) report the system's error number inside the text only.
    """
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        full = number in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)
        if full:
            remedy = "the disk is full; free some space and run the same command again"
        elif number in (errno.EACCES, errno.EROFS, errno.EPERM):
            remedy = "cannot be written; choose another --out or change its permissions"
        else:
            raise
        raise UserError("file", str(path), remedy) from None


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f"{_TEMPORARY}{path.name}")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path, *, has: str | None = None) -> Any:
    """The value of a JSON file of ours; `has` is a key without which it is not the right one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            "file", str(path), "is missing; run the stage that makes it, or all with `rebm run`"
        ) from None
    except ValueError:
        raise UserError("file", str(path), "is not valid JSON; delete it and run again") from None
    if has is not None and not (isinstance(value, dict) and has in value):
        raise UserError("file", str(path), f"has no {has}; delete it and run again")
    return value


@contextmanager
def new_folder(path: Path, info: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Fill a folder under a temporary name; it appears, with its manifest, only when complete."""
    temporary = path.with_name(f"{_TEMPORARY}{path.name}")
    with disk_errors(path):
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            write_manifest(temporary, info or {})
            if path.exists():
                shutil.rmtree(path)
            temporary.replace(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left under a temporary name."""
    for path in sorted(folder.rglob(f"{_TEMPORARY}*"), reverse=True):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def delete_folder(folder: Path) -> None:
    """Delete a folder, if it is there; a kill half way leaves no part of it under its name."""
    if folder.exists():
        leftover = folder.with_name(f"{_TEMPORARY}{folder.name}")
        with disk_errors(folder):
            folder.replace(leftover)
            shutil.rmtree(leftover)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, info: Mapping[str, Any]) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    listing = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": checksum(path)}
        for path in files
    }
    write_json(folder / MANIFEST, {**info, "files": listing})


def is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def check_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete folder, after every file in it was checked."""
    manifest: dict[str, Any] = read_json(folder / MANIFEST, has="files")
    for name, expected in manifest["files"].items():
        path = folder / name
        remedy = f"delete {folder} and run again to make it anew"
        if not path.is_file():
            raise UserError("file", str(path), f"is missing; {remedy}")
        if path.stat().st_size != expected["bytes"]:
            raise UserError("file", str(path), f"is truncated or grown; {remedy}")
        if checksum(path) != expected["sha256"]:
            raise UserError("file", str(path), f"was altered (its checksum differs); {remedy}")
    return manifest


def fingerprint(folder: Path) -> str:
    """One name for the weights and the configuration in a checkpoint folder."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")]):
        digest.update(f"{path.name} {checksum(path)}\n".encode())
    return digest.hexdigest()


def write_table(path: Path, table: pa.Table) -> None:
    """An Arrow stream: the same rows give the same bytes, and `datasets` opens it as it is."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    write_bytes(path, sink.getvalue().to_pybytes())


def read_table(path: Path) -> pa.Table:
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            return reader.read_all()
    except FileNotFoundError:
        raise UserError(
            "file", str(path), "is missing; run the stage that makes it, or all with `rebm run`"
        ) from None
    except (pa.ArrowInvalid, OSError):
        raise UserError(
            "file", str(path), "is not a whole Arrow file; delete its folder and run again"
        ) from None
