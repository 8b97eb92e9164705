"""What an energy does to a language model's samples: are a few promoted, or the worst demoted?

The paper supposes the latter (its section on limitations). Sorted by weight, the samples of a
prefix say which: an energy that only demotes the worst leaves most of them a little above the
average weight, one that promotes a few leaves most of them below.

Shapes: P prefixes, N samples of a prefix, K points of a curve.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_ROUNDING = 1e-9  # equal weights are none of them above their average


class Reweighting(NamedTuple):
    """`promoted_P`: the share of a prefix's samples that weigh more than their average;
    `mass_K`: what the lightest `share_K` of them get, mean over prefixes."""

    promoted_P: np.ndarray
    share_K: np.ndarray
    mass_K: np.ndarray


def reweighting(log_weights: Sequence[np.ndarray], num_points: int) -> Reweighting:
    share_K = np.linspace(0, 1, num_points)
    promoted, masses = [], []
    for log_weight_N in log_weights:
        count = len(log_weight_N)
        normalised_N = np.sort(log_weight_N) - np.logaddexp.reduce(log_weight_N)
        promoted.append(np.mean(normalised_N > _ROUNDING - np.log(count)))
        reached = np.concatenate([[0.0], np.cumsum(np.exp(normalised_N))])
        masses.append(np.interp(share_K, np.arange(count + 1) / count, reached))
    return Reweighting(np.array(promoted), share_K, np.mean(masses, axis=0))
