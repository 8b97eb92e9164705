"""Tokenizers from scratch: a grammar's words are tokens, and byte-level BPE loses nothing."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from residual_ebm.files.grammar import build_grammar, generate_documents
from residual_ebm.files.tokenizers import END_OF_TEXT, train_tokenizer
from residual_ebm.models.loading import load_tokenizer

KINDS = ["word", "bpe"]
DOCUMENTS = generate_documents("small", 300, seed=0)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return train_tokenizer(DOCUMENTS, request.param, 400)


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    return train_tokenizer(DOCUMENTS, "bpe", 400)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_word_tokens_are_the_symbols_of_the_grammar() -> None:
    tokenizer = train_tokenizer(DOCUMENTS, "word", 400)
    words = build_grammar("small").words
    assert set(words) == set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    for document in DOCUMENTS[:20]:
        assert tokenizer.convert_ids_to_tokens(encode(tokenizer, document)) == document.split(" ")


def test_grammar_text_comes_back(tokenizer: PreTrainedTokenizerFast) -> None:
    for document in generate_documents("small", 20, seed=1):
        assert tokenizer.decode(encode(tokenizer, document)) == document


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_bpe_loses_no_text(bpe: PreTrainedTokenizerFast, text: str) -> None:
    assert bpe.decode(encode(bpe, text)) == text


@pytest.mark.parametrize("text", ["a , b . c ' s", "  two  spaces  ", "\n\t", "naïve 漢字 🙂", ""])
def test_bpe_keeps_spaces_and_unseen_letters(bpe: PreTrainedTokenizerFast, text: str) -> None:
    assert bpe.decode(encode(bpe, text)) == text


def test_unseen_words_are_unknown() -> None:
    tokenizer = train_tokenizer(DOCUMENTS, "word", 400)
    king, unknown = encode(tokenizer, "king zeppelin")
    assert tokenizer.convert_ids_to_tokens(king) == "king"
    assert unknown == tokenizer.unk_token_id


def test_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.eos_token == tokenizer.pad_token == tokenizer.sep_token == END_OF_TEXT
    assert tokenizer.eos_token_id is not None
    assert tokenizer.mask_token_id not in (None, tokenizer.eos_token_id)
    assert encode(tokenizer, END_OF_TEXT) == [tokenizer.eos_token_id]


def test_nothing_is_added_to_a_document(tokenizer: PreTrainedTokenizerFast) -> None:
    """Positives and samples have the same special tokens: those of the block, no others."""
    plain = encode(tokenizer, DOCUMENTS[0])
    assert tokenizer(DOCUMENTS[0])["input_ids"] == plain
    assert not {tokenizer.eos_token_id, tokenizer.mask_token_id} & set(plain)


@pytest.mark.parametrize("kind", KINDS)
def test_vocabulary_depends_on_the_texts_alone(kind: str) -> None:
    one, other = (train_tokenizer(iter(DOCUMENTS), kind, 300) for _ in range(2))
    assert one.get_vocab() == other.get_vocab()


def test_vocabulary_is_no_larger_than_asked() -> None:
    assert len(train_tokenizer(DOCUMENTS, "word", 50)) == 50
    assert len(train_tokenizer(DOCUMENTS, "bpe", 300)) == 300


def test_tokenizer_round_trip(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path), "tokenizer")
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    for document in [*DOCUMENTS[:20], f"king {END_OF_TEXT} queen", "  a  b"]:
        ids = encode(tokenizer, document)
        assert encode(loaded, document) == ids
        assert loaded.decode(ids) == tokenizer.decode(ids)
