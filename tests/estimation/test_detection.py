"""AUC, ROC and calibration, against cases worked out by hand and against simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from residual_ebm.errors import UserError
from residual_ebm.estimation.detection import auc, calibration, rank_among, roc

energies = st.lists(st.integers(-5, 5), min_size=1, max_size=20)


def test_auc_by_hand() -> None:
    # Real 1 and 3; samples 2, 3 and 4. Won: 1<2 1<3 1<4 3<4, tied: 3=3; of six pairs.
    assert auc([1, 3], [2, 3, 4]) == pytest.approx(4.5 / 6)
    assert auc([0, 0], [1]) == 1.0
    assert auc([1], [0, 0]) == 0.0
    assert auc([7, 7], [7]) == 0.5


@given(energies, energies)
def test_auc_is_the_share_of_pairs_won(real: list[int], sample: list[int]) -> None:
    won = np.mean([(r < s) + 0.5 * (r == s) for r in real for s in sample])
    assert auc(real, sample) == pytest.approx(won)


@given(energies, energies)
def test_area_under_the_roc_is_the_auc(real: list[int], sample: list[int]) -> None:
    curve = roc(real, sample)
    assert (curve.false_positive_K[0], curve.true_positive_K[0]) == (0, 0)
    assert (curve.false_positive_K[-1], curve.true_positive_K[-1]) == (1, 1)
    assert (np.diff(curve.false_positive_K) >= 0).all()
    assert (np.diff(curve.true_positive_K) >= 0).all()
    area = np.trapezoid(curve.true_positive_K, curve.false_positive_K)
    assert area == pytest.approx(auc(real, sample))


def test_roc_by_hand() -> None:
    curve = roc([1, 3], [2, 3, 4])
    assert curve.true_positive_K == pytest.approx([0, 1 / 2, 1 / 2, 1, 1])
    assert curve.false_positive_K == pytest.approx([0, 0, 1 / 3, 2 / 3, 1])


def test_calibration_by_hand() -> None:
    """Two real texts at p = 0.75 and 0.25, a hundred samples at 0.25: the classes weigh alike."""
    log_odds = math.log(3)
    found = calibration([-log_odds, log_odds], [log_odds] * 100, num_bins=2)
    low, high = found.bins
    assert (low.weight, high.weight) == pytest.approx((0.75, 0.25))
    assert (low.predicted, high.predicted) == pytest.approx((0.25, 0.75))
    assert (low.observed, high.observed) == pytest.approx((1 / 3, 1.0))
    assert found.error == pytest.approx(0.75 * (1 / 3 - 1 / 4) + 0.25 * 0.25)


def test_true_log_odds_are_calibrated_and_scaled_ones_are_not() -> None:
    """Real text from N(1, 1), samples from N(-1, 1): the true log-odds of x are 2 x."""
    draw = np.random.default_rng(0)
    real, sample = draw.normal(1, 1, 20_000), draw.normal(-1, 1, 60_000)
    assert calibration(-2 * real, -2 * sample).error < 0.01
    assert calibration(-6 * real, -6 * sample).error > 0.05
    assert calibration(-0.5 * real, -0.5 * sample).error > 0.05


def test_certainty_is_in_the_outer_bins() -> None:
    found = calibration([-1000.0], [1000.0])
    assert [(entry.predicted, entry.observed) for entry in found.bins] == [(0, 0), (1, 1)]
    assert found.error == 0


def test_rank_of_a_real_text_among_samples() -> None:
    assert rank_among(2.0, [1, 2, 3, 4]) == pytest.approx(1.5 / 4)
    assert rank_among(0.0, [1, 2]) == 0.0
    assert rank_among(9.0, [1, 2]) == 1.0


@pytest.mark.parametrize("broken", [[], [math.nan]])
def test_no_energies_are_a_user_error(broken: list[float]) -> None:
    for measure in (auc, roc, calibration):
        with pytest.raises(UserError, match="real_energy"):
            measure(broken, [1.0])
        with pytest.raises(UserError, match="sample_energy"):
            measure([1.0], broken)
