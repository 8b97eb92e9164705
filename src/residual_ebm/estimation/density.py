"""Densities of log-probabilities: are samples as likely as real text? (Section 4.3, Figure 3.)

If a model were the distribution of the text, its own samples and the text would have the same
distribution of log-probs under it. The difference of their means is one number for how far off it
is; being a mean over prefixes, it has a bootstrap interval over documents.

Shapes: P prefixes, D samples of each, K points of a curve. NumPy, float64.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import gaussian_kde

from residual_ebm.errors import UserError
from residual_ebm.estimation.bootstrap import Interval, bootstrap_mean

Floats = NDArray[np.float64]
_NUM_POINTS = 121


@dataclass(frozen=True)
class Densities:
    """Curves over log-probs, and how far apart real text and samples are."""

    log_prob_K: Floats
    real_K: Floats
    sample_K: Floats
    difference: float  # mean of samples - mean of real text, in nats
    interval: Interval


def log_prob_densities(
    real_P: ArrayLike,
    sample_PD: ArrayLike,
    document_P: ArrayLike,
    *,
    num_resamples: int,
    seed: int,
    num_points: int = _NUM_POINTS,
) -> Densities:
    """Of real continuations, and of samples that continue the same prefixes."""
    real_P = np.asarray(real_P, dtype=np.float64)
    sample_PD = np.asarray(sample_PD, dtype=np.float64)
    if real_P.ndim != 1 or sample_PD.ndim != 2 or len(real_P) != len(sample_PD):
        shapes = f"shapes {real_P.shape} and {sample_PD.shape}"
        raise UserError("log_prob", shapes, "give samples of each real continuation's prefix")
    difference_P = sample_PD.mean(axis=1) - real_P
    both = np.concatenate([real_P, sample_PD.reshape(-1)])
    margin = 0.1 * (both.max() - both.min()) + 1e-6
    grid_K = np.linspace(both.min() - margin, both.max() + margin, num_points)
    return Densities(
        grid_K,
        _curve(real_P, grid_K),
        _curve(sample_PD.reshape(-1), grid_K),
        float(difference_P.mean()),
        bootstrap_mean(difference_P, document_P, num_resamples=num_resamples, seed=seed),
    )


def _curve(values: Floats, grid_K: Floats) -> Floats:
    if len(values) < 2 or np.ptp(values) == 0:
        return np.full_like(grid_K, np.nan)  # one value has no density
    curve: Floats = gaussian_kde(values)(grid_K)
    return curve
