"""Perplexity, and bootstrap intervals of everything that is averaged over prefixes.

    perplexity = exp(- sum_prefixes log P / sum_prefixes tokens)           (paper, section 3.2)

Prefixes of one document are alike, so it is documents that are drawn with replacement, each with
all its prefixes (prefixes as units would give intervals that are too narrow). A drawn set of
documents is a vector of counts, and every statistic here is a function of sums over prefixes: with
the sums of each document at hand, a resample is one product of counts and sums. Intervals are
percentile ones.

The drawn documents depend on the seed and on how many documents there are, on nothing else. So with
the same seed and the same `document_P`, the intervals of different models are over the same sets of
documents, and a difference is taken within each set.

With a single document the spread between documents is unknown: the interval is (nan, nan), which
no comparison takes for certainty.

Shapes: P prefixes, D documents, R resamples. NumPy, float64.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from residual_ebm.errors import UserError
from residual_ebm.randomness import generator

# Counts held at once, R x D: 8 MB.
_CHUNK_SIZE = 2**20

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """A two-sided interval; (nan, nan) when it cannot be estimated."""

    low: float
    high: float


def perplexity(log_prob_P: ArrayLike, num_tokens_P: ArrayLike) -> float:
    """exp(-sum log P / sum tokens) from log-probabilities of whole continuations, in nats."""
    log_prob_P, num_tokens_P = _same_length(log_prob=log_prob_P, num_tokens=num_tokens_P)
    _check_tokens(num_tokens_P)
    return float(np.exp(-log_prob_P.sum() / num_tokens_P.sum()))


def bootstrap_perplexity(
    log_prob_P: ArrayLike,
    num_tokens_P: ArrayLike,
    document_P: ArrayLike,
    *,
    num_resamples: int,
    seed: int,
    level: float = 0.95,
) -> Interval:
    """Interval of `perplexity` over resampled documents."""
    log_prob_P, num_tokens_P = _same_length(log_prob=log_prob_P, num_tokens=num_tokens_P)
    _check_tokens(num_tokens_P)
    log_prob_R, num_tokens_R = _resampled_sums(
        [log_prob_P, num_tokens_P], document_P, num_resamples, seed
    )
    return _percentile_interval(np.exp(-log_prob_R / num_tokens_R), document_P, level)


def bootstrap_difference(
    log_prob_P: ArrayLike,
    other_log_prob_P: ArrayLike,
    num_tokens_P: ArrayLike,
    document_P: ArrayLike,
    *,
    num_resamples: int,
    seed: int,
    level: float = 0.95,
) -> Interval:
    """Interval of perplexity(log_prob) - perplexity(other), both on the same resampled documents.

    Below zero throughout: the first model is the better one, on any such set of documents.
    """
    log_prob_P, other_log_prob_P, num_tokens_P = _same_length(
        log_prob=log_prob_P, other_log_prob=other_log_prob_P, num_tokens=num_tokens_P
    )
    _check_tokens(num_tokens_P)
    gain_R, other_R, num_tokens_R = _resampled_sums(
        [log_prob_P - other_log_prob_P, other_log_prob_P, num_tokens_P],
        document_P,
        num_resamples,
        seed,
    )
    # exp(-a) - exp(-b) as exp(-b) (exp(b - a) - 1): two nearly equal models keep their digits, and
    # two equal ones differ by exactly zero.
    difference_R = np.exp(-other_R / num_tokens_R) * np.expm1(-gain_R / num_tokens_R)
    return _percentile_interval(difference_R, document_P, level)


def bootstrap_mean(
    value_P: ArrayLike,
    document_P: ArrayLike,
    *,
    num_resamples: int,
    seed: int,
    level: float = 0.95,
) -> Interval:
    """Interval of the mean over prefixes: sum / count over resampled documents."""
    (value_P,) = _same_length(value=value_P)
    sum_R, count_R = _resampled_sums(
        [value_P, np.ones_like(value_P)], document_P, num_resamples, seed
    )
    return _percentile_interval(sum_R / count_R, document_P, level)


def _resampled_sums(
    values: list[Floats], document_P: ArrayLike, num_resamples: int, seed: int
) -> list[Floats]:
    """For each vector over prefixes, its sums over R sets of D documents drawn with replacement."""
    if num_resamples < 1:
        raise UserError("num_resamples", num_resamples, "draw at least one; 1000 is usual")
    document_P = np.asarray(document_P)
    if document_P.shape != values[0].shape:
        raise UserError("document", f"shape {document_P.shape}", "name one document a prefix")
    _, index_P = np.unique(document_P, return_inverse=True)
    sums = [np.bincount(index_P, weights=value_P) for value_P in values]
    num_documents = len(sums[0])
    draw = generator(seed, "bootstrap")
    resampled: list[list[Floats]] = [[] for _ in values]
    chunk = max(1, _CHUNK_SIZE // num_documents)
    for start in range(0, num_resamples, chunk):
        size = min(chunk, num_resamples - start)
        count_RD = draw.multinomial(
            num_documents, np.full(num_documents, 1 / num_documents), size=size
        ).astype(np.float64)
        for parts, sum_D in zip(resampled, sums, strict=True):
            parts.append(count_RD @ sum_D)
    return [np.concatenate(parts) for parts in resampled]


def _percentile_interval(statistic_R: Floats, document_P: ArrayLike, level: float) -> Interval:
    if not 0 < level < 1:
        raise UserError("level", level, "choose a level between 0 and 1, e.g. 0.95")
    if len(np.unique(np.asarray(document_P))) < 2:
        return Interval(low=float("nan"), high=float("nan"))
    low, high = np.quantile(statistic_R, [(1 - level) / 2, (1 + level) / 2])
    return Interval(low=float(low), high=float(high))


def _same_length(**vectors: ArrayLike) -> list[Floats]:
    """The named vectors over prefixes as finite float64, all of one length."""
    arrays = {name: np.asarray(vector, dtype=np.float64) for name, vector in vectors.items()}
    shape = next(iter(arrays.values())).shape
    for name, array in arrays.items():
        if array.ndim != 1 or len(array) == 0 or array.shape != shape:
            raise UserError(name, f"shape {array.shape}", "give one number a prefix")
        # An infinite log-probability times a count of zero would be nan and poison every resample.
        if not np.isfinite(array).all():
            count = int((~np.isfinite(array)).sum())
            raise UserError(name, f"not finite for {count} prefixes", "mend or leave out those")
    return list(arrays.values())


def _check_tokens(num_tokens_P: Floats) -> None:
    if not (num_tokens_P > 0).all():
        raise UserError("num_tokens", num_tokens_P.min(), "every continuation has a token at least")
