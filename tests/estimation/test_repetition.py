"""Unique n-grams, against cases worked out by hand."""

import numpy as np
import pytest

from residual_ebm.errors import UserError
from residual_ebm.estimation.repetition import unique_ngrams


def passages(*texts: str) -> list[np.ndarray]:
    return [np.array([ord(letter) for letter in text]) for text in texts]


def test_one_passage() -> None:
    # ab bc ca ab bc: three of five bigrams are different.
    assert unique_ngrams(passages("abcabc"), 2) == (3 / 5, 3 / 5)
    # abc bca cab abc: three of four. abcabc has two 5-grams, both different.
    assert unique_ngrams(passages("abcabc"), 3) == (3 / 4, 3 / 4)
    assert unique_ngrams(passages("abcabc"), 5) == (1.0, 1.0)


def test_a_frequent_ngram_counts_once_not_never() -> None:
    assert unique_ngrams(passages("aaaa"), 2).among == 1 / 3


def test_passages_that_repeat_each_other() -> None:
    """Each is free of repetitions, together they are not; no n-gram runs from one to the next."""
    found = unique_ngrams(passages("abc", "abd"), 2)
    assert found.among == 3 / 4  # ab bc ab bd
    assert found.within == 1.0


def test_within_is_a_mean_over_passages_of_any_length() -> None:
    # aa in aaa: 1 of 2; ab bc cd de ef: 5 of 5.
    assert unique_ngrams(passages("aaa", "abcdef"), 2).within == pytest.approx((1 / 2 + 1) / 2)


def test_short_passages_are_passed_over() -> None:
    assert unique_ngrams(passages("ab", "aba"), 3) == (1.0, 1.0)
    with pytest.raises(UserError, match="order = 4"):
        unique_ngrams(passages("ab", "aba"), 4)
    with pytest.raises(UserError, match="order = 0"):
        unique_ngrams(passages("ab"), 0)


def test_ids_far_apart_are_not_confused() -> None:
    assert unique_ngrams([np.array([1, 65536, 1, 65536]), np.array([65536, 1])], 2).among == 2 / 4
