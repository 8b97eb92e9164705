"""How much passages repeat themselves and each other (paper, section 4.3, Figure 2 right).

Two percentages of n-grams, both over token ids, of n-grams that lie within one passage:

    among = different n-grams of all passages together / their n-grams
    within = mean over passages of (different n-grams of the passage / its n-grams)

An n-gram that occurs three times counts once among the different ones, not never: this is no count
of n-grams that occur exactly once. The first share falls as passages are added, so sets are only to
be compared at equal numbers of passages of equal length; the second one does not depend on the
number.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from residual_ebm.errors import UserError

Ids = NDArray[np.int64]


class UniqueShares(NamedTuple):
    """Shares of different n-grams, between 0 and 1."""

    among: float
    within: float


def unique_ngrams(passages: Sequence[Ids], order: int) -> UniqueShares:
    """Of passages of token ids; those shorter than an n-gram have none and are passed over."""
    if order < 1:
        raise UserError("order", order, "an n-gram has at least 1 token")
    windows = [
        np.lib.stride_tricks.sliding_window_view(np.asarray(ids), order)
        for ids in passages
        if len(ids) >= order
    ]
    if not windows:
        raise UserError("order", order, "no passage is that long")
    shares = [len(np.unique(part, axis=0)) / len(part) for part in windows]
    every = np.concatenate(windows)
    return UniqueShares(len(np.unique(every, axis=0)) / len(every), float(np.mean(shares)))
