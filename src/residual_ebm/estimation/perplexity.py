"""Perplexity of P_LM and of the joint model on the same prefixes (section 3.2).

For each prefix: bounds of log Z, then bounds of log P = lm_log_prob - E - log Z; then, over all
prefixes, perplexity = exp(-sum log P / sum tokens). The upper bound of log Z gives the upper
perplexity. Few samples flatter, so the bounds come at n/4, n/2 and n, with diagnostics, and beside
them the perplexity of what resampling n + 1 proposals writes, a bound at every n.

Shapes: P prefixes, N samples of a prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from residual_ebm.estimation.bootstrap import (
    Interval,
    bootstrap_difference,
    bootstrap_mean,
    bootstrap_perplexity,
    perplexity,
)
from residual_ebm.estimation.importance import effective_sample_size, pareto_k, pareto_k_threshold
from residual_ebm.estimation.partition import bounds_on_disjoint_subsets
from residual_ebm.estimation.resampled import resampled_log_partition


@dataclass(frozen=True)
class Prefixes:
    """What all models share: the same test prefixes and their real continuations."""

    lm_log_prob_P: np.ndarray
    num_tokens_P: np.ndarray
    document_P: np.ndarray


class LogPartition(NamedTuple):
    """log Z of one prefix from a number of samples."""

    lower: float
    upper: float
    resampled: float  # with the real continuation counted among the samples


@dataclass(frozen=True)
class PrefixSummary:
    """What is kept of one prefix after its log-weights were read."""

    log_weight: float  # of the real continuation
    log_partition: dict[int, LogPartition]  # by number of samples
    effective_sample_size: float
    pareto_k: float
    outweighs: bool  # the real continuation has a larger weight than every proposal


def sample_counts(num_samples: int) -> tuple[int, int, int]:
    return num_samples // 4, num_samples // 2, num_samples


def log_partition_at(
    log_weight_N: Tensor | ArrayLike, log_weight: float, num_samples: int
) -> LogPartition:
    """From as many samples, the mean over disjoint subsets of all there are; `log_weight` is the
    real continuation's."""
    bounds = bounds_on_disjoint_subsets(log_weight_N, num_samples)
    resampled = resampled_log_partition(log_weight_N, log_weight, num_samples)
    return LogPartition(float(bounds.lower), float(bounds.upper), resampled)


def summarise_prefix(log_weight_N: Tensor, log_weight: float) -> PrefixSummary:
    """Bounds and diagnostics of one prefix from its proposals' log-weights."""
    log_weight_N = torch.as_tensor(log_weight_N, dtype=torch.float64)
    counts = sample_counts(len(log_weight_N))
    return PrefixSummary(
        log_weight,
        {count: log_partition_at(log_weight_N, log_weight, count) for count in counts},
        float(effective_sample_size(log_weight_N)),
        pareto_k(log_weight_N),
        bool(log_weight > log_weight_N.max()),
    )


@dataclass(frozen=True)
class BoundsAt:
    """Perplexity bounds with a certain number of samples for each prefix."""

    num_samples: int
    lower: float
    upper: float
    resampled: float


@dataclass(frozen=True)
class JointPerplexity:
    """A joint model's row: an interval with everything needed to judge it."""

    lower: float
    upper: float
    resampled: float  # at most, of what resampling n + 1 proposals writes
    published: Interval  # 2.5 % bootstrap point of the lower to 97.5 % point of the upper
    difference_from_base: Interval  # of the upper perplexity, paired, document bootstrap
    resampled_difference: Interval  # from base, as above, of what resampling writes
    bounds_at: list[BoundsAt]
    effective_sample_size: float  # mean over prefixes
    median_effective_sample_size: float  # a few easy prefixes lift the mean, not this
    share_past_pareto_k: float
    share_outweighed: float
    log_partition_mean: float
    log_partition_spread: float  # standard deviation over prefixes
    gap: float  # mean gain of what resampling writes, in nats: lower bound of KL(data || P_LM)
    gap_interval: Interval


@dataclass(frozen=True)
class BasePerplexity:
    """A language model's row: exact, so only the documents make it uncertain."""

    value: float
    published: Interval


def base_perplexity(prefixes: Prefixes, *, num_resamples: int, seed: int) -> BasePerplexity:
    return BasePerplexity(
        perplexity(prefixes.lm_log_prob_P, prefixes.num_tokens_P),
        bootstrap_perplexity(
            prefixes.lm_log_prob_P,
            prefixes.num_tokens_P,
            prefixes.document_P,
            num_resamples=num_resamples,
            seed=seed,
        ),
    )


class JointLogProb(NamedTuple):
    """log P(real continuation) of each prefix."""

    from_lower_P: np.ndarray  # from the lower bound of log Z: the highest it may be
    from_upper_P: np.ndarray
    resampled_P: np.ndarray  # at least, under what resampling writes


def joint_log_prob(
    lm_log_prob_P: np.ndarray, log_weight_P: ArrayLike, log_partitions: Sequence[LogPartition]
) -> JointLogProb:
    unnormalised_P = lm_log_prob_P + np.asarray(log_weight_P)
    return JointLogProb(
        *(unnormalised_P - np.array(one_P) for one_P in zip(*log_partitions, strict=True))
    )


def bounds_at_count(prefixes: Prefixes, estimates: JointLogProb, num_samples: int) -> BoundsAt:
    values = (perplexity(one_P, prefixes.num_tokens_P) for one_P in estimates)
    return BoundsAt(num_samples, *values)


def joint_perplexity(
    prefixes: Prefixes, summaries: Sequence[PrefixSummary], *, num_resamples: int, seed: int
) -> JointPerplexity:
    """The row of one joint model; the same seed pairs it with every other row."""
    tokens_P, document_P = prefixes.num_tokens_P, prefixes.document_P
    counts = sorted(summaries[0].log_partition)
    log_weight_P = [summary.log_weight for summary in summaries]
    at = {
        count: joint_log_prob(
            prefixes.lm_log_prob_P,
            log_weight_P,
            [summary.log_partition[count] for summary in summaries],
        )
        for count in counts
    }
    bounds_at = [bounds_at_count(prefixes, at[count], count) for count in counts]
    num_samples = counts[-1]
    from_lower_P, from_upper_P, resampled_P = at[num_samples]
    resampling = {"num_resamples": num_resamples, "seed": seed}
    low = bootstrap_perplexity(from_lower_P, tokens_P, document_P, **resampling).low
    high = bootstrap_perplexity(from_upper_P, tokens_P, document_P, **resampling).high
    gap_P = resampled_P - prefixes.lm_log_prob_P
    log_partition_P = np.array([one.log_partition[num_samples].lower for one in summaries])
    effective_P = np.array([summary.effective_sample_size for summary in summaries])
    threshold = pareto_k_threshold(num_samples)
    return JointPerplexity(
        lower=bounds_at[-1].lower,
        upper=bounds_at[-1].upper,
        resampled=bounds_at[-1].resampled,
        published=Interval(low, high),
        difference_from_base=bootstrap_difference(
            from_upper_P, prefixes.lm_log_prob_P, tokens_P, document_P, **resampling
        ),
        resampled_difference=bootstrap_difference(
            resampled_P, prefixes.lm_log_prob_P, tokens_P, document_P, **resampling
        ),
        bounds_at=bounds_at,
        effective_sample_size=float(np.mean(effective_P)),
        median_effective_sample_size=float(np.median(effective_P)),
        share_past_pareto_k=float(np.mean([s.pareto_k > threshold for s in summaries])),
        share_outweighed=float(np.mean([s.outweighs for s in summaries])),
        log_partition_mean=float(log_partition_P.mean()),
        log_partition_spread=float(log_partition_P.std()),
        gap=float(gap_P.mean()),
        gap_interval=bootstrap_mean(gap_P, document_P, **resampling),
    )
