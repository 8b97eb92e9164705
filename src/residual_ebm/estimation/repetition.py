"""How much passages repeat themselves and each other (paper, section 4.3, Figure 2 right).

Two percentages of n-grams, both over token ids, of n-grams that lie within one passage:

    among = different n-grams of all passages together / their n-grams
    within = mean over passages of (different n-grams of the passage / its n-grams)

An n-gram that occurs three times counts once among the different ones, not never: this is no count
of n-grams that occur exactly once. The first share falls as passages are added, so sets are only to
be compared at equal numbers of n-grams; the second one does not depend on the number of passages.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from residual_ebm.errors import UserError

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


def count_ngrams(passages: Sequence[Ids], order: int) -> int:
    """How many n-grams some passages of token ids have, repeated ones and all."""
    return sum(map(len, _windows(passages, order)))


def unique_among(passages: Sequence[Ids], order: int, most: int | None = None) -> float:
    """The share of different n-grams among all; of the first `most` n-grams, to compare sets whose
    passages end at different lengths."""
    every = np.concatenate(_windows(passages, order))[:most]
    if len(every) == 0:
        raise UserError("order", order, "no passage is that long")
    return len(np.unique(every, axis=0)) / len(every)


def unique_within(passages: Sequence[Ids], order: int) -> Floats:
    """The share of different n-grams within each passage; NaN for one that has no n-gram."""
    return np.array(
        [
            len(np.unique(part, axis=0)) / len(part) if len(part) else np.nan
            for part in _windows(passages, order)
        ]
    )


def _windows(passages: Sequence[Ids], order: int) -> list[Ids]:
    if order < 1:
        raise UserError("order", order, "an n-gram has at least 1 token")
    return [
        np.lib.stride_tricks.sliding_window_view(np.asarray(ids), order)
        if len(ids) >= order
        else np.empty((0, order), dtype=np.int64)
        for ids in passages
    ]
