"""Laws of the bounds of log Z, on distributions small enough to enumerate every set of samples."""

import itertools
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from residual_ebm.errors import UserError
from residual_ebm.estimation.importance import (
    effective_sample_size,
    log_weight,
    pareto_k,
    pareto_k_threshold,
)
from residual_ebm.estimation.partition import (
    LogPartitionBounds,
    bounds_on_disjoint_subsets,
    log_partition_bounds,
)

INFINITY = math.inf
# The same examples every time, and no clock: the machine may be busy.
fixed = settings(derandomize=True, deadline=None)
eighths = st.integers(-8 * 300, 8 * 300).map(lambda i: i / 8)


def exact_bounds(log_weight_N: list[float]) -> tuple[float, float]:
    """The definition, each left-out sum added up on its own, with 700 digits: O(n^2)."""
    with localcontext() as context:
        context.prec = 700
        weight_N = [Decimal(value).exp() for value in log_weight_N]
        n = len(weight_N)
        lower = (sum(weight_N, Decimal(0)) / n).ln()
        left_out = [
            (sum(weight_N[:i] + weight_N[i + 1 :], Decimal(0)) / (n - 1)).ln() for i in range(n)
        ]
        return float(lower), float(
            (2 * n - 1) * lower - 2 * (n - 1) * sum(left_out, Decimal(0)) / n
        )


def expected_bounds(prob_V: Tensor, log_weight_V: Tensor, num_samples: int) -> LogPartitionBounds:
    """Expectation over every tuple of samples of a distribution on V points, by enumeration."""
    points = range(len(prob_V))
    tuples = torch.tensor(list(itertools.product(points, repeat=num_samples)))
    prob = prob_V[tuples].prod(dim=-1)
    lower, upper = log_partition_bounds(log_weight_V[tuples])
    return LogPartitionBounds((prob * lower).sum(), (prob * upper).sum())


def expected_two_point_bounds(
    rare_prob: float, rare_log_weight: float, num_samples: int
) -> LogPartitionBounds:
    """The same for a weight of 1 and a rarer one: only the number of rare ones counts."""
    hits = torch.arange(num_samples + 1)
    log_weight_HN = rare_log_weight * (torch.arange(num_samples) < hits[:, None]).double()
    prob_H = torch.from_numpy(stats.binom.pmf(hits.numpy(), num_samples, rare_prob))
    lower_H, upper_H = log_partition_bounds(log_weight_HN)
    return LogPartitionBounds((prob_H * lower_H).sum(), (prob_H * upper_H).sum())


@pytest.mark.parametrize("num_samples", [2, 3, 1000, 100_000])
def test_zero_energy_has_log_partition_zero(num_samples: int) -> None:
    lower, upper = log_partition_bounds(log_weight(torch.zeros(num_samples)))
    assert lower.item() == pytest.approx(0, abs=1e-9)
    assert upper.item() == pytest.approx(0, abs=1e-9)


@fixed
@given(st.lists(eighths, min_size=2, max_size=40), st.integers(-1000, 1000))
def test_adding_a_constant_to_the_energy_moves_log_z_by_minus_it(
    energy_N: list[float], constant: int
) -> None:
    before = log_partition_bounds(log_weight(energy_N))
    after = log_partition_bounds(log_weight([energy + constant for energy in energy_N]))
    assert after.lower.item() == pytest.approx(before.lower.item() - constant, abs=1e-9)
    assert after.upper.item() == pytest.approx(before.upper.item() - constant, abs=1e-9)


@settings(fixed, max_examples=30)
@given(
    st.lists(st.floats(0.05, 1), min_size=3, max_size=3),
    st.lists(st.floats(-12, 12), min_size=3, max_size=3),
)
def test_expected_lower_is_below_log_z_for_every_n(
    mass: list[float], log_weights: list[float]
) -> None:
    prob_V = torch.tensor(mass, dtype=torch.float64) / sum(mass)
    log_weight_V = torch.tensor(log_weights, dtype=torch.float64)
    log_z = (prob_V.log() + log_weight_V).logsumexp(0)
    previous = torch.tensor(-INFINITY)
    for num_samples in range(2, 7):
        expected = expected_bounds(prob_V, log_weight_V, num_samples).lower
        # It also rises with n: more samples never make the expected estimate worse.
        assert previous - 1e-12 <= expected <= log_z + 1e-12
        previous = expected


def test_the_lower_estimate_is_unbiased_outside_the_logarithm() -> None:
    prob_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    weight_V = torch.tensor([1.0, 4.0, 0.1], dtype=torch.float64)
    for num_samples in (2, 5):
        tuples = torch.tensor(list(itertools.product(range(3), repeat=num_samples)))
        mean_weight = log_partition_bounds(weight_V.log()[tuples]).lower.exp()
        expected = (prob_V[tuples].prod(dim=-1) * mean_weight).sum()
        assert expected.item() == pytest.approx((prob_V * weight_V).sum().item(), rel=1e-12)
        assert expected_bounds(prob_V, weight_V.log(), num_samples).lower < expected.log()


@fixed
@given(st.lists(st.floats(-1000, 1000), min_size=2, max_size=60))
def test_upper_is_never_below_lower(log_weight_N: list[float]) -> None:
    lower, upper = log_partition_bounds(log_weight_N)
    assert upper >= lower
    assert upper.isfinite()


@fixed
@given(st.integers(2, 3000), st.floats(0, 1e-6), st.integers(0, 2**32))
def test_upper_is_never_below_lower_when_weights_are_nearly_equal(
    num_samples: int, spread: float, seed: int
) -> None:
    noise_N = torch.from_numpy(np.random.default_rng(seed).standard_normal(num_samples))
    lower, upper = log_partition_bounds(7.0 + spread * noise_N)
    assert upper >= lower


@pytest.mark.parametrize("num_samples", [50, 400])
def test_expected_upper_is_above_log_z_once_n_is_large(num_samples: int) -> None:
    rare_prob, rare_weight = 0.3, 5.0
    mean = 1 + rare_prob * (rare_weight - 1)
    variance = rare_prob * (1 - rare_prob) * (rare_weight - 1) ** 2
    lower, upper = expected_two_point_bounds(rare_prob, math.log(rare_weight), num_samples)
    log_z = math.log(mean)
    assert lower.item() < log_z < upper.item()
    # The paper's proof: to first order the two lie mu_2 / (2 mu^2 n) below and above log Z.
    first_order = variance / (2 * mean**2 * num_samples)
    assert log_z - lower.item() == pytest.approx(first_order, rel=0.1)
    assert upper.item() - log_z == pytest.approx(first_order, rel=0.1)


def test_a_rare_huge_weight_breaks_both_bounds_at_small_n() -> None:
    # One sample in a thousand is worth e^12: a hundred samples mostly miss it.
    log_z = math.log(0.999 + 0.001 * math.exp(12))
    lower, upper = expected_two_point_bounds(0.001, 12.0, num_samples=100)
    assert lower <= upper < log_z - 1
    # A hundred samples that did meet it once are flagged by every diagnostic.
    log_weight_N = torch.tensor([12.0] + [0.0] * 99)
    assert pareto_k(log_weight_N) > pareto_k_threshold(100)
    assert effective_sample_size(log_weight_N) < 1.01
    # A hundred that missed it look perfect: only more samples can tell.
    assert pareto_k(torch.zeros(100)) <= pareto_k_threshold(100)
    assert expected_two_point_bounds(0.001, 12.0, num_samples=2000).upper > upper + 1


def test_heavy_weights_break_the_upper_bound_and_the_diagnostics_warn() -> None:
    # Pareto weights of shape 0.9 have Z = 1 / (1 - 0.9); shape 0.1 for comparison.
    num_prefixes, num_samples = 300, 1000
    exponential_PN = np.random.default_rng(0).exponential(size=(num_prefixes, num_samples))
    share_flagged, mean_size, mean_gap, error = {}, {}, {}, {}
    for k in (0.1, 0.9):
        log_weight_PN = torch.from_numpy(k * exponential_PN)
        upper_P = log_partition_bounds(log_weight_PN).upper + math.log(1 - k)
        mean_gap[k], error[k] = upper_P.mean().item(), upper_P.std().item() / num_prefixes**0.5
        flags = [pareto_k(row) > pareto_k_threshold(num_samples) for row in log_weight_PN]
        share_flagged[k] = np.mean(flags)
        mean_size[k] = effective_sample_size(log_weight_PN).mean().item()
    assert abs(mean_gap[0.1]) < 5 * error[0.1] < 0.01
    assert mean_gap[0.9] < -5 * error[0.9]
    assert share_flagged[0.1] == 0
    assert share_flagged[0.9] > 0.8
    assert mean_size[0.1] > 0.9 * num_samples
    assert mean_size[0.9] < 0.1 * num_samples


@pytest.mark.parametrize(
    "log_weight_N",
    [
        [0.0, 0.0],
        [0.0, 1.0],
        [0.0, -40.0, -41.0],  # 1 - p is 1e-17: lost if taken as a difference
        [0.0, -200.0, -203.0, -200.5],
        [300.0, -300.0],
        [600.0, -600.0, -601.0],  # further apart than the smallest float64 weight
        [5.0, 5.0, -100.0],  # two of one half each
        [0.0, math.log1p(-1e-9), -30.0],
        list(np.linspace(-100.0, 100.0, 50)),
        list(np.linspace(0.0, 1e-5, 40)),
        [-1000.0 + 0.01 * i for i in range(30)],
    ],
)
def test_leave_one_out_equals_its_definition(log_weight_N: list[float]) -> None:
    lower, upper = log_partition_bounds(log_weight_N)
    exact_lower, exact_upper = exact_bounds(log_weight_N)
    assert lower.item() == pytest.approx(exact_lower, rel=1e-14, abs=1e-12)
    assert upper.item() == pytest.approx(exact_upper, rel=1e-14, abs=1e-12)
    # The gap on its own: a nearly constant energy has one of 1e-11, next to a log Z of any size.
    gap = (upper - lower).item()
    assert gap == pytest.approx(exact_upper - exact_lower, rel=1e-9, abs=1e-12)


@settings(fixed, max_examples=30)
@given(st.lists(eighths, min_size=2, max_size=12))
def test_leave_one_out_equals_its_definition_on_any_weights(log_weight_N: list[float]) -> None:
    lower, upper = log_partition_bounds(log_weight_N)
    exact_lower, exact_upper = exact_bounds(log_weight_N)
    assert lower.item() == pytest.approx(exact_lower, rel=1e-13, abs=1e-11)
    assert upper.item() == pytest.approx(exact_upper, rel=1e-13, abs=1e-11)


def test_a_hundred_thousand_samples_where_float32_fails() -> None:
    copies, num_levels = 400, 250
    n = copies * num_levels
    level_L = torch.linspace(-0.5, 0.5, num_levels, dtype=torch.float32)
    log_weight_N = level_L.repeat(copies)
    # The definition taken literally, in float32: rounding times 2(n - 1) buries the answer.
    total = log_weight_N.exp().sum()
    naive_lower = (total / n).log()
    left_out = ((total - log_weight_N.exp()) / (n - 1)).log().mean()
    naive_upper = (2 * n - 1) * naive_lower - 2 * (n - 1) * left_out
    # The definition in 60 digits; equal weights leave equal sums behind.
    with localcontext() as context:
        context.prec = 60
        weight_L = [Decimal(level).exp() for level in level_L.tolist()]
        exact_total = copies * sum(weight_L, Decimal(0))
        exact_lower = (exact_total / n).ln()
        left_out_L = [((exact_total - weight) / (n - 1)).ln() for weight in weight_L]
        exact_left = sum(left_out_L, Decimal(0)) / num_levels
        exact_upper = (2 * n - 1) * exact_lower - 2 * (n - 1) * exact_left
    assert abs(naive_upper.item() - float(exact_upper)) > 1e-3
    lower, upper = log_partition_bounds(log_weight_N)
    assert lower.dtype == upper.dtype == torch.float64
    assert lower.item() == pytest.approx(float(exact_lower), abs=1e-12)
    assert upper.item() == pytest.approx(float(exact_upper), abs=1e-12)
    assert (upper - lower).item() == pytest.approx(
        float(exact_upper - exact_lower), rel=1e-8, abs=0
    )


def test_every_prefix_of_a_batch_gets_its_own_bounds() -> None:
    log_weight_PN = torch.from_numpy(np.random.default_rng(0).normal(0, 30, size=(3, 4, 17)))
    lower, upper = log_partition_bounds(log_weight_PN)
    assert lower.shape == upper.shape == (3, 4)
    for index in itertools.product(range(3), range(4)):
        alone = log_partition_bounds(log_weight_PN[index])
        assert lower[index].item() == pytest.approx(alone.lower.item(), rel=1e-14)
        assert upper[index].item() == pytest.approx(alone.upper.item(), rel=1e-14)


def test_one_nonzero_weight_leaves_no_upper_bound() -> None:
    lower, upper = log_partition_bounds([-INFINITY, 3.0, -INFINITY])
    assert lower.item() == pytest.approx(3 - math.log(3), abs=1e-12)
    assert upper.item() == INFINITY
    # Two are enough, and zero weights still count as samples.
    _, upper = log_partition_bounds([-INFINITY, 0.0, 0.0, -INFINITY])
    expected = 7 * math.log(2 / 4) - 6 * (2 * math.log(2 / 3) + 2 * math.log(1 / 3)) / 4
    assert upper.item() == pytest.approx(expected, abs=1e-12)


def test_subsets_are_disjoint_and_their_bounds_are_averaged() -> None:
    log_weight_N = torch.tensor([0.0, 1.0, 5.0, 2.0, -3.0, 4.0, 100.0], dtype=torch.float64)
    bounds = bounds_on_disjoint_subsets(log_weight_N, 3)
    first, second = (log_partition_bounds(log_weight_N[part]) for part in ([0, 1, 2], [3, 4, 5]))
    assert bounds.lower.item() == pytest.approx(((first.lower + second.lower) / 2).item())
    assert bounds.upper.item() == pytest.approx(((first.upper + second.upper) / 2).item())
    whole = bounds_on_disjoint_subsets(log_weight_N, 7)
    assert torch.equal(whole.upper, log_partition_bounds(log_weight_N).upper)
    batch = bounds_on_disjoint_subsets(torch.stack([log_weight_N, log_weight_N + 1]), 3)
    assert (batch.lower[1] - batch.lower[0]).item() == pytest.approx(1)


def test_heavy_weights_still_move_between_subset_sizes() -> None:
    log_weight_PN = torch.from_numpy(0.95 * np.random.default_rng(2).exponential(size=(200, 1024)))
    means = [
        bounds_on_disjoint_subsets(log_weight_PN, size).lower.mean().item()
        for size in (256, 512, 1024)
    ]
    assert means[0] + 0.05 < means[1] < means[2] - 0.05


@pytest.mark.parametrize(
    ("log_weight_N", "message"),
    [
        ([0.0], "num_samples = 1: .*at least 2"),
        ([0.0, math.nan], "log_weight = nan"),
        ([0.0, INFINITY], "log_weight = inf"),
        ([[0.0, 1.0], [-INFINITY, -INFINITY]], "log_weight = -inf for every sample"),
    ],
)
def test_weights_without_bounds_are_refused(log_weight_N: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        log_partition_bounds(log_weight_N)


@pytest.mark.parametrize("subset_size", [0, 1, 6])
def test_subset_sizes_outside_the_samples_are_refused(subset_size: int) -> None:
    with pytest.raises(UserError, match=f"subset_size = {subset_size}"):
        bounds_on_disjoint_subsets(torch.zeros(5), subset_size)
