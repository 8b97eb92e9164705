"""The weights with which energies add up, on cases whose answer is known."""

import numpy as np
import pytest
from scipy.stats import norm

from residual_ebm.errors import UserError
from residual_ebm.estimation.nce import nce_loss
from residual_ebm.estimation.weighted_sum import WeightedSum, fit_weighted_sum


def two_views(number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Blocks with two independent hints of their class: a hint h has the energy -2 h."""
    draw = np.random.default_rng(seed)
    positive, negative = draw.normal(1, 1, (number, 2)), draw.normal(-1, 1, (number, 2))
    return -2 * positive, -2 * negative


def test_independent_hints_add_up_whole() -> None:
    """log N(h; -1, 1) - log N(h; 1, 1) = -2 h, and log-ratios of independent hints add."""
    hints = np.linspace(-2, 2, 5)
    np.testing.assert_allclose(norm.logpdf(hints, -1) - norm.logpdf(hints, 1), -2 * hints)
    fitted = fit_weighted_sum(*two_views(50_000))
    np.testing.assert_allclose(fitted.weight_M, [1, 1], atol=0.03)
    assert fitted.constant == pytest.approx(0, abs=0.03)


def test_the_same_hint_twice_is_shared() -> None:
    positive, negative = two_views(50_000)
    fitted = fit_weighted_sum(positive[:, [0, 0]], negative[:, [0, 0]])
    np.testing.assert_allclose(fitted.weight_M, [0.5, 0.5], atol=0.03)


def test_scale_and_offset_of_an_energy_are_undone() -> None:
    positive, negative = two_views(50_000)
    fitted = fit_weighted_sum(4 * positive + 3, 4 * negative + 3)
    np.testing.assert_allclose(fitted.weight_M, [0.25, 0.25], atol=0.01)
    assert fitted.constant == pytest.approx(-1.5, abs=0.05)


def test_no_other_weights_have_a_lower_loss() -> None:
    positive, negative = two_views(300, seed=1)
    fitted = fit_weighted_sum(positive, negative[:290])
    lowest = nce_loss(fitted(positive), fitted(negative[:290])).item()
    draw = np.random.default_rng(2)
    for _ in range(200):
        near = WeightedSum(
            fitted.weight_M + draw.normal(0, 0.2, 2), fitted.constant + draw.normal(0, 0.2)
        )
        assert nce_loss(near(positive), near(negative[:290])).item() > lowest - 1e-4


def test_energies_that_separate_the_classes_have_finite_weights() -> None:
    fitted = fit_weighted_sum(np.full((10, 2), -1.0), np.full((10, 2), 1.0))
    assert np.isfinite(fitted.weight_M).all()
    assert fitted(np.array([[-1.0, -1.0]]))[0] < -3


def test_an_energy_of_tiny_scale_counts_as_much() -> None:
    positive, negative = two_views(50_000)
    scale = np.array([1e-4, 1.0])
    fitted = fit_weighted_sum(scale * positive, scale * negative)
    np.testing.assert_allclose(scale * fitted.weight_M, [1, 1], atol=0.03)


def test_an_energy_that_says_nothing_is_left_out() -> None:
    positive, negative = two_views(50_000)
    positive[:, 1] = negative[:, 1] = 0.0
    fitted = fit_weighted_sum(positive, negative)
    assert fitted.weight_M[0] == pytest.approx(1, abs=0.03)
    assert np.isfinite(fitted.weight_M).all()


def test_a_broken_energy_is_refused() -> None:
    positive, negative = two_views(10)
    negative[3, 1] = np.nan
    with pytest.raises(UserError, match="an energy of the sum is broken"):
        fit_weighted_sum(positive, negative)
