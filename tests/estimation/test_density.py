"""Densities of log-probs: where they lie, that they are densities, and the difference of means."""

import math

import numpy as np
import pytest

from residual_ebm.errors import UserError
from residual_ebm.estimation.density import log_prob_densities

RESAMPLING = {"num_resamples": 400, "seed": 0}


def test_difference_of_means_by_hand() -> None:
    """Real -10 and -20; samples -8, -10 and -16, -18: two nats and three above, on average 2.5."""
    found = log_prob_densities([-10, -20], [[-8, -10], [-16, -18]], [0, 1], **RESAMPLING)
    assert found.difference == pytest.approx((1 + 3) / 2)
    assert found.interval == pytest.approx((1.0, 3.0))


def test_curves_are_densities_around_their_means() -> None:
    draw = np.random.default_rng(0)
    real_P, sample_PD = draw.normal(-100, 5, 2000), draw.normal(-80, 10, (2000, 3))
    found = log_prob_densities(real_P, sample_PD, np.arange(2000), **RESAMPLING)
    for curve_K, mean, spread in ((found.real_K, -100, 5), (found.sample_K, -80, 10)):
        assert np.trapezoid(curve_K, found.log_prob_K) == pytest.approx(1, abs=0.01)
        first = np.trapezoid(curve_K * found.log_prob_K, found.log_prob_K)
        assert first == pytest.approx(mean, abs=0.5)
        second = np.trapezoid(curve_K * (found.log_prob_K - mean) ** 2, found.log_prob_K)
        assert math.sqrt(second) == pytest.approx(spread, rel=0.1)
    assert found.interval.low < 20 < found.interval.high
    assert found.interval.high - found.interval.low < 2


def test_one_value_has_no_curve() -> None:
    found = log_prob_densities([-1.0, -1.0], [[-1.0], [-2.0]], [0, 1], **RESAMPLING)
    assert np.isnan(found.real_K).all()
    assert not np.isnan(found.sample_K).any()


def test_samples_of_other_prefixes_are_a_user_error() -> None:
    with pytest.raises(UserError, match="log_prob"):
        log_prob_densities([-1.0, -2.0], [[-1.0]], [0, 1], **RESAMPLING)
