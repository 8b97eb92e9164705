"""Bounds of the log partition function log Z = log E_{x ~ P_LM} exp(-E(x)) from n samples.

Paper, section 3.2, Theorem 2 (which writes Z where log Z is meant), after Nowozin 2018:

    T_n     = log (1/n) sum_i w_i,    w_i = exp(-E(x_i))
    lower   = T_n                                               E[lower] <= log Z for every n
    upper   = (2n - 1) T_n - 2(n - 1) mean_i T_{n-1}^(-i)       E[upper] >= log Z once n is large

where T_{n-1}^(-i) leaves sample i out. The upper one is a bound only asymptotically: with heavy
weights it is too low as well, so it is to be shown with the diagnostics of `importance.py` and at
several n (`bounds_on_disjoint_subsets`).

The definition multiplies a difference of nearly equal numbers by 2(n - 1). With the shares
p_i = w_i / sum_j w_j it is the same as

    upper = lower + 2(n - 1) mean_i [log(1 - 1/n) - log(1 - p_i)]

in O(n), where every term is of the size of p_i or 1/n, so the factor finds nothing to magnify.

Shapes: N samples of one prefix, always the last dimension; leading dimensions are prefixes, or
prefixes and S disjoint subsets of their samples. All in float64.
"""

import math
from typing import NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from residual_ebm.errors import UserError
from residual_ebm.estimation.importance import checked_log_weight

# Far above rounding (1e-13 at n = 100,000), far below anything a person would read off.
_ROUNDING = 1e-9


class LogPartitionBounds(NamedTuple):
    """Estimates of log Z, in nats: E[lower] <= log Z always, E[upper] >= log Z for large n."""

    lower: Tensor
    upper: Tensor


def log_partition_bounds(log_weight_N: Tensor | ArrayLike) -> LogPartitionBounds:
    """Both estimates over the last dimension; upper >= lower for every sample.

    When all weights but one are zero, leaving that one out leaves nothing: upper is +inf.
    """
    log_weight_N = checked_log_weight(log_weight_N)
    num_samples = log_weight_N.shape[-1]
    if num_samples < 2:
        raise UserError("num_samples", num_samples, "leave-one-out needs at least 2 samples")
    largest, top = log_weight_N.max(dim=-1, keepdim=True)
    log_ratio_N = log_weight_N - largest
    # Relative to the largest weight, the others sum to exp(log_rest) and all to 1 + exp(log_rest).
    log_rest = log_ratio_N.scatter(-1, top, -math.inf).logsumexp(dim=-1, keepdim=True)
    log_total = log_rest.exp().log1p()
    share_N = (log_ratio_N - log_total).exp()
    # Only the largest share can exceed one half, so only there does 1 - p cancel: the rest of the
    # sum, added up on its own, keeps every digit (p = 1 - e^-200 has none left in float64).
    log_left_N = torch.log1p(-share_N).scatter(-1, top, log_rest - log_total)
    gap = 2 * (num_samples - 1) * (math.log1p(-1 / num_samples) - log_left_N).mean(dim=-1)
    # -log(1 - p) is convex and the shares average 1/n, so by Jensen the gap is never negative;
    # what rounding takes below zero is put back. More than rounding would be a fault of ours.
    assert bool((gap >= -_ROUNDING).all()), "leave-one-out gap is negative beyond rounding"
    lower = (largest + log_total).squeeze(-1) - math.log(num_samples)
    return LogPartitionBounds(lower=lower, upper=lower + gap.clamp(min=0))


def log_partition_error(log_weight_N: Tensor | ArrayLike) -> Tensor:
    """One standard error of T_n over the last dimension, by the delta method: what other samples
    might have given. The bounds close in on each other as 1/n, this shrinks as 1/sqrt(n) only."""
    log_weight_N = checked_log_weight(log_weight_N)
    num_samples = log_weight_N.shape[-1]
    if num_samples < 2:
        raise UserError("num_samples", num_samples, "a spread needs at least 2 samples")
    ratio_N = num_samples * log_weight_N.softmax(dim=-1)  # w_i / mean w
    return ratio_N.std(dim=-1) / math.sqrt(num_samples)


def bounds_on_disjoint_subsets(
    log_weight_N: Tensor | ArrayLike, subset_size: int
) -> LogPartitionBounds:
    """What `subset_size` samples would have said: the mean bounds of n // subset_size subsets.

    Subsets that share no sample are independent, so their mean is the expectation of the bounds at
    that size with the least noise these samples allow. Shown at n/4, n/2 and n it tells whether the
    estimate still moves. A remainder that fills no subset is left out.
    """
    lower_S, upper_S = log_partition_bounds(disjoint_subsets(log_weight_N, subset_size))
    return LogPartitionBounds(lower=lower_S.mean(dim=-1), upper=upper_S.mean(dim=-1))


def disjoint_subsets(log_weight_N: Tensor | ArrayLike, subset_size: int) -> Tensor:
    """The samples as rows of `subset_size`, in their order."""
    log_weight_N = checked_log_weight(log_weight_N)
    num_samples = log_weight_N.shape[-1]
    if not 2 <= subset_size <= num_samples:
        raise UserError(
            "subset_size", subset_size, f"choose between 2 and the {num_samples} samples there are"
        )
    num_subsets = num_samples // subset_size
    return log_weight_N[..., : num_subsets * subset_size].unflatten(-1, (num_subsets, subset_size))
