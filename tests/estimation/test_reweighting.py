"""Who gets the joint model's mass, on weights whose answer is known."""

import numpy as np
import pytest

from residual_ebm.estimation.reweighting import reweighting


def test_equal_weights_promote_nobody() -> None:
    found = reweighting([np.full(8, -3.0), np.zeros(5)], num_points=6)
    assert found.mass_K == pytest.approx(found.share_K)
    # Not more than their average; rounding must not make it so either.
    assert found.promoted_P.tolist() == [0.0, 0.0]


def test_demoting_the_worst_leaves_most_above_average() -> None:
    found = reweighting([np.log([0.001, 1.0, 1.0, 1.0])], num_points=5)
    assert found.promoted_P.tolist() == [0.75]
    assert found.mass_K == pytest.approx(np.array([0, 0.001, 1.001, 2.001, 3.001]) / 3.001)


def test_promoting_a_few_leaves_most_below_average() -> None:
    log_weight_N = np.log([1.0, 9.0, 1.0, 1.0])
    found = reweighting([log_weight_N], num_points=5)
    assert found.promoted_P.tolist() == [0.25]
    assert found.mass_K == pytest.approx(np.array([0, 1, 2, 3, 12]) / 12)


def test_a_prefix_counts_once_and_its_partition_function_not_at_all() -> None:
    one, other = np.log([1.0, 3.0]), np.log([0.1, 0.1, 0.1, 0.7])
    apart = [reweighting([values], num_points=3) for values in (one, other)]
    both = reweighting([one + 700.0, other - 700.0], num_points=3)
    assert both.mass_K == pytest.approx((apart[0].mass_K + apart[1].mass_K) / 2)
    assert both.promoted_P.tolist() == [0.5, 0.25]
