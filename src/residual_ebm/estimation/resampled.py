"""log P of a text under what importance resampling writes: a bound at every n, for every energy.

The sampler draws n + 1 proposals from P_LM and keeps one with probability in proportion to its
weight w = exp(-E). What it writes has a distribution of its own, which is the joint model only for
large n. With x_1 ... x_n drawn from P_LM,

    Q(x) = P_LM(x) E[ w(x) / Z' ],    Z' = (w(x) + w_1 + ... + w_n) / (n + 1)

It adds up to 1, because the shares of n + 1 proposals do. By Jensen's inequality

    log Q(x)  >=  E[ log P_LM(x) + log w(x) - log Z' ]

so it is enough to count the text itself among the proposals (Lawson et al. 2019). Unlike the bounds
of the joint model this needs neither large n nor light weights: an energy whose weights are too
heavy for n proposals gains less, at most log(n + 1). It says nothing of the joint model's own
perplexity, which is higher than Q's where an energy is too sure of itself. The mean of
log w - log Z' over real text is a lower bound of KL(data || P_LM) as well (InfoNCE, van den Oord et
al. 2018).

Shapes: N samples of one prefix, S disjoint subsets of them. In float64.
"""

import math

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from residual_ebm.estimation.importance import checked_log_weight
from residual_ebm.estimation.partition import disjoint_subsets


def resampled_log_partition(
    log_weight_N: Tensor | ArrayLike, log_weight: float, subset_size: int | None = None
) -> float:
    """log Z' of a text with this log-weight; of subsets of the samples their mean."""
    log_weight_N = checked_log_weight(log_weight_N)
    num_samples = log_weight_N.shape[-1] if subset_size is None else subset_size
    total_S = disjoint_subsets(log_weight_N, num_samples).logsumexp(dim=-1)
    with_text_S = torch.logaddexp(total_S, torch.tensor(log_weight, dtype=torch.float64))
    return float(with_text_S.mean()) - math.log(num_samples + 1)
