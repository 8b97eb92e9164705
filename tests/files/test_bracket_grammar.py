"""The language of ten words: what is opened is closed, in reverse order, before a full stop."""

import pytest

from residual_ebm.files.bracket_grammar import CLOSERS, FILLERS, MAX_DEPTH
from residual_ebm.files.grammar import build_grammar, generate_documents

DOCUMENTS = generate_documents("brackets", 300, seed=0)


@pytest.mark.parametrize("document", DOCUMENTS[:50])
def test_everything_is_closed_in_reverse_order(document: str) -> None:
    open_: list[str] = []
    for word in document.split():
        if word in CLOSERS:
            open_.append(word)
        elif word == ".":
            assert open_ == []
        elif word not in FILLERS:
            assert word == CLOSERS[open_.pop()]
        assert len(open_) <= MAX_DEPTH
    assert open_ == []
    assert not document or document.endswith(".")


def test_all_words_occur_and_there_are_ten() -> None:
    words = build_grammar("brackets").words
    assert len(words) == 10
    assert set(words) == {word for document in DOCUMENTS for word in document.split()}
