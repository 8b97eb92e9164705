"""How far the published interval can be trusted, where the true perplexity is known.

Of a language so small that every continuation can be written down, log Z of each prefix is a sum,
and so is the true perplexity of the joint model. The estimate is then made many times over as a
user would make it: some documents, n samples a prefix from P_LM, bounds, bootstrap, flags. Counted
is how often the published interval holds the truth, and which flags were raised when it did and
when not. With log Z known, the same documents give the coverage that the bootstrap alone has. What
the samples alone do shows beside the truth of the very documents that were drawn: how far the
bounds are from it, and how often it lies between them. Each replicate draws the same documents
whatever the number of samples, so that settings differ in nothing else.

Shapes: P prefixes of all documents, K continuations of each, N drawn samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from residual_ebm.estimation.bootstrap import bootstrap_perplexity, perplexity
from residual_ebm.estimation.flags import KINDS, flags
from residual_ebm.estimation.perplexity import (
    Prefixes,
    joint_perplexity,
    summarise_prefix,
)
from residual_ebm.randomness import derive_seed, generator

Floats = NDArray[np.float64]
ANY = "any"


@dataclass(frozen=True)
class ExactPrefix:
    """A prefix with everything that could follow it."""

    document: int
    num_tokens: int
    lm_log_prob: float  # of the real continuation
    log_weight: float  # of the real continuation
    lm_log_prob_K: Floats  # of every continuation; their probabilities add up to 1
    log_weight_K: Floats
    true_log_prob: float = math.nan  # of the real continuation in the language itself, if known

    def scaled(self, scale: float) -> "ExactPrefix":
        """With the energy times a factor: above 1, as if it were too sure of itself."""
        return ExactPrefix(
            self.document,
            self.num_tokens,
            self.lm_log_prob,
            scale * self.log_weight,
            self.lm_log_prob_K,
            scale * self.log_weight_K,
            self.true_log_prob,
        )

    @property
    def log_partition(self) -> float:
        return float(np.logaddexp.reduce(self.lm_log_prob_K + self.log_weight_K))

    @property
    def log_prob(self) -> float:
        """Of the real continuation under the joint model."""
        return self.lm_log_prob + self.log_weight - self.log_partition


@dataclass(frozen=True)
class Warned:
    """Shares of estimates with a flag; None of an empty set."""

    overall: float
    when_covered: float | None
    when_missed: float | None


@dataclass(frozen=True)
class Coverage:
    """What many estimates with n samples a prefix came to."""

    num_samples: int
    num_replicates: int
    covered: float  # share of published intervals that hold the truth
    covered_with_known_partition: float  # the same where log Z need not be estimated
    covered_difference: float  # share of paired intervals that hold the true difference from P_LM
    gap_holds: float | None  # share whose gap is no more than KL(data || P_LM), where that is known
    between_bounds: float  # share of estimates whose bounds hold the truth of their documents
    lower_bias: float  # mean of log lower perplexity - log true one of the same prefixes
    upper_bias: float
    warnings: dict[str, Warned]  # by the kind of flag, and "any"
    effective_sample_size: float
    share_past_pareto_k: float


def _share(given: Sequence[bool], covered: Sequence[bool], wanted: bool) -> float | None:
    """How many of the estimates that did, or did not, hold the truth."""
    chosen = [one for one, hit in zip(given, covered, strict=True) if hit == wanted]
    return float(np.mean(chosen)) if chosen else None


def true_perplexity(prefixes: Sequence[ExactPrefix]) -> float:
    return perplexity(
        [prefix.log_prob for prefix in prefixes], [prefix.num_tokens for prefix in prefixes]
    )


def coverage(
    prefixes: Sequence[ExactPrefix],
    num_samples: int,
    *,
    num_documents: int,
    num_replicates: int,
    num_resamples: int,
    seed: int,
) -> Coverage:
    """Estimate again and again, each time with other documents and other samples.

    All documents at hand are the population whose perplexity is the truth; a replicate draws
    `num_documents` of them with replacement.
    """
    truth = true_perplexity(prefixes)
    lm_log_prob_P = np.array([prefix.lm_log_prob for prefix in prefixes])
    num_tokens_P = [prefix.num_tokens for prefix in prefixes]
    true_difference = truth - perplexity(lm_log_prob_P, num_tokens_P)
    true_gap = float(np.mean([prefix.true_log_prob - prefix.lm_log_prob for prefix in prefixes]))
    cdf = [np.exp(prefix.lm_log_prob_K).cumsum() for prefix in prefixes]
    by_document: dict[int, list[int]] = {}
    for number, prefix in enumerate(prefixes):
        by_document.setdefault(prefix.document, []).append(number)
    documents = list(by_document.values())
    covered, covered_exactly, between, raised, rows = [], [], [], [], []
    lower_bias, upper_bias, covered_difference, gap_holds = [], [], [], []
    for replicate in range(num_replicates):
        which = generator(seed, "coverage_documents", replicate)
        chosen = [documents[one] for one in which.integers(0, len(documents), num_documents)]
        draw = generator(seed, "coverage", num_samples, replicate)
        numbers = [number for group in chosen for number in group]
        drawn = [prefixes[number] for number in numbers]
        summaries = []
        for number, prefix in zip(numbers, drawn, strict=True):
            uniform_N = draw.random(num_samples) * cdf[number][-1]
            index_N = np.searchsorted(cdf[number], uniform_N, side="right")
            log_weight_N = torch.from_numpy(prefix.log_weight_K[index_N])
            summaries.append(summarise_prefix(log_weight_N, prefix.log_weight))
        known = Prefixes(
            np.array([prefix.lm_log_prob for prefix in drawn]),
            np.array([prefix.num_tokens for prefix in drawn]),
            # A document that was drawn twice is two documents, as it would be of a population.
            np.repeat(np.arange(num_documents), [len(group) for group in chosen]),
        )
        options = {
            "num_resamples": num_resamples,
            "seed": derive_seed(seed, "coverage_bootstrap", replicate),
        }
        row = joint_perplexity(known, summaries, **options)
        exact = bootstrap_perplexity(
            [prefix.log_prob for prefix in drawn], known.num_tokens_P, known.document_P, **options
        )
        rows.append(row)
        covered.append(row.published.low <= truth <= row.published.high)
        covered_exactly.append(exact.low <= truth <= exact.high)
        difference = row.difference_from_base
        covered_difference.append(difference.low <= true_difference <= difference.high)
        gap_holds.append(row.gap_interval.low <= true_gap)
        base = perplexity(known.lm_log_prob_P, known.num_tokens_P)
        raised.append({flag.partition(":")[0] for flag in flags(row, base)})
        own_truth = true_perplexity(drawn)
        between.append(row.lower <= own_truth <= row.upper)
        lower_bias.append(np.log(row.lower / own_truth))
        upper_bias.append(np.log(row.upper / own_truth))
    warned = {
        ANY: [bool(kinds) for kinds in raised],
        **{kind: [kind in kinds for kinds in raised] for kind in KINDS},
    }
    return Coverage(
        num_samples,
        num_replicates,
        float(np.mean(covered)),
        float(np.mean(covered_exactly)),
        float(np.mean(covered_difference)),
        None if math.isnan(true_gap) else float(np.mean(gap_holds)),
        float(np.mean(between)),
        float(np.mean(lower_bias)),
        float(np.mean(upper_bias)),
        {
            kind: Warned(
                float(np.mean(given)), _share(given, covered, True), _share(given, covered, False)
            )
            for kind, given in warned.items()
        },
        float(np.mean([row.effective_sample_size for row in rows])),
        float(np.mean([row.share_past_pareto_k for row in rows])),
    )
