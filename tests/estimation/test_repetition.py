"""Unique n-grams, against cases worked out by hand."""

import numpy as np
import pytest

from residual_ebm.errors import UserError
from residual_ebm.estimation.repetition import count_ngrams, unique_among, unique_within


def passages(*texts: str) -> list[np.ndarray]:
    return [np.array([ord(letter) for letter in text]) for text in texts]


def test_one_passage() -> None:
    # ab bc ca ab bc: three of five bigrams are different.
    assert unique_among(passages("abcabc"), 2) == 3 / 5
    assert unique_within(passages("abcabc"), 2).tolist() == [3 / 5]
    assert count_ngrams(passages("abcabc"), 2) == 5
    # abc bca cab abc: three of four. abcabc has two 5-grams, both different.
    assert unique_among(passages("abcabc"), 3) == 3 / 4
    assert unique_within(passages("abcabc"), 5).tolist() == [1.0]


def test_a_frequent_ngram_counts_once_not_never() -> None:
    assert unique_among(passages("aaaa"), 2) == 1 / 3


def test_passages_that_repeat_each_other() -> None:
    """Each is free of repetitions, together they are not; no n-gram runs from one to the next."""
    both = passages("abc", "abd")
    assert unique_among(both, 2) == 3 / 4  # ab bc ab bd
    assert unique_within(both, 2).tolist() == [1.0, 1.0]


def test_of_the_first_ngrams_only() -> None:
    assert unique_among(passages("aaa", "abc"), 2, most=2) == 1 / 2  # aa aa
    assert unique_among(passages("aaa", "abc"), 2, most=3) == 2 / 3  # aa aa ab


def test_short_passages_have_none() -> None:
    short = passages("ab", "aba")
    assert unique_among(short, 3) == 1.0
    assert np.array_equal(unique_within(short, 3), [np.nan, 1.0], equal_nan=True)
    assert count_ngrams(short, 4) == 0
    with pytest.raises(UserError, match="order = 4"):
        unique_among(short, 4)
    with pytest.raises(UserError, match="order = 0"):
        unique_within(passages("ab"), 0)


def test_ids_far_apart_are_not_confused() -> None:
    assert unique_among([np.array([1, 65536, 1, 65536]), np.array([65536, 1])], 2) == 2 / 4
