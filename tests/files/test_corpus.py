"""Sources to documents, and documents to splits."""

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from residual_ebm.errors import UserError
from residual_ebm.files.corpus import (
    Document,
    corpus_fingerprint,
    read_documents,
    read_given_splits,
    split_documents,
)
from residual_ebm.files.grammar import generate_documents


def error_of(path: Path | str, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        read_documents(str(path), **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_bytes(b"  Dear all,\r\nold\rand new \n\n\t\n")
    assert read_documents(str(path)) == ([Document("letter.txt", "  Dear all,\nold\nand new")], [])


def test_encodings_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "letters.txt"
    path.write_bytes("café".encode("latin-1"))
    documents, notes = read_documents(str(path))
    assert documents == [Document("letters.txt", "café")]
    assert notes == ["letters.txt: not UTF-8, read as Windows-1252"]


def test_rows_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('id,body\n1,"a\nb"\n2,  \n3,c\n')
    documents, notes = read_documents(str(path), text_column="body")
    assert documents == [Document("rows.csv#1", "a\nb"), Document("rows.csv#3", "c")]
    assert notes == ["1 empty document skipped"]


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "deep" / "one.txt").write_text("deep one")
    (tmp_path / "b" / "rows.jsonl").write_text('{"text": "r1"}\n{"text": "r2"}\n')
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.txt").write_bytes("à".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    os.mkfifo(tmp_path / "pipe.txt")
    documents, notes = read_documents(str(tmp_path))
    assert documents == [
        Document("a.md", "first"),
        Document("b/deep/one.txt", "deep one"),
        Document("b/rows.jsonl#1", "r1"),
        Document("b/rows.jsonl#2", "r2"),
        Document("c.txt", "à"),
    ]
    assert len(notes) == 3
    assert "c.txt: not UTF-8" in notes[0]
    assert notes[1].startswith("image.png: skipped, it looks like a binary file")
    assert notes[2] == "2 empty documents skipped"
    assert read_documents(str(tmp_path)).documents == documents
    assert read_documents(str(tmp_path), max_documents=3).documents == documents[:3]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_can_be_stored_whatever_the_file_system_holds(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("a")
    [document] = read_documents(str(tmp_path)).documents
    assert document.name.encode() == rb"caf\xe9.txt"


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("a")
    assert read_documents("~/a.txt").documents == [Document("a.txt", "a")]


@pytest.mark.parametrize("name", ["nowhere.txt", "a\nb", "x" * 300, "nul\0"])
def test_missing_path(tmp_path: Path, name: str) -> None:
    error = error_of(tmp_path / name)
    assert error.field == "corpus.path"
    assert "no such file" in error.remedy


def test_empty_path_is_not_the_current_folder() -> None:
    assert "no such file" in error_of("").remedy


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", ""), ("a.txt", " \n"), ("a.csv", ""), ("a.csv", "text\n"), ("a.jsonl", "\n")],
)
def test_file_without_text(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    error = error_of(tmp_path / name)
    assert (error.field, error.value) == ("corpus.path", str(tmp_path / name))
    assert "holds no text" in error.remedy


@pytest.mark.parametrize(
    ("name", "content"),
    [("meta.csv", "a,b\n1,2\n"), ("meta.json", "{"), ("meta.jsonl", '{"text": "ok"}\n{"a": 1}')],
)
def test_a_table_beside_texts_is_left_out(tmp_path: Path, name: str, content: str) -> None:
    """It is about the texts, most likely; alone, it is meant to hold them."""
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError):
        read_documents(str(tmp_path))
    (tmp_path / "a.txt").write_text("words")
    corpus = read_documents(str(tmp_path))
    assert corpus.documents == [("a.txt", "words")]
    (note,) = corpus.notes
    assert note.startswith(f"{name}: skipped, corpus.")


def test_a_fingerprint_tells_another_text(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("words")
    seen = [corpus_fingerprint(str(folder))]
    assert corpus_fingerprint(f"{folder}/") == seen[0]
    (folder / "b.txt").write_text("")
    seen.append(corpus_fingerprint(str(folder)))
    (folder / "b.txt").write_text("more")
    seen.append(corpus_fingerprint(str(folder)))
    (folder / "b.txt").rename(folder / "c.txt")
    seen.append(corpus_fingerprint(str(folder)))
    seen.append(corpus_fingerprint(str(folder / "a.txt")))
    assert len(set(seen)) == len(seen)
    assert None not in seen
    for elsewhere in ("asset:sotu", "hf:a/b", "grammar:small", str(tmp_path / "gone")):
        assert corpus_fingerprint(elsewhere) is None


def test_folder_without_text_says_what_was_skipped(tmp_path: Path) -> None:
    assert "holds no text" in error_of(tmp_path).remedy
    for number in range(9):
        (tmp_path / f"{number}.bin").write_bytes(b"\0")
    remedy = error_of(tmp_path).remedy
    assert "holds no text" in remedy
    assert "0.bin: skipped" in remedy
    assert "8.bin" not in remedy


def test_binary_file_named_directly(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    error = error_of(path)
    assert (error.field, error.value) == ("corpus.path", str(path))
    assert "looks like a binary file" in error.remedy


def test_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    error = error_of(tmp_path)
    assert (error.field, error.value) == ("corpus.path", str(tmp_path))
    assert "Permission denied" in error.remedy


def test_grammar() -> None:
    documents, notes = read_documents("grammar:small", seed=3, num_generated=4)
    assert [document.text for document in documents] == generate_documents("small", 4, seed=3)
    assert [document.name for document in documents] == [f"grammar:small#{i}" for i in range(1, 5)]
    assert notes == []


def test_grammar_errors() -> None:
    error = error_of("grammar:big", num_generated=4)
    assert (error.field, error.value) == ("corpus.path", "grammar:big")
    assert error_of("grammar:small").field == "corpus.num_generated"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A hub with one dataset; the list is what was asked of it."""
    calls: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        calls.append((name, config, split, streaming))
        rows = datasets.Dataset.from_dict({"id": [1, 2, 3], "text": ["a\r\nb ", None, "c"]})
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("hf:wikitext", ("wikitext", None, "train")),
        ("hf:Salesforce/wikitext", ("Salesforce/wikitext", None, "train")),
        ("hf:Salesforce/wikitext/raw-2", ("Salesforce/wikitext", "raw-2", "train")),
        ("hf:Salesforce/wikitext/raw-2:test", ("Salesforce/wikitext", "raw-2", "test")),
        ("hf:wikitext:train[:10%]", ("wikitext", None, "train[:10%]")),
    ],
)
def test_hub_paths(hub: list[tuple[Any, ...]], path: str, asked: tuple[Any, ...]) -> None:
    documents, notes = read_documents(path)
    assert hub == [(*asked, False)]
    name = path if path.count(":") > 1 else f"{path}:train"
    assert documents == [Document(f"{name}#1", "a\nb"), Document(f"{name}#3", "c")]
    assert notes == ["1 empty document skipped"]


def test_a_few_documents_of_the_hub_are_streamed(hub: list[tuple[Any, ...]]) -> None:
    documents = read_documents("hf:wikitext", max_documents=1).documents
    assert documents == [Document("hf:wikitext:train#1", "a\nb")]
    read_documents("hf:wikitext:train[:2]", max_documents=1)
    assert [streaming for *_, streaming in hub] == [True, False]


@pytest.mark.parametrize("max_documents", [None, 2], ids=["whole", "streamed"])
@pytest.mark.usefixtures("hub")
def test_hub_columns(max_documents: int | None) -> None:
    error = error_of("hf:wikitext", text_column="txt", max_documents=max_documents)
    assert (error.field, error.value) == ("corpus.text_column", "txt")
    assert "id, text" in error.remedy
    assert "did you mean text?" in error.remedy
    assert "int" in error_of("hf:wikitext", text_column="id", max_documents=max_documents).remedy


@pytest.mark.parametrize("path", ["hf:", "hf:/name", "hf:a/b/c/d", "hf:owner/", "hf::train"])
def test_hub_path_that_cannot_be_read(hub: list[tuple[Any, ...]], path: str) -> None:
    assert "hf:OWNER/NAME/CONFIG" in error_of(path).remedy
    assert hub == []


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'x/y' on the Hub (OfflineModeIsEnabled)"),
        datasets.exceptions.DatasetNotFoundError("Dataset 'x/y' doesn't exist on the Hub\nmore"),
        FileNotFoundError("Couldn't find any data file"),
        ValueError("BuilderConfig 'z' not found. Available: ['a']"),
        RuntimeError("Dataset scripts are no longer supported, but found y.py"),
        Exception(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_hub_failures_are_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    shown = error_of("hf:x/y")
    assert (shown.field, shown.value) == ("corpus.path", "hf:x/y")
    assert type(error).__name__ in shown.remedy
    assert str(error).split("\n")[0] in shown.remedy
    assert "more" not in shown.remedy


FRACTIONS = {"train": 0.7, "energy": 0.1, "validation": 0.1, "test": 0.1}


@given(
    num_documents=st.integers(0, 200),
    weights=st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any),
    seed=st.integers(0, 3),
)
def test_split_is_disjoint_complete_and_near_its_fractions(
    num_documents: int, weights: list[int], seed: int
) -> None:
    fractions = {str(i): weight / sum(weights) for i, weight in enumerate(weights)}
    num_wanted = sum(weight > 0 for weight in weights)
    if num_documents < num_wanted:
        with pytest.raises(UserError, match="too few"):
            split_documents(num_documents, fractions, seed)
        return
    splits = split_documents(num_documents, fractions, seed)
    assert list(splits) == list(fractions)
    assert sorted(itertools.chain(*splits.values())) == list(range(num_documents))
    for name, fraction in fractions.items():
        assert splits[name] == sorted(splits[name])
        assert (len(splits[name]) > 0) == (fraction > 0)
        # Largest remainder stays within one of the quota; a gift of one document may be paid by
        # another split, once for each other split.
        quota = num_documents * fraction
        assert quota - num_wanted - 1e-9 < len(splits[name]) < quota + 1 + 1e-9


def test_split_sizes() -> None:
    sizes = {name: len(split) for name, split in split_documents(10, FRACTIONS, 0).items()}
    assert sizes == {"train": 7, "energy": 1, "validation": 1, "test": 1}
    sizes = {name: len(split) for name, split in split_documents(4, FRACTIONS, 0).items()}
    assert sizes == dict.fromkeys(FRACTIONS, 1)
    # Largest remainder: 3.5, 2.1, 1.4 of seven.
    sizes = {k: len(v) for k, v in split_documents(7, {"a": 0.5, "b": 0.3, "c": 0.2}, 0).items()}
    assert sizes == {"a": 4, "b": 2, "c": 1}


def test_split_depends_on_the_seed_only() -> None:
    assert split_documents(100, FRACTIONS, 5) == split_documents(100, FRACTIONS, 5)
    assert split_documents(100, FRACTIONS, 5) != split_documents(100, FRACTIONS, 6)
    # A split by position in the corpus would put one author in one split.
    assert split_documents(100, FRACTIONS, 5)["test"] != list(range(90, 100))


def test_split_of_a_million_survives_fractions_that_are_a_little_off() -> None:
    assert len(split_documents(1_200_000, {"train": 1 - 9e-7}, 0)["train"]) == 1_200_000


def test_too_few_documents() -> None:
    with pytest.raises(UserError, match="too few") as caught:
        split_documents(3, FRACTIONS, 0)
    assert caught.value.field == "corpus.path"
    assert "train, energy, validation, test" in caught.value.remedy


# Splits that come with the corpus


def given_error_of(path: Path | str, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        read_given_splits(str(path), **options)
    assert "\n" not in str(caught.value)
    return caught.value


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")


def test_the_first_part_of_a_path_names_its_split(tmp_path: Path) -> None:
    write_files(tmp_path, "train/a.txt", "train/test/b.txt", "dev/c.txt", "Test.v2.txt")
    write_files(tmp_path, "val/d.txt", "valid.txt", ".hidden/e.txt")
    (tmp_path / "energy.jsonl").write_text('{"text": "r1"}\n{"text": " "}\n{"text": "r3"}\n')
    splits = read_given_splits(str(tmp_path))
    assert {split: [name for name, _ in corpus.documents] for split, corpus in splits.items()} == {
        "train": ["train/a.txt", "train/test/b.txt"],
        "energy": ["energy.jsonl#1", "energy.jsonl#3"],
        "validation": ["dev/c.txt", "val/d.txt", "valid.txt"],
        "test": ["Test.v2.txt"],
    }
    assert splits["train"].documents[1].text == "text of train/test/b.txt"
    assert splits["energy"].notes == ["1 empty document skipped"]
    assert splits["train"].notes == []


def test_max_documents_is_for_each_given_split(tmp_path: Path) -> None:
    write_files(tmp_path, *(f"{split}/{i}" for split in ("train", "dev", "test") for i in range(3)))
    splits = read_given_splits(str(tmp_path), max_documents=2)
    assert list(splits) == ["train", "validation", "test"]
    assert [len(corpus.documents) for corpus in splits.values()] == [2, 2, 2]


@pytest.mark.parametrize("stray", ["README.md", "training/a.txt", "train.old/a.txt"])
def test_a_file_in_no_split_is_named(tmp_path: Path, stray: str) -> None:
    write_files(tmp_path, "train.txt", "validation.txt", "test.txt", stray)
    error = given_error_of(tmp_path)
    assert (error.field, error.value) == ("corpus.path", str(tmp_path / stray))
    assert "move it below train, validation, test or energy" in error.remedy


@pytest.mark.parametrize("missing", ["train", "validation", "test"])
@pytest.mark.parametrize("empty", [True, False])
def test_a_needed_split_without_text(tmp_path: Path, missing: str, empty: bool) -> None:
    write_files(tmp_path, *({"train.txt", "validation.txt", "test.txt"} - {f"{missing}.txt"}))
    if empty:
        (tmp_path / f"{missing}.txt").write_text(" \n")
    error = given_error_of(tmp_path)
    assert (error.field, error.value) == ("corpus.path", str(tmp_path))
    assert f"no text for {missing}" in error.remedy


def test_the_given_splits_of_the_hub(hub: list[tuple[Any, ...]]) -> None:
    splits = read_given_splits("hf:Salesforce/wikitext/raw-2", max_documents=1)
    asked = [("Salesforce/wikitext", "raw-2", split, True) for split in splits]
    assert hub == asked
    for split in ("train", "validation", "test"):
        name = f"hf:Salesforce/wikitext/raw-2:{split}#1"
        assert splits[split].documents == [Document(name, "a\nb")]


def test_one_split_of_the_hub_has_no_given_splits(hub: list[tuple[Any, ...]]) -> None:
    error = given_error_of("hf:wikitext:train")
    assert (error.field, error.value) == ("corpus.path", "hf:wikitext:train")
    assert "leave out the colon" in error.remedy
    assert hub == []


def test_what_has_no_split_of_its_own(tmp_path: Path) -> None:
    write_files(tmp_path, "train.txt")
    for path in ("grammar:small", str(tmp_path / "train.txt")):
        error = given_error_of(path)
        assert (error.field, error.value) == ("corpus.split", "given")
        assert path in error.remedy
        assert "give shares" in error.remedy
    assert "no such file" in given_error_of(tmp_path / "nowhere").remedy
