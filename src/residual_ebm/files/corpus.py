"""Text to documents, and documents to splits.

A corpus comes from a file, a folder, a grammar (`grammar:small`) or the Hugging Face hub:

    hf:NAME    hf:OWNER/NAME    hf:OWNER/NAME/CONFIG    each with :SPLIT behind it, else train

One slash is always OWNER/NAME; a configuration of a dataset needs its owner in front. Documents are
split, not windows, which are not independent within a document; so each document has a name that is
stable and its own. A folder or a dataset of the hub may come with its own split.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from residual_ebm.errors import UserError
from residual_ebm.files.grammar import generate_documents
from residual_ebm.files.hub import datasets_from_cache_if_need_be
from residual_ebm.files.text_files import (
    NotTextError,
    is_table,
    missing_column,
    read_texts,
    row_text,
)
from residual_ebm.randomness import generator

_MAX_NOTES_SHOWN = 3
_SPLIT_NAMED = {name: name for name in ("train", "energy", "validation", "test")} | dict.fromkeys(
    ("valid", "val", "dev"), "validation"
)
_NEEDED_SPLITS = ("train", "validation", "test")


class Document(NamedTuple):
    name: str  # unique and stable: the path below the corpus, with the row if it is a table
    text: str


class Corpus(NamedTuple):
    documents: list[Document]
    notes: list[str]  # what a person should know: files skipped, encodings guessed


def read_documents(
    path: str,
    *,
    text_column: str = "text",
    max_documents: int | None = None,
    seed: int = 0,
    num_generated: int = 0,
) -> Corpus:
    """The first `max_documents` documents of `path` that are not empty, in a fixed order.

    `seed` and `num_generated` are for grammars, `text_column` is for tables and the hub.
    """
    notes: list[str] = []
    if path.startswith("grammar:"):
        named_texts = _from_grammar(path, num_generated, seed)
    elif path.startswith("hf:"):
        named_texts = _from_hub(path, text_column, max_documents)
    else:
        named_texts = _from_disk(path, text_column, notes)

    documents = _first_documents(named_texts, max_documents, notes)
    if not documents:
        shown = notes[:_MAX_NOTES_SHOWN] + ["..."] * (len(notes) > _MAX_NOTES_SHOWN)
        remedy = "holds no text; name a file or folder with text in it"
        raise UserError("corpus.path", path, f"{remedy} ({'; '.join(shown)})" if notes else remedy)
    return Corpus(documents, notes)


def read_given_splits(
    path: str, *, text_column: str = "text", max_documents: int | None = None
) -> dict[str, Corpus]:
    """The splits a folder or a dataset of the hub comes with, `max_documents` of each at most.

    In a folder the first part of a file's path names its split: train/a.txt, test.jsonl.
    """
    notes: dict[str, list[str]] = {name: [] for name in ("train", "energy", "validation", "test")}
    if path.startswith("hf:"):
        if ":" in path.removeprefix("hf:"):
            remedy = "names one split, but corpus.split is given; leave out the colon and the rest"
            raise UserError("corpus.path", path, remedy)
        named_texts = {
            split: _from_hub(f"{path}:{split}", text_column, max_documents)
            for split in _NEEDED_SPLITS
        }
    elif os.path.isdir(root := os.path.expanduser(path)):
        named_texts = {
            split: _from_files(Path(root), files, text_column, notes[split])
            for split, files in _files_of_splits(Path(root)).items()
        }
    else:
        if not path.startswith("grammar:") and not os.path.isfile(root):
            raise _no_such_path(path)
        remedy = f"{path} has no split of its own, only a folder or the hub has; give shares"
        raise UserError("corpus.split", "given", remedy)

    splits = {}
    for split, split_notes in notes.items():
        documents = _first_documents(named_texts.get(split, ()), max_documents, split_notes)
        if documents:
            splits[split] = Corpus(documents, split_notes)
        elif split in _NEEDED_SPLITS:
            remedy = f"holds no text for {split}, but corpus.split is given; add {split}/ with "
            raise UserError("corpus.path", path, f"{remedy}text in it, or give shares")
    return splits


def _first_documents(
    named_texts: Iterable[tuple[str, str]], max_documents: int | None, notes: list[str]
) -> list[Document]:
    documents: list[Document] = []
    num_empty = 0
    for name, text in named_texts:
        text = text.replace("\r\n", "\n").replace("\r", "\n").rstrip()
        if not text:
            num_empty += 1
            continue
        documents.append(Document(name, text))
        if len(documents) == max_documents:
            break
    if num_empty:
        notes.append(f"{num_empty} empty document{'s' if num_empty > 1 else ''} skipped")
    return documents


def split_documents(
    num_documents: int, fractions: Mapping[str, float], seed: int
) -> dict[str, list[int]]:
    """Document numbers of each split, sorted: a keyed permutation, cut in the order listed.

    Sizes go by largest remainder; a fraction above zero gets at least one document.
    """
    assert all(fraction >= 0 for fraction in fractions.values()), fractions
    assert abs(sum(fractions.values()) - 1) < 1e-6, fractions
    wanted = [name for name, fraction in fractions.items() if fraction > 0]
    if num_documents < len(wanted):
        remedy = f"too few for a split by document into {', '.join(wanted)}; add documents, or cut"
        remedy += " a long file into several: split -n l/50 FILE FOLDER/part-"
        raise UserError("corpus.path", f"{num_documents} document(s)", remedy)

    total = sum(fractions.values())  # 1 but for rounding
    quota = {name: num_documents * fraction / total for name, fraction in fractions.items()}
    size = {name: math.floor(quota[name]) for name in fractions}
    by_remainder = sorted(wanted, key=lambda name: size[name] - quota[name])
    for name in by_remainder[: num_documents - sum(size.values())]:
        size[name] += 1
    for name in wanted:
        if size[name] == 0:
            size[max(wanted, key=size.__getitem__)] -= 1
            size[name] = 1

    order = generator(seed, "split documents").permutation(num_documents).tolist()
    splits, first = dict[str, list[int]](), 0
    for name in fractions:
        splits[name] = sorted(order[first : first + size[name]])
        first += size[name]
    return splits


def _from_grammar(path: str, num_generated: int, seed: int) -> Iterator[tuple[str, str]]:
    if num_generated < 1:
        remedy = f"{path} needs a number of documents to generate, for example 2000"
        raise UserError("corpus.num_generated", num_generated, remedy)
    texts = generate_documents(path.removeprefix("grammar:"), num_generated, seed)
    for number, text in enumerate(texts, start=1):
        yield f"{path}#{number}", text


def _from_hub(path: str, text_column: str, max_documents: int | None) -> Iterator[tuple[str, str]]:
    import datasets  # a second to import, which only hub paths should cost

    name, _, split = path.removeprefix("hf:").partition(":")
    split = split or "train"
    parts = name.split("/")
    if not all(parts) or len(parts) > 3:
        remedy = "write hf:NAME, hf:OWNER/NAME or hf:OWNER/NAME/CONFIG, with :SPLIT if not train"
        raise UserError("corpus.path", path, remedy)
    try:
        with datasets_from_cache_if_need_be():
            rows = datasets.load_dataset(
                "/".join(parts[:2]),
                parts[2] if len(parts) == 3 else None,
                split=split,
                # A few documents must not download all of a huge dataset; slices do not stream.
                streaming=max_documents is not None and "[" not in split,
            )
        if rows.column_names is not None:  # a stream may not know them before its first row
            if text_column not in rows.column_names:
                raise missing_column(text_column, rows.column_names, path)
            rows = rows.select_columns([text_column])  # images and audio are not decoded
        for number, row in enumerate(rows, start=1):
            where = f"row {number} of {path}"
            yield f"hf:{name}:{split}#{number}", row_text(row, text_column, where)
    except UserError:
        raise
    except Exception as error:
        # The hub and its libraries raise a dozen unrelated types, all of them about this dataset.
        reason = next(iter(str(error).strip().splitlines()), "no reason given")
        remedy = "check the name, the split and the network, or give a local file or an asset"
        remedy += " (see `rebm assets`)"
        message = f"cannot be loaded ({type(error).__name__}: {reason}); {remedy}"
        raise UserError("corpus.path", path, message) from error


def _from_disk(path: str, text_column: str, notes: list[str]) -> Iterator[tuple[str, str]]:
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        root = Path(expanded)
        yield from _from_files(root, _files_below(root), text_column, notes)
    elif os.path.isfile(expanded):
        file = Path(expanded)
        try:
            yield from _from_file(file, _printable(file.name), text_column, notes)
        except NotTextError as error:
            raise UserError("corpus.path", path, str(error)) from error
    else:
        raise _no_such_path(path)


def check_exists(path: str) -> None:
    """Refuse a file or folder that is not there; everything else shows when it is read."""
    if not _is_elsewhere(path) and not os.path.exists(os.path.expanduser(path)):
        raise _no_such_path(path)


def corpus_fingerprint(path: str) -> str | None:
    """Changes when files on disk come, go or change their size; None for what lies elsewhere."""
    root = Path(os.path.expanduser(path))
    if _is_elsewhere(path) or not root.exists():
        return None
    files = _files_below(root) if root.is_dir() else [root]
    sizes = [f"{_printable(str(file.relative_to(root)))} {file.stat().st_size}" for file in files]
    return hashlib.sha256("\n".join(sizes).encode()).hexdigest()


def _is_elsewhere(path: str) -> bool:
    return path.startswith(("asset:", "hf:", "grammar:"))


def _no_such_path(path: str) -> UserError:
    places = "a folder of texts, a table, asset:NAME, hf:OWNER/NAME or grammar:small"
    return UserError("corpus.path", path, f"no such file or folder; name {places}")


def _from_files(
    root: Path, files: Iterable[Path], text_column: str, notes: list[str]
) -> Iterator[tuple[str, str]]:
    files = list(files)
    # Beside texts a table is often about them, not of them.
    tables_may_fail = not all(is_table(file) for file in files)
    for file in files:
        name = _printable(file.relative_to(root).as_posix())
        may_fail = tables_may_fail and is_table(file)
        try:
            texts: Iterable[tuple[str, str]] = _from_file(file, name, text_column, notes)
            yield from list(texts) if may_fail else texts  # taken whole or not at all
        except NotTextError as error:
            notes.append(f"{name}: skipped, it {error}")
        except UserError as error:
            if not may_fail:
                raise
            notes.append(f"{name}: skipped, {error}")


def _from_file(
    file: Path, name: str, text_column: str, notes: list[str]
) -> Iterator[tuple[str, str]]:
    texts, note = read_texts(file, text_column)
    if note:
        notes.append(f"{name}: {note}")
    for row, text in texts:
        yield (f"{name}#{row}" if row else name), text


def _files_below(root: Path) -> list[Path]:
    """Regular files that are not hidden nor in a hidden folder, sorted by path."""

    def refuse(error: OSError) -> None:
        remedy = f"a folder that cannot be read ({error.strerror}); check its permissions"
        raise UserError("corpus.path", str(error.filename), remedy) from error

    files = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    # A pipe or a socket would block a read for ever; isfile leaves those out.
    return sorted(file for file in files if file.is_file())


def _files_of_splits(root: Path) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {}
    for file in _files_below(root):
        first_part = file.relative_to(root).parts[0].lower()
        # The stem of a file in the folder itself; a sub-folder may have a dot in its name.
        named = first_part.partition(".")[0] if file.parent == root else first_part
        if named not in _SPLIT_NAMED:
            remedy = "is in no split, but corpus.split is given; move it below train, validation, "
            raise UserError("corpus.path", _printable(str(file)), f"{remedy}test or energy")
        splits.setdefault(_SPLIT_NAMED[named], []).append(file)
    return splits


def _printable(name: str) -> str:
    """File names are bytes; what is not UTF-8 in them is escaped, so that a name can be stored."""
    return os.fsencode(name).decode("utf-8", errors="backslashreplace")
