"""Faults of the user: one line with field, value and remedy, exit code 2, nothing half-written."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from residual_ebm.config import GIVEN, Recipe
from residual_ebm.files.blocks import read_documents_ids
from residual_ebm.files.corpus import split_documents
from residual_ebm.files.open_run import open_run
from residual_ebm.models import training
from residual_ebm.randomness import derive_seed
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages import negatives, prepare

Rebm = Callable[..., tuple[int, str, str]]

# Written anew by every call, or growing by nature.
# The report shows the timings.
_NOT_RESULTS = {".lock", "timings.json", "metrics.jsonl", "report.html"}
_PROMPT = "the small queen sees a book"


def fault_of(code: int, out: str, err: str) -> str:
    """The one line for a person, after the progress of the stages before."""
    assert code == 2, err
    assert out == ""
    assert "Traceback" not in err
    faults = [line for line in err.splitlines() if line.startswith("rebm: ")]
    assert len(faults) == 1, err
    assert err.endswith(faults[0] + "\n")
    return faults[0]


def assert_fault(answer: tuple[int, str, str], field: str, value: object, remedy: str) -> None:
    fault = fault_of(*answer)
    assert fault.startswith(f"rebm: {field} = "), fault
    assert str(value) in fault
    assert remedy in fault


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run that its recipe determines."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.name not in _NOT_RESULTS and "tensorboard" not in path.parts
    }


def assert_nothing_half_written(folder: Path) -> None:
    assert not list(folder.rglob(".partial-*"))


# Recipes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "field", "value", "remedy"),
    [
        ("proposals.num_sample=64", "proposals.num_sample", 64, "did you mean num_samples?"),
        ("sede=1", "sede", 1, "did you mean seed?"),
        ("energies.unit.trainig.steps=1", "energies.unit.trainig", "", "did you mean training?"),
        ("corpus=my_texts/", "corpus", "my_texts/", "is a section with keys of its own"),
        ("seed=one", "seed", "one", "valid integer"),
        ("threads=1.5", "threads", 1.5, "valid integer"),
        ("proposals.num_samples=1", "proposals.num_samples", 1, "greater than or equal to 8"),
        ("negatives.num_prefixes=0", "negatives.num_prefixes", 0, "greater than or equal to 1"),
        ("device=gpu", "device", "gpu", "'auto', 'cpu' or 'cuda'"),
        ("block.length=24", "block.length", 24, "leaves no continuation"),
        ("corpus.split.test=0.5", "corpus.split", "1.3", "must add up to 1"),
        ("corpus.split=givn", "corpus.split", "givn", "write given, or shares"),
        ("corpus.split=[1]", "corpus.split", "{...}", "write given, or shares"),
        ("corpus.split.tset=0.1", "corpus.split.tset", 0.1, "did you mean test?"),
        ("corpus.split.test=much", "corpus.split.test", "much", "valid number"),
        ("corpus.split={train: 1}", "corpus.split.validation", "(missing)", "required"),
        ("name=a/b", "name", "a/b", "names a folder"),
        ("energies.bit.source=encoder:big", "energies.bit.source", "big", "which has encoder"),
        ("energies.unit.source=encoder:encoder", "energies.unit.source", "encoder", "lm:NAME"),
        ("energies.heat.language_model=top", "energies.heat.language_model", "top", "has base"),
        ("energies.bit.name=unit", "energies", "unit", "rename one"),
        (
            "language_models.base.training=null",
            "language_models.base.training",
            "missing",
            "add it",
        ),
        ("seed", "--set", "seed", "key.path=value"),
        ("=1", "--set", "=1", "key.path=value"),
        ("energies.best.kind=unit", "--set", "energies.best.kind", "it has unit, bit, heat"),
        ("energies.7.kind=unit", "--set", "energies.7.kind", "it has unit, bit, heat"),
        ("seed.of.all=1", "--set", "seed.of.all", "check the dots"),
        ("seed.x=1", "--set", "seed.x=1", "check its dots"),
        ("seed=[1, 2", "recipe", "--set seed=[1, 2", "not valid YAML"),
    ],
)
def test_a_wrong_override_is_refused_before_anything_is_written(
    rebm: Rebm, tmp_path: Path, override: str, field: str, value: object, remedy: str
) -> None:
    answer = rebm("run", "tiny", "--set", override, "--out", tmp_path / "run")
    assert_fault(answer, field, value, remedy)
    assert not (tmp_path / "run").exists()


def test_an_unknown_recipe_suggests_the_nearest(rebm: Rebm, tmp_path: Path) -> None:
    answer = rebm("run", "tinny", "--out", tmp_path / "run")
    assert_fault(answer, "recipe", "tinny", "did you mean tiny?")
    assert not (tmp_path / "run").exists()


def test_a_recipe_name_of_any_length_is_only_unknown(rebm: Rebm, tmp_path: Path) -> None:
    answer = rebm("run", "x" * 5000, "--out", tmp_path / "run")
    assert_fault(answer, "recipe", "xxx", "unknown recipe")


@pytest.mark.parametrize(
    ("text", "field", "value", "remedy"),
    [
        ("name: tiny\n  seed: [1\n", "recipe", "mine.yaml", "not valid YAML at line 2"),
        ("name: tiny\nseed: \x00\n", "recipe", "mine.yaml", "not valid YAML"),
        ("- name: tiny\n", "recipe", "mine.yaml", "not a mapping"),
        ("", "recipe", "mine.yaml", "not a mapping"),
        ("name: mine\ndescription: 3\n", "description", 3, "valid string"),
        ("name: mine\n", "description", "(missing)", "required; add it"),
    ],
)
def test_a_broken_recipe_file_is_refused_before_anything_is_written(
    rebm: Rebm, tmp_path: Path, text: str, field: str, value: object, remedy: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    answer = rebm("run", file, "--out", tmp_path / "run")
    assert_fault(answer, field, value, remedy)
    assert not (tmp_path / "run").exists()


def test_a_wrong_type_in_a_users_recipe_names_its_place(rebm: Rebm, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = load_recipe("tiny").to_yaml().replace("batch_size: 32", "batch_size: many", 1)
    file.write_text(text)
    answer = rebm("run", file, "--out", tmp_path / "run")
    assert_fault(answer, "language_models.base.training.batch_size", "many", "valid integer")


def test_a_recipe_file_that_is_not_there_or_not_text(rebm: Rebm, tmp_path: Path) -> None:
    answer = rebm("run", tmp_path / "none.yaml")
    assert_fault(answer, "recipe", "none.yaml", "No such file")
    (tmp_path / "photo.yaml").write_bytes(b"\xff\xd8\xff")
    answer = rebm("run", tmp_path / "photo.yaml")
    assert_fault(answer, "recipe", "photo.yaml", "not UTF-8")


# Arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runn", "tiny"], ["runn", "run"]),
        ([], ["COMMAND"]),
        (["run"], ["recipe"]),
        (["run", "tiny", "--sed", "1"], ["--sed"]),
        (["generate", "runs/tiny"], ["--prompt", "--example"]),
        (["generate", "r", "--prompt", "a", "--example", "1"], ["--example", "--prompt"]),
        (["generate", "r", "--prompt", "a", "--top-k", "few"], ["--top-k", "few"]),
        (["generate", "r", "--prompt", "a", "--top-p", "half"], ["--top-p", "half"]),
        (["score", "r", "t", "--num-samples", "1.5"], ["--num-samples", "1.5"]),
        (["gap", "r", "--num-passages", "all"], ["--num-passages", "all"]),
    ],
)
def test_wrong_arguments_are_one_line_that_points_to_help(
    rebm: Rebm, arguments: list[str], words: list[str]
) -> None:
    fault = fault_of(*rebm(*arguments))
    assert all(word in fault for word in words)
    assert "--help`" in fault


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", _PROMPT],
        ["score", "text.txt"],
        ["gap"],
        ["status"],
        ["results"],
    ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_is_not_a_run_is_refused(
    rebm: Rebm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    exists: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text")
    folder = tmp_path / "photos"
    if exists:
        folder.mkdir()
    answer = rebm(command[0], folder, *command[1:])
    assert_fault(answer, "run", folder, "is not a run directory; make one with `rebm run`")
    assert folder.exists() == exists


@pytest.mark.parametrize(
    ("options", "field", "value", "remedy"),
    [
        (["--prompt", ""], "prompt", "''", "is empty; give some text"),
        (["--prompt", " \n\t"], "prompt", "\\n", "is empty; give some text"),
        (["--prompt", "the " * 900], "prompt", "tokens", "the model's context of"),
        (["--prompt", "not UTF-8: \udcff"], "prompt", "not UTF-8", ""),
        (["--prompt", _PROMPT, "--top-k", "0"], "top_k", 0, "must be at least 1"),
        (["--prompt", _PROMPT, "--top-k", "-3"], "top_k", -3, "must be at least 1"),
        (["--prompt", _PROMPT, "--top-p", "0"], "top_p", 0.0, "above 0 and at most 1"),
        (["--prompt", _PROMPT, "--top-p", "1.5"], "top_p", 1.5, "above 0 and at most 1"),
        (["--prompt", _PROMPT, "--top-p", "nan"], "top_p", "nan", "above 0 and at most 1"),
        (["--prompt", _PROMPT, "--num-proposals", "0"], "num_proposals", 0, "at least 1"),
        (["--prompt", _PROMPT, "--num-tokens", "0"], "num_tokens", 0, "scores continuations of"),
        (["--prompt", _PROMPT, "--num-tokens", "999"], "num_tokens", 999, "continuations of 1 to"),
        (["--prompt", _PROMPT, "--energy", "heet"], "energy", "heet", "unit, bit, heat"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    rebm: Rebm, tiny_run: Path, options: list[str], field: str, value: object, remedy: str
) -> None:
    before = contents(tiny_run)
    assert_fault(rebm("generate", tiny_run, *options), field, value, remedy)
    assert contents(tiny_run) == before


@pytest.mark.parametrize("num_samples", [0, 1, 7])
def test_too_few_samples_for_bounds_are_refused(
    rebm: Rebm, tiny_run: Path, tmp_path: Path, num_samples: int
) -> None:
    (tmp_path / "text.txt").write_text(f"{_PROMPT} . " * 10)
    answer = rebm("score", tiny_run, tmp_path / "text.txt", "--num-samples", num_samples)
    assert_fault(answer, "num_samples", num_samples, "ask for 8 or more")


def test_text_that_cannot_be_scored_is_refused(rebm: Rebm, tiny_run: Path, tmp_path: Path) -> None:
    short, photo = tmp_path / "short.txt", tmp_path / "photo.jpg"
    short.write_text(_PROMPT)
    photo.write_bytes(b"\xff\xd8\xff\x00" * 10)
    assert_fault(rebm("score", tiny_run, short), "text", "6 tokens", "give longer text")
    assert_fault(rebm("score", tiny_run, photo), "text", photo, "binary file")
    missing = tmp_path / "none.txt"
    assert_fault(rebm("score", tiny_run, missing), "text", missing, "no such file")


def test_an_unknown_energy_or_number_of_passages_is_refused(rebm: Rebm, tiny_run: Path) -> None:
    answer = rebm("gap", tiny_run, "--energy", "heet")
    assert_fault(answer, "energy", "heet", "unit, bit, heat")
    answer = rebm("gap", tiny_run, "--num-passages", "-1")
    assert_fault(answer, "num_passages", -1, "0 or more")


# Corpora ---------------------------------------------------------------------------------------


def _run(rebm: Rebm, out: Path, set_options: list[str], *overrides: str) -> tuple[int, str, str]:
    more = [part for override in overrides for part in ("--set", override)]
    return rebm("run", "tiny", *set_options, *more, "--out", out)


def _document(words: int) -> str:
    return (
        json.dumps({"text": " ".join(_PROMPT.split()[number % 6] for number in range(words))})
        + "\n"
    )


def _test_document(recipe: Recipe, num_documents: int) -> int:
    """The only document of the test split."""
    assert recipe.corpus.split != GIVEN
    splits = split_documents(
        num_documents,
        {name: share for name, share in recipe.corpus.split.model_dump().items() if share > 0},
        derive_seed(recipe.seed, "split"),
    )
    (number,) = splits["test"]
    return number


@pytest.mark.parametrize(
    ("name", "data", "remedy"),
    [
        ("none.txt", None, "no such file or folder"),
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n\n\t", "holds no text"),
        ("photo.txt", b"\x89PNG\r\n\x1a\n\x00\x00", "looks like a binary file"),
        ("archive.gz", bytes(range(256)) * 8, "looks like a binary file"),
        ("rows.csv", b"name\na\n", "no such column"),
        ("rows.jsonl", b'{"text": "a"\n', "broken JSON on line 1"),
    ],
)
def test_a_corpus_that_holds_no_text_is_refused(
    rebm: Rebm, tmp_path: Path, set_options: list[str], name: str, data: bytes | None, remedy: str
) -> None:
    corpus, out = tmp_path / name, tmp_path / "run"
    if data is not None:
        corpus.write_bytes(data)
    fault = fault_of(*_run(rebm, out, set_options, f"corpus.path={corpus}"))
    assert fault.startswith("rebm: corpus.")
    assert name in fault
    assert remedy in fault
    assert set(contents(out)) <= {"recipe.yaml"}
    assert_nothing_half_written(out)


def test_an_empty_folder_as_corpus_is_refused(
    rebm: Rebm, tmp_path: Path, set_options: list[str]
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    answer = _run(rebm, tmp_path / "run", set_options, f"corpus.path={folder}")
    assert_fault(answer, "corpus.path", folder, "holds no text")


@pytest.mark.parametrize("continuation", ["fixed", "until_end"])
def test_a_corpus_too_small_for_one_test_block_is_refused(
    rebm: Rebm, tmp_path: Path, set_options: list[str], continuation: str
) -> None:
    corpus, out = tmp_path / "few.jsonl", tmp_path / "run"
    overrides = [
        f"corpus.path={corpus}",
        "corpus.split={train: 0.6, validation: 0.3, test: 0.1}",
        f"block={{prefix_length: 10, length: 20, continuation: {continuation}}}",
    ]
    in_test = _test_document(load_recipe("tiny", overrides), 10)
    corpus.write_text(
        # Nine words and the end of the text are the prefix; nothing is left to continue it.
        "".join(_document(9 if number == in_test else 100) for number in range(10))
    )
    answer = _run(rebm, out, set_options, *overrides)
    assert_fault(answer, "corpus.path", corpus, "too small for one test block")
    assert "corpus.split.test" in answer[2]
    assert set(contents(out)) <= {"recipe.yaml"}
    assert_nothing_half_written(out)


def test_a_corpus_with_its_own_split_is_prepared_as_given(
    rebm: Rebm, tmp_path: Path, set_options: list[str]
) -> None:
    corpus, out = tmp_path / "texts", tmp_path / "run"
    corpus.mkdir()
    for number, split in enumerate(("train", "energy", "validation", "test"), start=1):
        (corpus / f"{split}.jsonl").write_text(_document(100) * number)
    given = [f"corpus.path={corpus}", "corpus.split=given"]
    recipe = load_recipe("tiny", [*set_options[1::2], *given])
    with open_run(out, recipe) as run_dir:
        prepare.run(recipe, run_dir)
        sizes = {
            split: len(read_documents_ids(run_dir.blocks / f"documents-{split}.arrow"))
            for split in ("train", "energy", "validation", "test")
        }
        assert sizes == {"train": 1, "energy": 2, "validation": 3, "test": 4}
        assert negatives.source_split(run_dir, "train") == "energy"
        assert negatives.source_split(run_dir, "validation") == "validation"
    (corpus / "test.jsonl").write_text(_document(3))
    fault = fault_of(*_run(rebm, tmp_path / "small", set_options, *given))
    assert "too small for one test block" in fault
    assert "corpus.split.test" not in fault


def test_fewer_documents_than_splits_are_refused(
    rebm: Rebm, tmp_path: Path, set_options: list[str]
) -> None:
    corpus = tmp_path / "one.txt"
    corpus.write_text("a long text " * 1000)
    answer = _run(rebm, tmp_path / "run", set_options, f"corpus.path={corpus}")
    assert_fault(answer, "corpus.path", "1 document", "add documents")


def test_a_mended_recipe_goes_on_where_nothing_was_made_yet(
    rebm: Rebm, tmp_path: Path, set_options: list[str]
) -> None:
    out, empty = tmp_path / "run", tmp_path / "empty.txt"
    empty.write_text("")
    fault_of(*_run(rebm, out, set_options, f"corpus.path={empty}"))
    assert (out / "recipe.yaml").exists()
    code, _, err = rebm("prepare", "tiny", *set_options, "--out", out)
    assert code == 0, err


def test_fewer_threads_than_the_recipe_wants_are_told(
    rebm: Rebm, tmp_path: Path, set_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_THREAD_LIMIT", "2")
    arguments = [*set_options, "--out", str(tmp_path / "run"), "--set", "threads=3"]
    assert rebm("prepare", "tiny", *arguments)[0] == 0
    assert_fault(rebm("train-lm", "tiny", *arguments), "threads", 3, "OMP_THREAD_LIMIT is 2")


def test_text_that_changed_since_the_run_is_told(
    rebm: Rebm, tmp_path: Path, set_options: list[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(6):
        (texts / f"{number}.txt").write_text(f"word{number} and another " * 200)
    prepare = ["prepare", "tiny", *set_options, "--set", f"corpus.path={texts}"]
    prepare += ["--out", str(tmp_path / "run")]
    assert rebm(*prepare)[0] == 0
    assert rebm(*prepare)[0] == 0
    (texts / "new.txt").write_text("word and another " * 200)
    assert_fault(rebm(*prepare), "corpus.path", str(texts), "has changed since")
    shutil.rmtree(texts)  # a run that has its blocks needs its corpus no more
    assert rebm(*prepare)[0] == 0


# Models ----------------------------------------------------------------------------------------


_FEW = ("corpus.num_generated=60", "language_models.base.training.steps=2")


@pytest.mark.parametrize(
    ("override", "field", "value", "remedy"),
    [
        ("hiden_size=8", "hiden_size", 8, "no such setting"),
        ("model_type=lama", "model_type", "lama", "unknown to transformers"),
        ("model_type=3", "model_type", 3, "name a transformers model"),
        ("max_position_embeddings=30", "max_position_embeddings", 30, "raise it"),
        ("hidden_size=abc", "hidden_size", "abc", "int"),
        ("hidden_size=47", "architecture", 47, "multiple"),
        ("vocab_size=7", "vocab_size", 7, "remove it"),
        ("num_attention_heads=0", "num_attention_heads", 0, "at least 1"),
        ("num_hidden_layers=-1", "num_hidden_layers", -1, "at least 1"),
        ("hidden_act=loud", "architecture", "loud", "cannot be built"),
        ("dtype=float99", "architecture", "float99", "cannot be built"),
    ],
)
def test_an_architecture_that_cannot_be_built_is_refused(
    rebm: Rebm,
    tmp_path: Path,
    set_options: list[str],
    override: str,
    field: str,
    value: object,
    remedy: str,
) -> None:
    place = "language_models.base.architecture"
    answer = _run(rebm, tmp_path / "run", set_options, *_FEW, f"{place}.{override}")
    assert_fault(answer, place if field == "architecture" else f"{place}.{field}", value, remedy)
    assert not (tmp_path / "run" / "language_models").exists()
    assert_nothing_half_written(tmp_path / "run")


def test_an_encoder_without_a_masked_language_model_is_refused(
    rebm: Rebm, tmp_path: Path, set_options: list[str]
) -> None:
    architecture = "encoders.encoder.architecture={model_type: llama, hidden_size: 32}"
    answer = _run(rebm, tmp_path / "run", set_options, *_FEW, architecture)
    assert_fault(answer, "encoders.encoder.architecture.model_type", "llama", "use bert")


def test_an_encoder_whose_heads_do_not_fit_says_so(
    rebm: Rebm, tmp_path: Path, set_options: list[str]
) -> None:
    override = "encoders.encoder.architecture.hidden_size=61"
    fault = fault_of(*_run(rebm, tmp_path / "run", set_options, *_FEW, override))
    assert "61" in fault
    assert "has no masked-language model" not in fault


def test_a_head_whose_heads_do_not_fit_is_refused(
    rebm: Rebm, tmp_path: Path, set_options: list[str]
) -> None:
    answer = _run(rebm, tmp_path / "run", set_options, "energies.heat.head.num_heads=7")
    fault = fault_of(*answer)
    assert "head" in fault
    assert "7" in fault


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda_is_refused(rebm: Rebm, tmp_path: Path, set_options: list[str]) -> None:
    answer = _run(rebm, tmp_path / "run", set_options, *_FEW, "device=cuda")
    assert_fault(answer, "device", "cuda", "use auto or cpu")
    assert_nothing_half_written(tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        (
            ["language_models.base.architecture=null", "language_models.base.source=no-one/here"],
            "language_models.base.source",
            "no-one/here",
        ),
        (["tokenizer.source=no-one/here"], "tokenizer.source", "no-one/here"),
        (["corpus.path=hf:no-one/here"], "corpus.path", "hf:no-one/here"),
        (["energies.bit.source=no-one/here"], "energies.bit.source", "no-one/here"),
    ],
)
def test_a_hub_name_out_of_reach_is_refused_with_what_to_check(
    rebm: Rebm,
    tmp_path: Path,
    set_options: list[str],
    overrides: list[str],
    field: str,
    value: str,
) -> None:
    fault = fault_of(*_run(rebm, tmp_path / "run", set_options, *_FEW, *overrides))
    assert fault.startswith(f"rebm: {field} = {value}: ")
    assert "..." not in fault  # the remedy must not be what was cut off
    assert "network" in fault
    assert_nothing_half_written(tmp_path / "run")


def test_a_pretrained_model_with_a_short_context_is_refused(
    rebm: Rebm, tiny_run: Path, tmp_path: Path, set_options: list[str]
) -> None:
    source = tiny_run / "language_models" / "base"
    context = json.loads((source / "config.json").read_text())["max_position_embeddings"]
    answer = _run(
        rebm,
        tmp_path / "run",
        set_options,
        "language_models.base.architecture=null",
        f"language_models.base.source={source}",
        f"tokenizer.source={source}",
        f"encoders.encoder.architecture.max_position_embeddings={context + 10}",
        f"block={{prefix_length: {context}, length: {context + 10}}}",
    )
    fault = fault_of(*answer)
    assert f"context of {context}" in fault
    assert str(context + 10) in fault


@pytest.mark.parametrize("field", ["language_models.base.source", "energies.bit.source"])
def test_a_folder_that_is_not_a_model_is_refused(
    rebm: Rebm, tmp_path: Path, set_options: list[str], field: str
) -> None:
    folder = tmp_path / "no model"
    folder.mkdir()
    (folder / "notes.txt").write_text("not a model")
    scratch = ["language_models.base.architecture=null"] if "language" in field else []
    answer = _run(rebm, tmp_path / "run", set_options, *_FEW, *scratch, f"{field}={folder}")
    fault = fault_of(*answer)
    assert fault.startswith(f"rebm: {field} = {folder}: is not a model folder")
    assert not (tmp_path / "run" / "language_models").exists()
    assert_nothing_half_written(tmp_path / "run")


def test_an_encoder_with_a_short_context_is_refused_before_it_is_trained(
    rebm: Rebm, tiny_run: Path, tmp_path: Path, set_options: list[str]
) -> None:
    encoder = tiny_run / "encoders" / "encoder"
    context = json.loads((encoder / "config.json").read_text())["max_position_embeddings"]
    answer = _run(
        rebm,
        tmp_path / "run",
        set_options,
        f"language_models.base.architecture.max_position_embeddings={context + 10}",
        f"block={{prefix_length: {context}, length: {context + 10}}}",
        f"encoders.encoder.architecture.max_position_embeddings={context + 10}",
        f"energies.bit.source={encoder}",
        "energies.unit.training.steps=1",
    )
    fault = fault_of(*answer)
    assert fault.startswith(f"rebm: energies.bit.source = {encoder}: has a context of {context}")
    assert "lower block.length" in fault
    assert not (tmp_path / "run" / "language_models").exists()  # hours before its turn


def test_more_negatives_than_are_stored_are_refused(
    rebm: Rebm, tmp_path: Path, set_options: list[str]
) -> None:
    place = "energies.unit.negatives_per_positive"
    answer = _run(rebm, tmp_path / "run", set_options, *_FEW, f"{place}=3")
    assert_fault(answer, place, 3, "only 2 negatives are stored")
    assert not (tmp_path / "run" / "energies").exists()


# Run directories -------------------------------------------------------------------------------


def test_a_run_of_another_recipe_is_refused(
    rebm: Rebm, tiny_run: Path, set_options: list[str]
) -> None:
    before = contents(tiny_run)
    answer = _run(rebm, tiny_run, set_options, "seed=7")
    assert_fault(answer, "--out", tiny_run, "another recipe (seed was 0, now 7); name another")
    answer = rebm("evaluate", "tiny", "--out", tiny_run)
    assert_fault(answer, "--out", tiny_run, "corpus.num_generated was 300")
    assert contents(tiny_run) == before


def test_a_run_grows_only_when_asked_and_only_if_it_is_there(
    rebm: Rebm,
    tmp_path: Path,
    tiny_run: Path,
    set_options: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = contents(tiny_run)
    answer = _run(rebm, tiny_run, set_options, "evaluation.num_draws=4")
    assert_fault(answer, "--out", tiny_run, "(evaluation.num_draws was 10, now 4); name another")
    assert "add --grow" in answer[2]
    assert contents(tiny_run) == before
    monkeypatch.chdir(tmp_path)
    answer = rebm("run", "tiny", *set_options, "--grow")
    assert_fault(answer, "run", "runs/tiny", "is not a run directory")
    assert not (tmp_path / "runs").exists()
    # Without --out it is the run of the recipe's name that grows, whatever is set.
    shutil.copytree(tiny_run, tmp_path / "runs" / "tiny")
    more = ("--set", "evaluation.num_draws=4", "--grow", "--json")
    code, out, _ = rebm("run", "tiny", *set_options, *more)
    assert code == 0
    assert json.loads(out)["growth"][0]["changes"] == ["evaluation.num_draws was 10, now 4"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]
    # A run's own recipe makes that run grow, whatever the folder is called.
    shutil.copytree(tiny_run, tmp_path / "mine")
    code, out, _ = rebm("run", "mine/recipe.yaml", *more)
    assert code == 0
    assert json.loads(out)["growth"][0]["changes"] == ["evaluation.num_draws was 10, now 4"]
    assert (tmp_path / "mine" / "growth.json").exists()


@pytest.mark.parametrize("option", [("--out", "runs/mine"), ("--grow", True)])
def test_a_dry_run_has_no_place_and_grows_nothing(
    rebm: Rebm, option: tuple[str, str | bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [str(part) for part in option if part is not True]
    assert_fault(rebm("run", "tiny", "--dry-run", *given), *option, "a dry run makes no run")


def test_a_folder_with_other_files_and_a_file_are_no_place_for_a_run(
    rebm: Rebm, tmp_path: Path
) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mine.txt").write_text("dear")
    answer = rebm("run", "tiny", "--out", tmp_path / "letters")
    assert_fault(answer, "--out", "letters", "holds other files")
    assert contents(tmp_path / "letters") == {"mine.txt": b"dear"}
    file = tmp_path / "letters" / "mine.txt"
    assert_fault(rebm("run", "tiny", "--out", file), "--out", file, "is a file")
    fault = fault_of(*rebm("run", "tiny", "--out", file / "run"))
    assert str(file / "run") in fault


def test_a_run_killed_while_it_wrote_its_recipe_goes_on(
    rebm: Rebm, tmp_path: Path, set_options: list[str]
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / ".lock").touch()
    (out / ".partial-recipe.yaml").write_text("name: ti")
    code, _, err = rebm("prepare", "tiny", *set_options, "--out", out)
    assert code == 0, err


def test_a_run_that_is_not_finished_says_so(rebm: Rebm, tiny_copy: Path) -> None:
    (tiny_copy / "results.json").unlink()
    for command in ("gap", "results"):
        answer = rebm(command, tiny_copy)
        assert_fault(answer, "run", tiny_copy, "not evaluated yet; finish it with `rebm run`")
    shutil.rmtree(tiny_copy / "energies" / "unit")
    answer = rebm("generate", tiny_copy, "--prompt", _PROMPT, "--energy", "unit")
    assert_fault(answer, "run", tiny_copy, "not trained yet; finish the run with `rebm run`")
    shutil.rmtree(tiny_copy / "language_models")
    answer = rebm("generate", tiny_copy, "--prompt", _PROMPT)
    assert_fault(answer, "run", tiny_copy, "not trained yet; finish the run with `rebm run`")


def test_a_run_without_energies_has_no_joint_model(
    rebm: Rebm, tmp_path: Path, set_options: list[str]
) -> None:
    out = tmp_path / "run"
    overrides = ["--set", "energies=[]", "--set", "encoders=[]", "--set", _FEW[0]]
    kept = [option for option in set_options if ".training." not in option and option != "--set"]
    options = [part for option in kept for part in ("--set", option)]
    code, _, err = rebm(
        "run", "tiny", *options, *overrides, "--set", _FEW[1], "--out", out, "--json"
    )
    assert code == 0, err
    answer = rebm("generate", out, "--prompt", _PROMPT)
    assert_fault(answer, "energies", out, "this run has none")
    assert_fault(rebm("gap", out), "energies", out, "this run has none")


def test_an_energy_of_another_language_model_is_refused(
    rebm: Rebm, tiny_copy: Path, tmp_path: Path, set_options: list[str]
) -> None:
    other = tmp_path / "other"
    options = [*set_options, "--set", "seed=1", "--out", other]
    for stage in ("prepare", "train-lm"):
        assert rebm(stage, "tiny", *options)[0] == 0
    shutil.rmtree(tiny_copy / "language_models")
    shutil.copytree(other / "language_models", tiny_copy / "language_models")
    answer = rebm("generate", tiny_copy, "--prompt", _PROMPT, "--energy", "heat")
    folder = tiny_copy / "energies" / "heat"
    assert_fault(answer, "energy", folder, "trained against another language model")
    (tiny_copy / "results.json").unlink()
    answer = rebm("evaluate", "tiny", *set_options, "--out", tiny_copy)
    folder = tiny_copy / "energies" / "unit"
    assert_fault(answer, "energy", folder, "trained against another language model")
    shutil.rmtree(tiny_copy / "energies")
    answer = rebm("train-energy", "tiny", *set_options, "--out", tiny_copy)
    assert_fault(answer, "samples", "negatives", "drawn from another language model")
    assert not (tiny_copy / "results.json").exists()
    assert_nothing_half_written(tiny_copy)


def test_truncated_proposals_are_refused_by_evaluation(
    rebm: Rebm, tiny_copy: Path, set_options: list[str]
) -> None:
    manifest = tiny_copy / "proposals" / "base" / "test" / "manifest.json"
    info = json.loads(manifest.read_text())
    assert info["truncation"] is None
    manifest.write_text(json.dumps({**info, "truncation": {"top_k": 10}}))
    shutil.rmtree(tiny_copy / "log_weights")
    (tiny_copy / "results.json").unlink()
    answer = rebm("evaluate", "tiny", *set_options, "--out", tiny_copy)
    assert_fault(answer, "truncation", "top_k=10", "draw them without top_k and top_p")
    assert not (tiny_copy / "results.json").exists()
    assert_nothing_half_written(tiny_copy)


# Damaged files ---------------------------------------------------------------------------------


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _alter(path: Path) -> None:
    """One bit, in the numbers, where no format would notice."""
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(bytes(data))


# What is damaged, what has to go so that it is read again, and the command that reads it.
_DAMAGES = {
    "blocks": ("blocks/test.arrow", ["results.json"], "evaluate"),
    "tokenizer": ("blocks/tokenizer/tokenizer.json", ["language_models"], "train-lm"),
    "negatives": ("negatives/base/train/shard-00001.arrow", ["energies"], "train-energy"),
    "proposals": (
        "proposals/base/test/shard-00002.arrow",
        ["log_weights/bit", "results.json"],
        "evaluate",
    ),
    "log-weights": ("log_weights/bit/test/shard-00000.arrow", ["results.json"], "evaluate"),
    "language model": ("language_models/base/model.safetensors", [], "generate"),
    "sampling model": ("language_models/base/model.safetensors", ["negatives"], "negatives"),
    "encoder": ("encoders/encoder/model.safetensors", ["energies/bit"], "train-energy"),
    "energy": ("energies/heat/energy_head.safetensors", [], "generate"),
    "backbone": ("energies/bit/model.safetensors", ["results.json"], "evaluate"),
}


@pytest.mark.parametrize("damage", [_truncate, _alter])
@pytest.mark.parametrize("what", _DAMAGES)
def test_a_damaged_file_is_named_and_deleting_its_folder_mends_the_run(
    rebm: Rebm,
    tiny_copy: Path,
    set_options: list[str],
    what: str,
    damage: Callable[[Path], None],
) -> None:
    name, gone, command = _DAMAGES[what]
    before = contents(tiny_copy)
    damage(tiny_copy / name)
    for path in (tiny_copy / entry for entry in gone):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if command == "generate":
        answer = rebm("generate", tiny_copy, "--prompt", _PROMPT, "--energy", "heat")
    else:
        answer = rebm(command, "tiny", *set_options, "--out", tiny_copy)
    found = "is truncated" if damage is _truncate else "was altered"
    assert_fault(answer, "file", tiny_copy / name, found)
    assert_nothing_half_written(tiny_copy)

    if damage is _truncate:
        return
    # The remedy, to the letter.
    folder = answer[2].partition("; delete ")[2].partition(" and run again")[0]
    assert (tiny_copy / name).is_relative_to(folder)
    shutil.rmtree(folder)
    code, _, err = rebm("run", "tiny", *set_options, "--out", tiny_copy)
    assert code == 0, err
    assert contents(tiny_copy) == before


def test_gap_does_not_read_altered_blocks(rebm: Rebm, tiny_copy: Path) -> None:
    _alter(tiny_copy / "blocks" / "test.arrow")
    assert_fault(rebm("gap", tiny_copy), "file", tiny_copy / "blocks" / "test.arrow", "altered")


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_damaged_manifest_or_results_file_is_named(
    rebm: Rebm, tiny_copy: Path, text: str
) -> None:
    manifest = tiny_copy / "energies" / "heat" / "manifest.json"
    manifest.write_text(text)
    fault = fault_of(*rebm("generate", tiny_copy, "--prompt", _PROMPT, "--energy", "heat"))
    assert str(manifest) in fault
    (tiny_copy / "results.json").write_text(text)
    fault = fault_of(*rebm("results", tiny_copy))
    assert str(tiny_copy / "results.json") in fault


@pytest.fixture
def half_trained(
    rebm: Rebm, tiny_copy: Path, set_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A run stopped after the last step of the language model, before the model was saved; an
    earlier step was its best."""
    validate_as_it_is = training._validate

    def validate_worse(
        module: Any, validate: Any, config: Any, history: training.History, *rest: Any
    ) -> None:
        def worse() -> dict[str, float]:
            return {**validate(), "loss": float(history.step)}

        validate_as_it_is(module, worse, config, history, *rest)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("language_models", "encoders", "energies", "negatives", "proposals"):
        shutil.rmtree(tiny_copy / name)
    shutil.rmtree(tiny_copy / "log_weights")
    (tiny_copy / "results.json").unlink()
    (tiny_copy / "metrics.jsonl").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(training, "_validate", validate_worse)
        patch.setattr(training, "_load_best", stop)
        assert rebm("train-lm", "tiny", *set_options, "--out", tiny_copy)[0] == 130
    assert (tiny_copy / "language_models" / "base.training" / "state.safetensors").is_file()
    return tiny_copy


@pytest.mark.parametrize("damage", [_truncate, _alter, Path.unlink])
@pytest.mark.parametrize("file", ["state", "best-*"])
def test_a_damaged_training_state_is_named_and_deleting_it_trains_anew(
    rebm: Rebm,
    half_trained: Path,
    tiny_run: Path,
    set_options: list[str],
    file: str,
    damage: Callable[[Path], None],
) -> None:
    folder = half_trained / "language_models" / "base.training"
    (path,) = folder.glob(f"{file}.safetensors")
    damage(path)
    answer = rebm("train-lm", "tiny", *set_options, "--out", half_trained)
    if not (damage is Path.unlink and file == "state"):  # no state: training starts anew
        assert_fault(answer, "checkpoint", path, f"delete {folder} to train anew")
        assert_nothing_half_written(half_trained)
        shutil.rmtree(folder)
        answer = rebm("train-lm", "tiny", *set_options, "--out", half_trained)
    assert answer[0] == 0, answer[2]
    made = [run / "language_models" / "base" for run in (half_trained, tiny_run)]
    assert contents(made[0]) == contents(made[1])


# The disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["100k", "1m", "3m"])
def test_a_full_disk_is_one_line_and_more_space_is_the_remedy(
    rebm: Rebm,
    tiny_run: Path,
    set_options: list[str],
    small_disk: Callable[[str], Path],
    size: str,
) -> None:
    out = small_disk(f"size={size}") / "run"
    fault = fault_of(*rebm("run", "tiny", *set_options, "--out", out))
    assert str(out) in fault
    assert "the disk is full; free some space and run the same command again" in fault
    assert not list(out.rglob(".partial-*"))
    small_disk("remount,size=64m")
    code, _, err = rebm("run", "tiny", *set_options, "--out", out)
    assert code == 0, err
    assert contents(out) == contents(tiny_run)


@pytest.mark.parametrize(
    ("number", "call"),
    [(errno.ENOSPC, 1), (errno.EDQUOT, 2), (errno.ENOSPC, 10), (errno.ENOSPC, 40)],
)
def test_no_space_at_any_write_leaves_nothing_half_written(
    rebm: Rebm,
    tmp_path: Path,
    set_options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    call: int,
) -> None:
    calls = 0

    def fsync(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr("residual_ebm.files.storage.os.fsync", fsync)
    out = tmp_path / "run"
    fault = fault_of(*rebm("run", "tiny", *set_options, "--out", out))
    assert str(out) in fault
    assert "the disk is full" in fault
    assert_nothing_half_written(out)


def test_a_folder_that_may_not_be_written_is_refused(
    rebm: Rebm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write anywhere
    answer = rebm("run", "tiny", "--out", tmp_path / "run")
    assert_fault(answer, "file", tmp_path / "run", "choose another --out")


# Processes -------------------------------------------------------------------------------------


def _process(*arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "residual_ebm.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_a_second_process_on_the_same_run_is_refused(
    tiny_copy: Path, tiny_overrides: list[str], set_options: list[str]
) -> None:
    recipe: Recipe = load_recipe("tiny", tiny_overrides)
    before = contents(tiny_copy)
    with open_run(tiny_copy, recipe):
        answer = _process("run", "tiny", *set_options, "--out", tiny_copy)
    assert_fault(answer, "--out", tiny_copy, "another process works here; wait for it")
    assert contents(tiny_copy) == before
    with open_run(tiny_copy, recipe):  # whoever held it has let go
        pass


def test_a_real_process_ends_with_code_2_and_one_line(tmp_path: Path) -> None:
    answer = _process("run", "tinny", "--out", tmp_path / "run")
    assert_fault(answer, "recipe", "tinny", "did you mean tiny?")
    assert answer[2].count("\n") == 1
    assert not (tmp_path / "run").exists()


# Benchmarks ------------------------------------------------------------------------------------


def test_a_benchmark_that_is_not_there_is_refused(rebm: Rebm) -> None:
    assert_fault(rebm("bench", "decode", "nonsense"), "benchmark", "nonsense", "there are decode")


def test_a_page_must_be_markdown(rebm: Rebm) -> None:
    assert_fault(rebm("bench", "--page", "page.html"), "--page", "page.html", "ends in .md")


def test_no_rounds_are_refused(rebm: Rebm) -> None:
    assert_fault(rebm("bench", "--repeats", "0"), "--repeats", 0, "must be at least 1")
