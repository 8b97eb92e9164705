"""Encodings and tables: each file's texts come out as written, or an error names the place."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from residual_ebm.errors import UserError
from residual_ebm.files.text_files import NotTextError, decode, read_texts


def texts_of(path: Path, text_column: str = "text") -> list[str]:
    return [text for _, text in read_texts(path, text_column).texts]


def error_of(path: Path, text_column: str = "text") -> UserError:
    with pytest.raises(UserError) as caught:
        texts_of(path, text_column)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("data", "text", "is_noted"),
    [
        ("naïve café – 日本".encode(), "naïve café – 日本", False),
        ("naïve".encode("utf-8-sig"), "naïve", False),
        ("un café à Orléans".encode("latin-1"), "un café à Orléans", True),
        ("“quoted” – 5 €".encode("cp1252"), "“quoted” – 5 €", True),
        (b"", "", False),
        (b"\x1b[1mbold\x1b[0m", "\x1b[1mbold\x1b[0m", False),
    ],
    ids=["utf-8", "bom", "latin-1", "windows-1252", "empty", "escape"],
)
def test_decode(data: bytes, text: str, is_noted: bool) -> None:
    decoded, note = decode(data)
    assert decoded == text
    assert (note == "not UTF-8, read as Windows-1252") == is_noted
    assert (note is None) == (not is_noted)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"text\0with NUL", "binary"),
        (gzip.compress(bytes(range(1, 255)) * 9, mtime=0).replace(b"\0", b"\1"), "binary"),
        (b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n1 0 obj", "binary"),
        ("Grüße".encode("utf-16"), "UTF-16"),
        ("viele Grüße aus Köln, übermorgen".encode().replace("ö".encode(), b"\xc3"), "damaged.*19"),
        (b"caf\x81", "neither"),
    ],
    ids=["nul", "no nul", "pdf", "utf-16", "damaged utf-8", "undefined byte"],
)
def test_what_is_not_text_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(NotTextError, match=reason):
        decode(data)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "noextension"])
def test_other_files_are_one_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert list(read_texts(path, "text").texts) == [(0, '{"text": "a"}\n{"text": "b"}\n')]


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".JSONL"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    texts = ["one\ntwo", "", "line\u2028separator \x85", "ünï"]
    rows = [json.dumps({"id": 1, "text": text}, ensure_ascii=False) for text in texts]
    path.write_text("\r\n".join([*rows[:2], "", *rows[2:], ""]), encoding="utf-8", newline="")
    assert list(read_texts(path, "text").texts) == list(enumerate(texts, start=1))


def test_json_list(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": None}], indent=2))
    assert texts_of(path) == ["a", ""]


@pytest.mark.parametrize(
    ("content", "line"),
    [('{"text": "a"}\n\n{"text": "b"\n', "line 3"), ('[\n {"text": "a"},\n {"text"}\n]', "line 3")],
    ids=["lines", "list"],
)
def test_broken_json_names_the_line(tmp_path: Path, content: str, line: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    error = error_of(path)
    assert (error.field, error.value) == ("corpus.path", str(path))
    assert line in error.remedy


def test_json_value_that_is_no_object(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n"b"\n')
    assert "line 2" in error_of(path).remedy


def test_json_lines_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\nbroken\n')
    assert next(iter(read_texts(path, "text").texts)) == (1, "a")


@pytest.mark.parametrize("delimiter", [",", "\t"], ids=["csv", "tsv"])
def test_csv(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / f"rows.{'csv' if delimiter == ',' else 'tsv'}"
    texts = ["two\nlines, and\ta tab", 'with "quotes"', "", "x" * 200_000]
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["text", "id"])
        writer.writerows([text, number] for number, text in enumerate(texts))
    limit = csv.field_size_limit()
    assert list(read_texts(path, "text").texts) == list(enumerate(texts, start=1))
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("text\nfirst\nhello, world\n", "line 3 has more cells"),
        ('text\n"never closed\n', "broken table"),
    ],
    ids=["unquoted comma", "open quote"],
)
def test_broken_csv_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content)
    error = error_of(path)
    assert (error.field, error.value) == ("corpus.path", str(path))
    assert reason in error.remedy


def test_csv_in_windows_1252_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("text\ncafé\n".encode("cp1252"))
    texts, note = read_texts(path, "text")
    assert list(texts) == [(1, "café")]
    assert note
    assert "Windows-1252" in note


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"id": [1, 2, 3], "text": ["a\nb", None, "ü"]})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    assert list(read_texts(path, "text").texts) == [(1, "a\nb"), (2, ""), (3, "ü")]
    assert list(tmp_path.iterdir()) == [path]  # nothing is cached beside the user's file


@pytest.mark.parametrize("data", [b"", b"PAR1 but no more"])
def test_broken_parquet(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(data)
    error = error_of(path)
    assert (error.field, error.value) == ("corpus.path", str(path))


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_missing_column_lists_columns_and_suggests(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text('{"id": 1, "texts": "a"}\n')
    elif suffix == "csv":
        path.write_text("id,texts\n1,a\n")
    else:
        pyarrow.parquet.write_table(pyarrow.table({"id": [1], "texts": ["a"]}), path)
    error = error_of(path)
    assert (error.field, error.value) == ("corpus.text_column", "text")
    assert "id, texts" in error.remedy
    assert "did you mean texts?" in error.remedy
    assert "did you mean" not in error_of(path, "zzz").remedy
    assert texts_of(path, "texts") == ["a"]


@pytest.mark.parametrize("value", ["7", '["a"]', '"\\ud800"'], ids=["number", "list", "surrogate"])
def test_values_that_are_not_text_name_the_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "a"}}\n{{"text": {value}}}\n')
    error = error_of(path)
    assert error.field == "corpus.text_column"
    assert "line 2" in error.remedy


def test_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("secret")

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # chmod would not stop a test run by root
    error = error_of(path)
    assert (error.field, error.value) == ("corpus.path", str(path))
    assert "Permission denied" in error.remedy
