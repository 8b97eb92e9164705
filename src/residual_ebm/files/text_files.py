"""One file on disk to texts: what is text and in which encoding, and the rows of tables.

A file is one text, except tables (JSON lines, CSV, TSV, Parquet), where each row's text column is
one. Everything is read directly, with no cache beside the user's files.
"""

import codecs
import csv
import difflib
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet

from residual_ebm.errors import UserError

# Control characters that text does not use. Compressed bytes are these to a tenth.
_CONTROLS = bytes(set(range(1, 32)) - set(b"\t\n\v\f\r\x1a\x1b")) + b"\x7f"
_MAX_SHARE_OF_CONTROLS = 0.01


class NotTextError(Exception):
    """The file is no text this package can read; the message says why and what to do."""


class FileTexts(NamedTuple):
    """Texts of a file by row number (0: the whole file), and what the user should know of it."""

    texts: Iterable[tuple[int, str]]
    note: str | None


def read_texts(path: Path, text_column: str) -> FileTexts:
    """All texts of one file; raises `NotTextError` for a binary file."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            return FileTexts(_parquet_texts(path, text_column), None)
        text, note = decode(path.read_bytes())
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error}); check its permissions"
        raise UserError("corpus.path", str(path), reason) from error
    if suffix in _TABLES:
        return FileTexts(_TABLES[suffix](text, path, text_column), note)
    return FileTexts([(0, text)], note)


def is_table(path: Path) -> bool:
    return path.suffix.lower() in (".parquet", *_TABLES)


def decode(data: bytes) -> tuple[str, str | None]:
    """Text of a file's bytes, and a note if they were not UTF-8."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise NotTextError("looks like UTF-16; save it as UTF-8")
    if b"\0" in data or data.startswith(b"%PDF-"):
        raise NotTextError("looks like a binary file; extract its text to UTF-8 first")
    try:
        return data.decode("utf-8-sig"), None
    except UnicodeDecodeError as error:
        first_bad_byte = error.start
    num_controls = len(data) - len(data.translate(None, _CONTROLS))
    if num_controls > _MAX_SHARE_OF_CONTROLS * len(data):
        raise NotTextError("looks like a binary file; extract its text to UTF-8 first")
    # One damaged byte must not turn a UTF-8 file into Windows-1252 gibberish. In real Windows-1252
    # text hardly any accented letters happen to form a valid UTF-8 sequence.
    lenient = data.decode("utf-8", errors="replace")
    num_broken = lenient.count("\ufffd")
    if len(lenient) - len(lenient.encode("ascii", errors="ignore")) > 2 * num_broken:
        raise NotTextError(f"is UTF-8 with a damaged byte at offset {first_bad_byte}; repair it")
    try:
        return data.decode("cp1252"), "not UTF-8, read as Windows-1252"
    except UnicodeDecodeError:
        raise NotTextError("is neither UTF-8 nor Windows-1252; convert it to UTF-8") from None


def row_text(row: Mapping[str, object], text_column: str, where: str) -> str:
    """The text of one row; a missing value is an empty text."""
    if text_column not in row:
        raise missing_column(text_column, row, where)
    value = row[text_column]
    if value is None:
        return ""
    if not isinstance(value, str):
        remedy = f"holds {type(value).__name__}, not text, in {where}; name a column of text"
        raise UserError("corpus.text_column", text_column, remedy)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        remedy = f"is not valid Unicode in {where} (half a surrogate pair); repair that row"
        raise UserError("corpus.text_column", text_column, remedy) from error
    return value


def missing_column(text_column: str, columns: Iterable[str], where: str) -> UserError:
    columns = list(columns)
    remedy = f"no such column in {where}; it has {', '.join(columns) or 'none'}"
    nearest = difflib.get_close_matches(text_column, columns, n=1)
    if nearest:
        remedy += f"; did you mean {nearest[0]}?"
    else:
        remedy += "; name the one that holds the text"
    return UserError("corpus.text_column", text_column, remedy)


def _json_texts(text: str, path: Path, text_column: str) -> Iterator[tuple[int, str]]:
    for number, (where, row) in enumerate(_json_rows(text, path), start=1):
        if not isinstance(row, dict):
            remedy = f"{where} is not a JSON object; write one with the key {text_column}"
            raise UserError("corpus.path", str(path), remedy)
        yield number, row_text(row, text_column, where)


def _json_rows(text: str, path: Path) -> Iterator[tuple[str, object]]:
    """One value a line, or the elements of a single list, with the place of each."""
    line = 1
    try:
        if text.lstrip().startswith("["):
            for number, row in enumerate(json.loads(text), start=1):
                yield f"element {number} of {path}", row
            return
        # Not splitlines(): a JSON string may hold U+2028 and its like unescaped.
        for line, source in enumerate(text.split("\n"), start=1):
            if source.strip():
                yield f"line {line} of {path}", json.loads(source)
    except json.JSONDecodeError as error:
        line += error.lineno - 1  # within a list that spans lines
        remedy = f"broken JSON on line {line} ({error.msg}); write one object a line"
        raise UserError("corpus.path", str(path), remedy) from error


def _csv_texts(
    text: str, path: Path, text_column: str, delimiter: str = ","
) -> Iterator[tuple[int, str]]:
    if not text.strip():
        return
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    # The limit on a cell is 131,072 characters, less than many a document, and can only be set
    # for the whole process: it is lifted for this read and put back.
    limit = csv.field_size_limit(sys.maxsize)
    try:
        if text_column not in (reader.fieldnames or ()):
            raise missing_column(text_column, reader.fieldnames or (), str(path))
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        remedy = f"broken table on line {reader.line_num} ({error}); quote it as CSV does"
        raise UserError("corpus.path", str(path), remedy) from error
    finally:
        csv.field_size_limit(limit)
    for number, (line, row) in enumerate(rows, start=1):
        # Cells beyond the header come under the key None: a text with an unquoted separator,
        # which would be cut short in silence.
        if None in row:
            remedy = f"line {line} has more cells than the header; quote texts with {delimiter!r}"
            raise UserError("corpus.path", str(path), remedy)
        yield number, row_text(row, text_column, f"line {line} of {path}")


def _tsv_texts(text: str, path: Path, text_column: str) -> Iterator[tuple[int, str]]:
    return _csv_texts(text, path, text_column, delimiter="\t")


def _parquet_texts(path: Path, text_column: str) -> Iterator[tuple[int, str]]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if text_column not in file.schema_arrow.names:
                raise missing_column(text_column, file.schema_arrow.names, str(path))
            number = 0
            for batch in file.iter_batches(columns=[text_column]):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row_text(row, text_column, f"row {number} of {path}")
    except (pyarrow.ArrowException, OSError) as error:
        remedy = f"cannot be read as Parquet ({error}); check the file"
        raise UserError("corpus.path", str(path), remedy) from error


_TABLES: dict[str, Callable[[str, Path, str], Iterator[tuple[int, str]]]] = {
    ".jsonl": _json_texts,
    ".ndjson": _json_texts,
    ".json": _json_texts,
    ".csv": _csv_texts,
    ".tsv": _tsv_texts,
}
