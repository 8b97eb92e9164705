"""Laws of the document bootstrap: exact small cases, pairing, coverage, documents not windows."""

import math

import numpy as np
import pytest

from residual_ebm.errors import UserError
from residual_ebm.estimation import bootstrap
from residual_ebm.estimation.bootstrap import (
    Interval,
    bootstrap_difference,
    bootstrap_mean,
    bootstrap_perplexity,
    perplexity,
)


def width(interval: Interval) -> float:
    return interval.high - interval.low


def test_perplexity_weighs_tokens_not_prefixes() -> None:
    # A uniform model over 7 words has perplexity 7, whatever the lengths.
    num_tokens_P = np.array([1, 5, 40])
    assert perplexity(-num_tokens_P * math.log(7), num_tokens_P) == pytest.approx(7)
    assert perplexity([-1.0, -8.0], [1, 2]) == pytest.approx(math.exp(3))


def test_two_documents_in_closed_form() -> None:
    # Resamples are (a, a), (a, b), (b, b) with probabilities 1/4, 1/2, 1/4. Document "a" has two
    # prefixes, which are always drawn together.
    log_prob_P, num_tokens_P, document_P = [-2.0, -9.0, -1.0], [2, 1, 1], ["a", "b", "a"]
    a, b, both = math.exp(3 / 3), math.exp(9), math.exp(12 / 4)

    def interval(level: float) -> Interval:
        return bootstrap_perplexity(
            log_prob_P, num_tokens_P, document_P, num_resamples=2000, seed=0, level=level
        )

    assert interval(0.95) == pytest.approx((a, b))
    assert interval(0.6) == pytest.approx((a, b))
    assert interval(0.4) == pytest.approx((both, both))


def test_the_mean_is_a_ratio_of_resampled_sums() -> None:
    # Mean of all drawn prefixes: 1 (a, a), (1 + 1 + 7) / 3 (a, b), 7 (b, b); not a mean of means.
    def interval(level: float) -> Interval:
        return bootstrap_mean([1, 1, 7], [0, 0, 1], num_resamples=2000, seed=1, level=level)

    assert interval(0.95) == pytest.approx((1, 7))
    assert interval(0.4) == pytest.approx((3, 3))


def test_the_difference_in_closed_form() -> None:
    interval = bootstrap_difference(
        [-1.0, -4.0], [-2.0, -3.0], [1, 1], [0, 1], num_resamples=2000, seed=0, level=0.95
    )
    assert interval == pytest.approx((math.exp(1) - math.exp(2), math.exp(4) - math.exp(3)))


def test_many_documents_approach_the_normal_interval() -> None:
    value_P = np.random.default_rng(0).standard_normal(400)
    low, high = bootstrap_mean(value_P, np.arange(400), num_resamples=4000, seed=0)
    half_width = 1.96 * value_P.std() / 20
    assert (low, high) == pytest.approx(
        (value_P.mean() - half_width, value_P.mean() + half_width), abs=0.1 * half_width
    )


def test_coverage_with_documents_and_its_loss_with_windows() -> None:
    # Documents that differ (sd 1) hold 8 windows that differ little (sd 0.3); the true mean is 0.
    rng = np.random.default_rng(5)
    num_runs, num_documents, num_windows = 200, 50, 8
    document_P = np.repeat(np.arange(num_documents), num_windows)
    window_P = np.arange(len(document_P))
    covered = {"documents": 0, "windows": 0}
    for run in range(num_runs):
        value_P = rng.standard_normal(num_documents)[document_P]
        value_P = value_P + 0.3 * rng.standard_normal(len(document_P))
        for name, unit_P in (("documents", document_P), ("windows", window_P)):
            low, high = bootstrap_mean(value_P, unit_P, num_resamples=200, seed=run)
            covered[name] += low <= 0 <= high
    assert 0.89 <= covered["documents"] / num_runs <= 0.99
    assert covered["windows"] / num_runs < 0.7


def test_windows_of_one_document_are_not_independent() -> None:
    # Each document's window repeated 25 times is no new evidence: the interval stays what it was.
    log_prob_D = -np.random.default_rng(1).gamma(4.0, size=30)
    log_prob_P, tokens_P = np.repeat(log_prob_D, 25), np.full(750, 4)
    document_P = np.repeat(np.arange(30), 25)
    once = bootstrap_perplexity(
        log_prob_D, np.full(30, 4), np.arange(30), num_resamples=500, seed=0
    )
    repeated = bootstrap_perplexity(log_prob_P, tokens_P, document_P, num_resamples=500, seed=0)
    windows = bootstrap_perplexity(log_prob_P, tokens_P, np.arange(750), num_resamples=500, seed=0)
    assert repeated == pytest.approx(once)
    assert width(repeated) > 3 * width(windows)


def test_identical_models_differ_by_exactly_zero() -> None:
    log_prob_P = -np.random.default_rng(2).gamma(4.0, size=100)
    interval = bootstrap_difference(
        log_prob_P,
        log_prob_P.copy(),
        np.full(100, 3),
        np.arange(100) // 4,
        num_resamples=300,
        seed=0,
    )
    assert interval == (0.0, 0.0)


def test_pairing_makes_the_difference_narrow() -> None:
    # Documents differ far more than the two models do: 0.2 nats a token, everywhere.
    rng = np.random.default_rng(3)
    base_P = -rng.gamma(20.0, 2.0, size=200)
    better_P = base_P + 2.0 + 0.1 * rng.standard_normal(200)
    tokens_P, document_P = np.full(200, 10), np.arange(200) // 2
    difference = bootstrap_difference(
        better_P, base_P, tokens_P, document_P, seed=0, num_resamples=500
    )
    assert difference.high < 0
    better = bootstrap_perplexity(better_P, tokens_P, document_P, seed=0, num_resamples=500)
    base = bootstrap_perplexity(base_P, tokens_P, document_P, seed=1, num_resamples=500)
    independent = math.hypot(width(better), width(base))
    assert width(difference) < independent / 3


def test_the_same_seed_draws_the_same_documents_for_every_model() -> None:
    rng = np.random.default_rng(4)
    log_prob_P, tokens_P, document_P = -rng.gamma(4.0, size=60), np.full(60, 2), np.arange(60) // 3
    first = bootstrap_perplexity(log_prob_P, tokens_P, document_P, num_resamples=100, seed=7)
    # A model that is worse by one nat a token on every prefix: the same sets, times e.
    second = bootstrap_perplexity(
        log_prob_P - tokens_P, tokens_P, document_P, num_resamples=100, seed=7
    )
    assert np.array(second) == pytest.approx(math.e * np.array(first), rel=1e-12)
    other = bootstrap_perplexity(log_prob_P, tokens_P, document_P, num_resamples=100, seed=8)
    assert other != first


def test_the_order_of_prefixes_and_the_names_of_documents_do_not_matter() -> None:
    rng = np.random.default_rng(6)
    value_P, document_P = rng.standard_normal(60), np.arange(60) // 3
    order = rng.permutation(60)
    first = bootstrap_mean(value_P, document_P, num_resamples=100, seed=0)
    shuffled = bootstrap_mean(value_P[order], document_P[order] + 100, num_resamples=100, seed=0)
    assert shuffled == pytest.approx(first, rel=1e-12)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    value_P = np.random.default_rng(7).standard_normal(40)
    whole = bootstrap_mean(value_P, np.arange(40), num_resamples=101, seed=0)
    monkeypatch.setattr(bootstrap, "_CHUNK_SIZE", 7 * 40)
    assert bootstrap_mean(value_P, np.arange(40), num_resamples=101, seed=0) == pytest.approx(
        whole, rel=1e-12
    )


def test_a_single_document_has_no_interval() -> None:
    low, high = bootstrap_perplexity([-1.0, -2.0], [1, 1], [3, 3], num_resamples=10, seed=0)
    assert math.isnan(low)
    assert math.isnan(high)


def test_inputs_that_have_no_interval_are_refused() -> None:
    def run(
        log_prob: object = (-1.0, -2.0),
        num_tokens: object = (1, 1),
        document: object = (0, 1),
        num_resamples: int = 10,
        level: float = 0.95,
    ) -> Interval:
        return bootstrap_perplexity(
            np.array(log_prob),
            np.array(num_tokens),
            np.array(document),
            num_resamples=num_resamples,
            seed=0,
            level=level,
        )

    assert run().low > 0
    with pytest.raises(UserError, match="log_prob = shape"):
        run(log_prob=())
    with pytest.raises(UserError, match="num_tokens = shape"):
        run(num_tokens=(1, 1, 1))
    with pytest.raises(UserError, match="document = shape"):
        run(document=(0, 1, 2))
    with pytest.raises(UserError, match="log_prob = not finite for 1 prefixes"):
        run(log_prob=(-1.0, -math.inf))
    with pytest.raises(UserError, match="num_tokens"):
        run(num_tokens=(1, 0))
    with pytest.raises(UserError, match="num_resamples = 0"):
        run(num_resamples=0)
    with pytest.raises(UserError, match="level"):
        run(level=95)
