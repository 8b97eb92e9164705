"""Which of several models is the better one, on the same prefixes.

A joint model's log-probs are known from below and from above only. The difference of two
perplexities is therefore published as a perplexity is: from the 2.5 % bootstrap point of the least
it may be (one model at its lower perplexity, the other at its upper) to the 97.5 % point of the
most.

Shapes: P prefixes.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from residual_ebm.estimation.bootstrap import Interval, bootstrap_difference


class ModelLogProbs(NamedTuple):
    """log P(real continuation) of each prefix under one model."""

    name: str
    highest_P: np.ndarray  # from the lower bound of log Z; gives the lower perplexity
    lowest_P: np.ndarray  # from the upper one; the same where Z is known
    resampled_P: np.ndarray | None = None  # at least, under what resampling writes; None: no energy


class Comparison(NamedTuple):
    """Perplexity of `model` minus that of `other`; below 0 throughout, the first is better."""

    model: str
    other: str
    difference: Interval
    # The same of what resampling with the model's energy writes, at most, and the other model at
    # its lower perplexity: below 0 throughout, the first is better whatever its weights are like.
    resampled_difference: Interval | None = None


def compare_models(
    models: Sequence[ModelLogProbs],
    num_tokens_P: np.ndarray,
    document_P: np.ndarray,
    *,
    num_resamples: int,
    seed: int,
) -> list[Comparison]:
    """Every later model with every earlier one, paired by prefix, over resampled documents."""

    def difference(one_P: np.ndarray, other_P: np.ndarray) -> Interval:
        return bootstrap_difference(
            one_P, other_P, num_tokens_P, document_P, num_resamples=num_resamples, seed=seed
        )

    return [
        Comparison(
            model.name,
            other.name,
            Interval(
                difference(model.highest_P, other.lowest_P).low,
                difference(model.lowest_P, other.highest_P).high,
            ),
            None if model.resampled_P is None else difference(model.resampled_P, other.highest_P),
        )
        for other, model in itertools.combinations(models, 2)
    ]
