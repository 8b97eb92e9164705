"""Laws of importance weights: the diagnostics, and resampling in proportion to them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from residual_ebm.errors import UserError
from residual_ebm.estimation.importance import (
    effective_sample_size,
    log_weight,
    pareto_k,
    pareto_k_threshold,
    resample,
)

INFINITY = math.inf
# The same examples every time, and no clock: the machine may be busy.
fixed = settings(derandomize=True, deadline=None)

# Multiples of 1/8: sums with whole numbers are exact, so laws of invariance hold to the bit.
eighths = st.integers(-8 * 300, 8 * 300).map(lambda i: i / 8)
log_weights = st.lists(eighths, min_size=2, max_size=40)


def pareto_log_weights(k: float, num_samples: int, seed: int) -> np.ndarray:
    """Weights with P(w > x) = x^(-1/k), whose tail has exactly the shape k."""
    return k * np.random.default_rng(seed).exponential(size=num_samples)


def test_log_weight_is_minus_the_energy_in_float64() -> None:
    weights = log_weight(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert weights.dtype == torch.float64
    assert weights.tolist() == [-1.5, 2.0]


@pytest.mark.parametrize("num_samples", [2, 10, 25, 1000, 100_000])
def test_zero_energy_is_flagged_by_no_diagnostic(num_samples: int) -> None:
    log_weight_N = log_weight(torch.zeros(num_samples))
    assert effective_sample_size(log_weight_N).item() == num_samples
    assert pareto_k(log_weight_N) == -INFINITY
    assert not pareto_k(log_weight_N) > pareto_k_threshold(num_samples)


def test_energies_that_differ_by_less_than_rounding_are_not_flagged() -> None:
    noise_N = 1e-17 * np.random.default_rng(0).standard_normal(1000)
    assert pareto_k(noise_N) == -INFINITY


def test_zero_energy_resamples_uniformly() -> None:
    uniform_M = (torch.arange(70, dtype=torch.float64) + 0.5) / 70
    index_M = resample(log_weight(torch.zeros(7)), uniform_M)
    assert index_M.dtype == torch.int64
    assert torch.bincount(index_M, minlength=7).tolist() == [10] * 7


@fixed
@given(log_weights, st.integers(-1000, 1000), st.floats(0, 1))
def test_adding_a_constant_changes_no_sample_and_no_diagnostic(
    log_weight_N: list[float], constant: int, uniform: float
) -> None:
    moved_N = [value - constant for value in log_weight_N]
    assert resample(moved_N, uniform) == resample(log_weight_N, uniform)
    assert effective_sample_size(moved_N) == effective_sample_size(log_weight_N)
    assert pareto_k(moved_N) == pareto_k(log_weight_N)


def test_resampling_frequencies_are_the_normalised_weights() -> None:
    log_weight_N = torch.tensor([0.0, -1.0, 2.0, 0.5], dtype=torch.float64)
    uniform_M = np.random.default_rng(1).random(20_000)
    observed = np.bincount(resample(log_weight_N, uniform_M).numpy(), minlength=4)
    expected = log_weight_N.softmax(0).numpy() * len(uniform_M)
    assert stats.chisquare(observed, expected).pvalue > 1e-3


@fixed
@given(st.lists(st.one_of(st.just(-INFINITY), eighths), min_size=1, max_size=30), st.data())
def test_resampling_never_names_a_zero_weight(
    log_weight_N: list[float], data: st.DataObject
) -> None:
    log_weight_N.insert(data.draw(st.integers(0, len(log_weight_N))), data.draw(eighths))
    # A weight 746 nats below the largest is zero in float64 too.
    floor = max(log_weight_N) - 745
    uniforms = [0.0, 1.0, math.nextafter(1, 0), 5e-324, data.draw(st.floats(0, 1))]
    for index in resample(log_weight_N, uniforms).tolist():
        assert log_weight_N[index] > floor


def test_the_ends_of_the_inverse_cdf() -> None:
    log_weight_N = [-INFINITY, 0.0, -INFINITY, 0.0, -INFINITY]
    assert resample(log_weight_N, [0.0, 0.25, 0.5, 0.75, 1.0]).tolist() == [1, 1, 3, 3, 3]
    assert resample(log_weight_N, 1.0).tolist() == 3
    assert resample([[0.0, -INFINITY], [-INFINITY, 0.0]], 0.5).tolist() == [0, 1]
    assert resample([[0.0, 0.0], [-INFINITY, 0.0]], [[0.4, 0.6], [0.4, 0.6]]).tolist() == [
        [0, 1],
        [1, 1],
    ]


def test_small_weights_behind_a_large_one_keep_their_turn() -> None:
    # In a float32 cdf 1 + 1e-9 is 1, and the thousand small ones would never be drawn.
    log_weight_N = [0.0] + [math.log(1e-9)] * 1000
    uniforms = [(1 + 1e-9 * (i - 0.5)) / (1 + 1e-6) for i in (1, 500, 1000)]
    assert resample(log_weight_N, uniforms).tolist() == [1, 500, 1000]


@pytest.mark.parametrize("uniform", [-1e-9, 1.0000001, math.nan])
def test_numbers_that_are_not_uniform_are_refused(uniform: float) -> None:
    with pytest.raises(UserError, match="uniform"):
        resample([0.0, 0.0], uniform)


@fixed
@given(log_weights)
def test_effective_sample_size_is_between_one_and_n(log_weight_N: list[float]) -> None:
    size = effective_sample_size(log_weight_N).item()
    assert 1 <= size <= len(log_weight_N) * (1 + 1e-12)


def test_effective_sample_size_on_known_weights() -> None:
    # (1 + 2 + 3)^2 / (1 + 4 + 9); any common factor, 300 nats of it here, drops out.
    log_weight_N = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).log()
    sizes = effective_sample_size(torch.stack([log_weight_N, log_weight_N + 300]))
    assert sizes.tolist() == pytest.approx([36 / 14, 36 / 14], abs=1e-12)
    # Eight equal weights and any number of zeros are worth eight.
    assert effective_sample_size([800.0] * 8 + [-INFINITY] * 5).item() == 8
    assert effective_sample_size([0.0, -200.0, -200.0]).item() == 1


@pytest.mark.parametrize("k", [0.3, 0.5, 1.0])
def test_k_hat_of_pareto_weights_is_their_shape(k: float) -> None:
    estimates = [pareto_k(pareto_log_weights(k, 100_000, seed)) for seed in range(5)]
    assert np.mean(estimates) == pytest.approx(k, abs=0.05)
    assert np.std(estimates) < 0.1


def test_k_hat_of_bounded_weights_is_negative() -> None:
    # Uniform weights have the shape -1; taken with the wrong sign their tail would be k = +1.
    log_weight_N = np.log(np.random.default_rng(0).random(10_000))
    assert pareto_k(log_weight_N) == pytest.approx(-1, abs=0.2)
    assert pareto_k(-log_weight_N) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("num_samples", [2, 5, 24])
def test_too_few_samples_for_a_tail_never_pass(num_samples: int) -> None:
    log_weight_N = pareto_log_weights(0.1, num_samples, seed=0)
    assert pareto_k(log_weight_N) == INFINITY
    assert pareto_k(log_weight_N) > pareto_k_threshold(num_samples)


def test_twenty_five_samples_have_a_tail() -> None:
    assert math.isfinite(pareto_k(pareto_log_weights(0.1, 25, seed=0)))


@pytest.mark.parametrize("excess", [1.0, 12.0, 2000.0])
def test_one_weight_above_all_others_is_flagged(excess: float) -> None:
    log_weight_N = np.zeros(1000)
    log_weight_N[137] = excess
    assert pareto_k(log_weight_N) == INFINITY


@pytest.mark.parametrize("num_copies", [5, 50, 94, 95, 600])
def test_a_largest_weight_that_was_drawn_often_is_no_tail(num_copies: int) -> None:
    log_weight_N = np.zeros(1000)
    log_weight_N[:num_copies] = 1.0
    assert pareto_k(log_weight_N) == -INFINITY


@pytest.mark.parametrize("num_samples", [200, 2000])
def test_ties_at_the_cutoff_leave_the_shape_of_the_tail(num_samples: int) -> None:
    # What lies around the beginning of the tail becomes one value, as repeated samples would.
    num_tail = int(3 * math.sqrt(num_samples)) if num_samples > 225 else num_samples // 5
    middle = num_samples - num_tail // 2
    estimates = []
    for seed in range(30):
        log_weight_N = np.sort(pareto_log_weights(0.2, num_samples, seed))
        log_weight_N[middle - num_tail : middle] = log_weight_N[middle - 1]
        estimates.append(pareto_k(log_weight_N))
    # arviz-stats holds the estimate to 0.5 with the weight of ten more values.
    held = (0.2 * (num_tail // 2) + 0.5 * 10) / (num_tail // 2 + 10)
    assert np.mean(estimates) == pytest.approx(held, abs=0.12)


def test_the_threshold() -> None:
    assert pareto_k_threshold(100) == pytest.approx(0.5)
    assert pareto_k_threshold(1000) == pytest.approx(2 / 3)
    assert pareto_k_threshold(10**5) == 0.7
    with pytest.raises(UserError, match="num_samples = 1"):
        pareto_k_threshold(1)


@pytest.mark.parametrize("bad", [[], [0.0, math.nan], [0.0, INFINITY], [-INFINITY, -INFINITY]])
def test_weights_without_an_estimate_are_refused(bad: list[float]) -> None:
    for function in (effective_sample_size, pareto_k, lambda weights: resample(weights, 0.5)):
        with pytest.raises(UserError, match="log_weight"):
            function(bad)


def test_k_hat_takes_one_prefix_at_a_time() -> None:
    with pytest.raises(UserError, match="one prefix"):
        pareto_k(torch.zeros(2, 100))


def test_read_only_arrays_are_taken_without_a_warning() -> None:
    energy_N = np.arange(5, dtype=np.float32)
    energy_N.flags.writeable = False
    assert effective_sample_size(log_weight(energy_N)) == effective_sample_size(-energy_N)
