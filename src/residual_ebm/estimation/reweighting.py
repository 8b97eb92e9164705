"""What an energy does to a language model's samples: are a few promoted, or the worst demoted?

The paper supposes the latter (its section on limitations). Resampling can be made to do one of the
two alone, by cutting all weights off at their mean m, from above or from below:

    demoting:  min(w, m)        promoting:  max(w, m)

Where m is the mean of all n + 1 weights, that of the text itself included, it does not depend on
which of them is the text, so the argument of `resampled` holds for both, and each has a gain over
P_LM that is a bound at every n. How much of the gain of both together each has by itself is the
answer; where weights are of two kinds that lie far apart, that is nearly all of it for either.

Shapes: P prefixes, N samples of a prefix, K points of a curve.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Gains(NamedTuple):
    """Gains over P_LM of what resampling writes, of each passage, in nats; at least."""

    both_P: np.ndarray
    demoting_P: np.ndarray
    promoting_P: np.ndarray


def split_gains(log_weights: Sequence[np.ndarray], log_weight_P: np.ndarray) -> Gains:
    """With the weights as they are, cut off above their mean, and cut off below it; `log_weight_P`
    is of real text."""
    rows = []
    for log_weight_N, log_weight in zip(log_weights, log_weight_P, strict=True):
        all_weights = np.append(log_weight_N, log_weight)
        mean = _log_mean(all_weights)
        cut = (all_weights, np.minimum(all_weights, mean), np.maximum(all_weights, mean))
        rows.append([one[-1] - _log_mean(one) for one in cut])
    return Gains(*np.array(rows).T)


def _log_mean(log_weight: np.ndarray) -> float:
    return float(np.logaddexp.reduce(log_weight) - np.log(len(log_weight)))


class MassCurve(NamedTuple):
    """What the lightest `share_K` of a prefix's samples get, mean over prefixes."""

    share_K: np.ndarray
    mass_K: np.ndarray


def mass_curve(log_weights: Sequence[np.ndarray], num_points: int) -> MassCurve:
    share_K = np.linspace(0, 1, num_points)
    masses = []
    for log_weight_N in log_weights:
        count = len(log_weight_N)
        share_N = np.exp(np.sort(log_weight_N) - np.logaddexp.reduce(log_weight_N))
        reached = np.concatenate([[0.0], np.cumsum(share_N)])
        masses.append(np.interp(share_K, np.arange(count + 1) / count, reached))
    return MassCurve(share_K, np.mean(masses, axis=0))
