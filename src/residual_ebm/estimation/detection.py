"""An energy as a detector of machine-written text: it is the log-odds of a classifier.

With as many positives as negatives, P(real | x) = 1 / (1 + exp(E(x))). Here each class has half of
the weight, however many negatives a positive has, so the log-odds need no correction.

    AUC          P(E(real) < E(sample)), ties counting one half
    calibration  where the detector says p, is a share p real?

Shapes: P energies of real text, M of samples, K thresholds. NumPy, float64.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from scipy.stats import rankdata

from residual_ebm.errors import UserError

Floats = NDArray[np.float64]
_NUM_BINS = 10


@dataclass(frozen=True)
class Roc:
    """Share of samples taken for real against share of real text recognised, by threshold."""

    false_positive_K: Floats
    true_positive_K: Floats


@dataclass(frozen=True)
class CalibrationBin:
    """Texts whose predicted probability of being real lies in one tenth."""

    weight: float  # of all, both classes alike
    predicted: float  # mean
    observed: float  # share that is real


@dataclass(frozen=True)
class Calibration:
    bins: list[CalibrationBin]  # without those that hold nothing
    error: float  # mean distance of predicted and observed, by weight


def auc(real_energy_P: ArrayLike, sample_energy_M: ArrayLike) -> float:
    """The chance that a real text has a lower energy than a sample."""
    real_P, sample_M = _both(real_energy_P, sample_energy_M)
    rank = rankdata(np.concatenate([sample_M, real_P]))  # ties share their mean rank
    above = rank[: len(sample_M)].sum() - len(sample_M) * (len(sample_M) + 1) / 2
    return float(above / (len(sample_M) * len(real_P)))


def roc(real_energy_P: ArrayLike, sample_energy_M: ArrayLike) -> Roc:
    """The whole curve, from nothing taken for real to everything."""
    real_P, sample_M = (np.sort(part) for part in _both(real_energy_P, sample_energy_M))
    threshold_K = np.unique(np.concatenate([real_P, sample_M]))
    shares = [
        np.concatenate([[0.0], np.searchsorted(part, threshold_K, side="right") / len(part)])
        for part in (sample_M, real_P)
    ]
    return Roc(*shares)


def calibration(
    real_energy_P: ArrayLike, sample_energy_M: ArrayLike, num_bins: int = _NUM_BINS
) -> Calibration:
    """Whether the energy's probabilities come true."""
    real_P, sample_M = _both(real_energy_P, sample_energy_M)
    probability = expit(-np.concatenate([real_P, sample_M]))
    weight = np.repeat([0.5 / len(real_P), 0.5 / len(sample_M)], [len(real_P), len(sample_M)])
    is_real = np.arange(len(probability)) < len(real_P)
    number = np.minimum((probability * num_bins).astype(np.int64), num_bins - 1)
    bins = []
    for chosen in (number == wanted for wanted in range(num_bins)):
        total = float(weight[chosen].sum())
        if total > 0:
            predicted = float((weight * probability)[chosen].sum() / total)
            observed = float(weight[chosen & is_real].sum() / total)
            bins.append(CalibrationBin(total, predicted, observed))
    error = sum(entry.weight * abs(entry.predicted - entry.observed) for entry in bins)
    return Calibration(bins, float(error))


def rank_among(real_energy: float, sample_energy_M: ArrayLike) -> float:
    """The share of samples with a lower energy than the real text, ties counting one half."""
    real_1, sample_M = _both([real_energy], sample_energy_M)
    return 1.0 - auc(real_1, sample_M)


def _both(real_energy_P: ArrayLike, sample_energy_M: ArrayLike) -> tuple[Floats, Floats]:
    real_P = np.asarray(real_energy_P, dtype=np.float64).reshape(-1)
    sample_M = np.asarray(sample_energy_M, dtype=np.float64).reshape(-1)
    for field, values in (("real_energy", real_P), ("sample_energy", sample_M)):
        if not len(values) or np.isnan(values).any():
            raise UserError(field, "none" if not len(values) else "nan", "give energies of both")
    return real_P, sample_M
