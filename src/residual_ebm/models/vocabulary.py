"""What a distribution over the vocabulary is asked for: its masses, a log-prob, an entropy.

Float32, and for a few rows at a time: one pass over fifty thousand logits costs as much as a layer
of the network, so nothing is computed twice and nothing leaves the cache.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Float32 copies of logits are made for this many numbers at a time: they stay in the cache.
LOGITS_AT_ONCE = 2**21


class Masses(NamedTuple):
    """Probabilities before they are made to add up to one."""

    score_RV: Tensor  # logits, the largest of a row at 0
    mass_RV: Tensor  # their exponentials


def masses(logits_RV: Tensor) -> Masses:
    score_RV = logits_RV.to(torch.float32, copy=True)
    score_RV -= score_RV.amax(-1, keepdim=True)
    return Masses(score_RV, score_RV.exp())


def entropy(these: Masses, total_R: Tensor) -> Tensor:
    """Of masses that add up to `total_R`."""
    expected_R = _expected_score(*these)
    if expected_R.isnan().any():  # a token that cannot come: exp(-inf) x -inf should add nothing
        expected_R = _expected_score(these.score_RV.clamp(min=-1e4), these.mass_RV)
    return total_R.log() - expected_R / total_R


def _expected_score(score_RV: Tensor, mass_RV: Tensor) -> Tensor:
    return (mass_RV * score_RV).sum(-1)


def few_rows_at_once(
    function: Callable[..., tuple[Tensor, ...]], logits_RV: Tensor, *columns_R: Tensor
) -> list[Tensor]:
    """`function(logits, *columns)` for a few rows at a time, the columns of its answers joined."""
    rows_at_once = max(1, LOGITS_AT_ONCE // logits_RV.shape[-1])
    pieces = (tensor.split(rows_at_once) for tensor in (logits_RV, *columns_R))
    parts = [function(*rows) for rows in zip(*pieces, strict=True)]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def token_statistics(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, entropy of each distribution; logits have one dimension more."""
    log_prob_R, entropy_R = few_rows_at_once(
        _token_statistics, logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    )
    return log_prob_R.view(target.shape), entropy_R.view(target.shape)


def _token_statistics(logits_RV: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
    these = masses(logits_RV)
    total_R = these.mass_RV.sum(-1)
    picked_R = these.score_RV.gather(1, target_R[:, None])[:, 0]
    return picked_R - total_R.log(), entropy(these, total_R)
