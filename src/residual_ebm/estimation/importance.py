"""Importance weights of samples from P_LM: their definition, their health and resampling by them.

A continuation x ~ P_LM stands for the joint model P = P_LM exp(-E) / Z with the weight

    w(x) = exp(-E(x)),                 log_weight = -energy                        (paper, Eq. 1)

Resampling draws index i with probability w_i / sum_j w_j (paper, section 3.3, Algorithm 1). Two
diagnostics say whether n samples carry the estimate (paper, section 3.2, warns that its bounds are
asymptotic; neither diagnostic is in it):

    effective sample size = (sum_i w_i)^2 / sum_i w_i^2, between 1 and n
    Pareto k-hat = shape of a generalised Pareto distribution fitted to the largest weights; past
                   min(1 - 1 / log10 n, 0.7) the mean of n weights is not to be trusted
                   (Vehtari et al., Pareto Smoothed Importance Sampling, JMLR 2024)

Shapes: N samples of one prefix, always the last dimension (leading ones, if any, are prefixes);
M uniform numbers. Everything is computed in float64: energies arrive in float32 or bfloat16, and
sums over 100,000 weights lose what matters there.
"""

import math

import numpy as np
import torch
from arviz_stats.base import array_stats
from numpy.typing import ArrayLike
from torch import Tensor

from residual_ebm.errors import UserError

# Fewer exceedances do not determine the two parameters of a tail (arviz-stats refuses too).
_MIN_TAIL = 5


def log_weight(energy: Tensor | ArrayLike) -> Tensor:
    """The log importance weight of samples from P_LM; no other place defines it."""
    return -_float64(energy)


def energy_of(log_weight_N: Tensor | ArrayLike) -> Tensor:
    """The energy that a log-weight was made of."""
    return -_float64(log_weight_N)


def checked_log_weight(log_weight_N: Tensor | ArrayLike) -> Tensor:
    """The weights in float64, or an error: no estimate exists when they are nan, +inf or all zero.

    A weight of zero (-inf, an infinite energy) is a legal value as long as some weight is not zero.
    """
    checked_N = _float64(log_weight_N)
    if checked_N.ndim == 0 or checked_N.shape[-1] == 0:
        raise UserError("log_weight", f"shape {tuple(checked_N.shape)}", "give at least one sample")
    if checked_N.isnan().any():
        raise UserError("log_weight", "nan", "an energy is nan; train it again or rescore")
    largest = checked_N.amax(dim=-1)
    if largest.isposinf().any():
        raise UserError("log_weight", "inf", "an energy is -inf; only finite energies have a Z")
    if largest.isneginf().any():
        raise UserError("log_weight", "-inf for every sample", "the energy forbids all of them")
    return checked_N


def effective_sample_size(log_weight_N: Tensor | ArrayLike) -> Tensor:
    """(sum w)^2 / sum w^2 over the last dimension: how many equal weights are worth as much."""
    log_weight_N = checked_log_weight(log_weight_N)
    # Relative to the largest weight: no overflow, and exactly n when all are equal.
    ratio_N = (log_weight_N - log_weight_N.amax(dim=-1, keepdim=True)).exp()
    return ratio_N.sum(dim=-1).square() / ratio_N.square().sum(dim=-1)


def pareto_k(log_weight_N: Tensor | ArrayLike) -> float:
    """Pareto k-hat of the weights of one prefix; flag the prefix when it is > the threshold.

    Never nan, so that this comparison always answers:
    -inf  there is no tail that could be heavy: all weights are equal (zero energy), or those above
          the bulk are one value that was drawn five times or more (a short continuation).
    +inf  no tail can be fitted: too few samples (fewer than 25 unequal ones), or fewer than five
          weights above the bulk, e.g. one weight that dwarfs all others.
    """
    log_weight_N = checked_log_weight(log_weight_N)
    if log_weight_N.ndim != 1:
        raise UserError(
            "log_weight", f"shape {tuple(log_weight_N.shape)}", "k-hat is of one prefix at a time"
        )
    log_ratio_N = (log_weight_N - log_weight_N.max()).numpy(force=True)
    num_samples = len(log_ratio_N)
    # Compared as weights, not as logs: differences below rounding are no tail.
    sorted_ratio_N = np.sort(np.exp(log_ratio_N))
    if sorted_ratio_N[0] == sorted_ratio_N[-1]:
        return -math.inf
    # The length of the tail as psislw takes it at r_eff = 1.
    num_tail = int(3 * math.sqrt(num_samples)) if num_samples > 225 else num_samples // 5
    cutoff = sorted_ratio_N[num_samples - num_tail - 1]
    exceedances = sorted_ratio_N[sorted_ratio_N > cutoff]
    if num_tail < _MIN_TAIL or 0 < len(exceedances) < _MIN_TAIL:
        return math.inf
    if len(exceedances) == 0 or exceedances[0] == exceedances[-1]:
        return -math.inf
    # Ties with the cutoff (short continuations that were drawn many times) are exceedances of zero,
    # on which the fit breaks down. r_eff is psislw's only handle on the length of the tail:
    # it takes floor(3 sqrt(n / r_eff)) values.
    tied = len(exceedances) < num_tail
    r_eff = 9 * num_samples / (len(exceedances) + 0.5) ** 2 if tied else 1.0
    # psislw wants log-likelihoods, the negative of log weights: it negates its argument. (Its
    # sibling pareto_khat(log_weights=True) fits the logs as if they were weights.)
    with np.errstate(all="ignore"):
        _, k = array_stats.psislw(-log_ratio_N, r_eff=r_eff)
    return float(k) if np.isfinite(k) else math.inf


def pareto_k_threshold(num_samples: int) -> float:
    """The largest k-hat at which n samples still suffice: min(1 - 1 / log10 n, 0.7)."""
    if num_samples < 2:
        raise UserError("num_samples", num_samples, "k-hat needs at least 2 samples")
    return min(1 - 1 / math.log10(num_samples), 0.7)


def resample(log_weight_N: Tensor | ArrayLike, uniform: float | Tensor | ArrayLike) -> Tensor:
    """Indices drawn in proportion to the weights: the first i with w_0 + ... + w_i > u * total.

    `uniform` is in [0, 1], both ends included. A scalar gives one index for every prefix; otherwise
    it has the leading dimensions of the weights and a last one of M draws, (.., N), (.., M) ->
    (.., M). The result is int64 and never names a sample of zero weight.
    """
    log_weight_N = checked_log_weight(log_weight_N)
    uniform_M = _float64(uniform).to(log_weight_N.device)
    if not ((uniform_M >= 0) & (uniform_M <= 1)).all():
        raise UserError("uniform", "a number outside [0, 1]", "give uniform numbers from [0, 1]")
    one_each = uniform_M.ndim == 0
    if one_each:
        uniform_M = uniform_M.expand(*log_weight_N.shape[:-1], 1)
    cdf_N = (log_weight_N - log_weight_N.amax(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
    total = cdf_N[..., -1:].contiguous()
    # Where the cdf steps over u * total the weight is positive, so u = 0 passes leading zeros by.
    index_M = torch.searchsorted(cdf_N, (uniform_M * total).contiguous(), right=True)
    # At u = 1, or when u * total rounds up to it, nothing lies above: take the cdf's last step.
    index_M = index_M.minimum(torch.searchsorted(cdf_N, total))
    return index_M.squeeze(-1) if one_each else index_M


def _float64(values: Tensor | ArrayLike) -> Tensor:
    if not isinstance(values, Tensor):
        # A copy, because Arrow hands out read-only arrays and torch warns of those.
        values = torch.from_numpy(np.array(values, dtype=np.float64))
    return values.to(torch.float64)
