"""Paired comparisons: exact models as the bootstrap has them, bounded ones never more certain."""

import math

import numpy as np
import pytest

from residual_ebm.estimation.bootstrap import bootstrap_difference
from residual_ebm.estimation.comparison import ModelLogProbs, compare_models

RESAMPLING = {"num_resamples": 500, "seed": 3}
NUM_TOKENS_P = np.full(30, 5)
DOCUMENT_P = np.arange(30) // 2


def log_prob(seed: int, mean: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, 1.0, size=30)


def exact(name: str, log_prob_P: np.ndarray) -> ModelLogProbs:
    return ModelLogProbs(name, log_prob_P, log_prob_P)


def test_every_later_model_is_compared_with_every_earlier_one() -> None:
    models = [exact(name, log_prob(seed, -10.0)) for seed, name in enumerate("abc")]
    found = compare_models(models, NUM_TOKENS_P, DOCUMENT_P, **RESAMPLING)
    assert [(one.model, one.other) for one in found] == [("b", "a"), ("c", "a"), ("c", "b")]


def test_exact_models_differ_as_the_paired_bootstrap_says() -> None:
    one_P, other_P = log_prob(0, -9.0), log_prob(1, -10.0)
    (found,) = compare_models(
        [exact("other", other_P), exact("one", one_P)], NUM_TOKENS_P, DOCUMENT_P, **RESAMPLING
    )
    expected = bootstrap_difference(one_P, other_P, NUM_TOKENS_P, DOCUMENT_P, **RESAMPLING)
    assert found.difference == expected
    assert expected.high < 0  # the likelier text has the lower perplexity


def test_bounds_that_are_apart_widen_the_difference_at_both_ends() -> None:
    """By what the bounds leave open of either model, whichever of the two is the bounded one."""
    one_P, other_P = log_prob(0, -9.9), log_prob(1, -10.0)
    order = [exact("other", other_P), exact("one", one_P)]
    (narrow,) = compare_models(order, NUM_TOKENS_P, DOCUMENT_P, **RESAMPLING)
    for place, log_prob_P in enumerate((other_P, one_P)):
        bounded = list(order)
        bounded[place] = ModelLogProbs(order[place].name, log_prob_P + 0.5, log_prob_P - 0.5)
        (wide,) = compare_models(bounded, NUM_TOKENS_P, DOCUMENT_P, **RESAMPLING)
        assert wide.difference.low < narrow.difference.low
        assert wide.difference.high > narrow.difference.high


def test_what_is_resampled_is_compared_with_the_best_the_other_may_be() -> None:
    ones_P = np.full(30, -5.0)
    joint = ModelLogProbs("b", ones_P, ones_P - 2, ones_P - 3)
    (found,) = compare_models(
        [ModelLogProbs("a", ones_P + 1, ones_P), joint], NUM_TOKENS_P, DOCUMENT_P, **RESAMPLING
    )
    expected = math.exp(8 / 5) - math.exp(4 / 5)
    assert found.resampled_difference == pytest.approx((expected, expected))
    (turned,) = compare_models([joint, exact("a", ones_P)], NUM_TOKENS_P, DOCUMENT_P, **RESAMPLING)
    assert turned.resampled_difference is None  # a language model resamples nothing


def test_one_prefix_a_document_in_closed_form() -> None:
    """Documents that are all alike: the interval is the two extreme differences themselves."""
    ones_P = np.full(30, -5.0)
    (found,) = compare_models(
        [ModelLogProbs("a", ones_P + 1, ones_P), ModelLogProbs("b", ones_P - 1, ones_P - 2)],
        NUM_TOKENS_P,
        np.arange(30),
        **RESAMPLING,
    )
    assert found.difference.low == pytest.approx(math.exp(6 / 5) - math.exp(5 / 5))
    assert found.difference.high == pytest.approx(math.exp(7 / 5) - math.exp(4 / 5))
