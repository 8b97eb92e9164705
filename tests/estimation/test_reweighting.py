"""Who gains and who loses by an energy, on weights whose answer is known."""

import itertools
import math

import numpy as np
import pytest

from residual_ebm.estimation.resampled import resampled_log_partition
from residual_ebm.estimation.reweighting import mass_curve, split_gains

EVEN = 400  # proposals: so many that the text itself hardly counts among them


def gains_of(weights: list[float], text: float) -> tuple[float, float, float]:
    found = split_gains([np.log(weights)], np.log([text]))
    return tuple(float(one_P[0]) for one_P in found)  # type: ignore[return-value]


def test_equal_weights_gain_nothing() -> None:
    assert gains_of([3.0] * 8, 3.0) == pytest.approx((0, 0, 0), abs=1e-12)


def test_both_is_what_resampling_gains() -> None:
    log_weight_N = np.log([0.2, 1.0, 7.0, 0.5])
    found = split_gains([log_weight_N], np.array([0.9]))
    assert found.both_P[0] == pytest.approx(0.9 - resampled_log_partition(log_weight_N, 0.9))


def test_weights_are_cut_at_the_mean_of_all() -> None:
    # 1, 1, 1, 9 and the text's 3: their mean is 3.
    both, demoting, promoting = gains_of([1.0, 9.0, 1.0, 1.0], 3.0)
    assert both == pytest.approx(math.log(3 / 3))
    assert demoting == pytest.approx(math.log(3 / ((1 + 3 + 1 + 1 + 3) / 5)))
    assert promoting == pytest.approx(math.log(3 / ((3 + 9 + 3 + 3 + 3) / 5)))


@pytest.mark.parametrize(
    ("share_of_bad", "scale"), [(0.1, 0.5), (0.1, 2.0), (0.5, 0.5), (0.5, 2.0), (0.9, 1.0)]
)
def test_demoting_artefacts_is_demoting_even_where_most_are_artefacts(
    share_of_bad: float, scale: float
) -> None:
    bad = int(EVEN * share_of_bad)
    weights = [math.exp(-5 * scale)] * bad + [1.0] * (EVEN - bad)
    both, demoting, promoting = gains_of(weights, 1.0)
    assert both >= demoting > promoting


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_promoting_a_few_is_promoting(scale: float) -> None:
    few = EVEN // 20
    both, demoting, promoting = gains_of(
        [math.exp(3 * scale)] * few + [1.0] * (EVEN - few), math.exp(3 * scale)
    )
    assert both >= promoting > demoting


@pytest.mark.parametrize("which", ["both_P", "demoting_P", "promoting_P"])
def test_no_gain_is_more_than_the_sampler_has(which: str) -> None:
    """Three texts, all pairs of two proposals enumerated: the gain, averaged over proposals, is at
    most log of what keeping one of three by the cut weights really writes."""
    chance = np.array([0.5, 0.3, 0.2])
    log_weight = np.log([0.2, 1.5, 3.0])
    cut = {
        "both_P": lambda weights: weights,
        "demoting_P": lambda weights: np.minimum(weights, weights.mean()),
        "promoting_P": lambda weights: np.maximum(weights, weights.mean()),
    }[which]
    written = np.zeros(3)
    for texts in itertools.product(range(3), repeat=3):
        kept = cut(np.exp(log_weight[list(texts)]))
        for text, share in zip(texts, kept / kept.sum(), strict=True):
            written[text] += share * chance[list(texts)].prod()
    assert written.sum() == pytest.approx(1)
    for text in range(3):
        gain = sum(
            chance[list(pair)].prod()
            * getattr(split_gains([log_weight[list(pair)]], log_weight[[text]]), which)[0]
            for pair in itertools.product(range(3), repeat=2)
        )
        assert gain <= math.log(written[text] / chance[text]) + 1e-12


def test_the_lightest_get_their_share() -> None:
    assert mass_curve([np.full(8, -3.0), np.zeros(5)], 6).mass_K == pytest.approx(
        np.linspace(0, 1, 6)
    )
    found = mass_curve([np.log([1.0, 9.0, 1.0, 1.0])], num_points=5)
    assert found.mass_K == pytest.approx(np.array([0, 1, 2, 3, 12]) / 12)
    assert found.share_K == pytest.approx([0, 0.25, 0.5, 0.75, 1])


def test_a_prefix_counts_once_and_its_partition_function_not_at_all() -> None:
    one, other = np.log([1.0, 3.0]), np.log([0.1, 0.1, 0.1, 0.7])
    apart = [mass_curve([values], num_points=3).mass_K for values in (one, other)]
    both = mass_curve([one + 700.0, other - 700.0], num_points=3)
    assert both.mass_K == pytest.approx((apart[0] + apart[1]) / 2)
    gains = split_gains([one + 700.0, other - 700.0], np.array([700.0, -700.0]))
    for moved, plain in zip(gains, split_gains([one, other], np.zeros(2)), strict=True):
        assert moved == pytest.approx(plain)
