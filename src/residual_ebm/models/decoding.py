"""Many samples of one prefix (section 3.3; Algorithm 1, first line).

The prefix goes through the network once and is shared by all its samples (`prefix_steps`), and so
is what samples have in common after it, as long as they have it (`beginnings`). Tokens
are drawn by inverse CDF from given uniforms, so a sample is a function of its key, and its
log-probability is exactly that of the distribution it came from.

Shapes: G prefixes, P tokens of a prefix, N = G x samples per prefix, C new tokens, V vocabulary,
U rows of the network's pass: samples that begin alike share one.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from residual_ebm.errors import UserError
from residual_ebm.models.prefix_steps import begin
from residual_ebm.models.summary_kernel import CHUNK
from residual_ebm.models.vocabulary import (
    Summary,
    draw_by_summary,
    few_rows_at_once,
    inverse_cdf,
    summarise,
    top_tokens,
)


@dataclass(frozen=True)
class Truncation:
    """Which tokens may be drawn: the k likeliest, or the likeliest that hold p of the mass."""

    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise UserError(
                "top_k", self.top_k, "must be at least 1; leave it out to sample from P_LM itself"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(
                "top_p", self.top_p, "must be above 0 and at most 1; leave it out for P_LM itself"
            )

    def describe(self) -> dict[str, Any] | None:
        """What a manifest keeps; None when nothing is cut off, so that the draws are from P_LM."""
        set_fields = {"top_k": self.top_k, "top_p": None if self.top_p == 1 else self.top_p}
        return {name: value for name, value in set_fields.items() if value is not None} or None


UNTRUNCATED = Truncation()


class Decoded(NamedTuple):
    """New tokens, padded with end-of-text after the end; log-probs there are 0."""

    ids_NC: Tensor
    length_N: Tensor
    log_prob_NC: Tensor  # log P_LM of each token
    proposal_log_prob_NC: Tensor  # under the distribution it was drawn from
    entropy_NC: Tensor  # of P_LM where the token was drawn
    row_NC: Tensor  # which row of the network's pass the token was drawn from


class Drawn(NamedTuple):
    """The next token of each row; log-probs and entropy as in `Decoded`."""

    token_N: Tensor
    log_prob_N: Tensor
    proposal_log_prob_N: Tensor
    entropy_N: Tensor


def truncate(logits_NV: Tensor, summary: Summary, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """What may be drawn, (N, K) tokens, and its log-probs, normalised anew; -inf for some of it."""
    if truncation.top_k is None:
        index_NK = torch.arange(logits_NV.shape[-1], device=logits_NV.device).expand_as(logits_NV)
        logits_NK = logits_NV
    else:  # everything else happens among these few
        logits_NK, index_NK = top_tokens(logits_NV, summary, truncation.top_k)
    kept_NK = logits_NK.float().log_softmax(-1)
    if truncation.top_p is not None and truncation.top_p < 1:
        sorted_NK, order_NK = kept_NK.sort(dim=-1, descending=True, stable=True)
        # A token stays while the mass before it is below p: the one that crosses p is kept.
        before_NK = sorted_NK.exp().cumsum(-1, dtype=torch.float64) - sorted_NK.exp()
        sorted_NK = sorted_NK.masked_fill(before_NK >= truncation.top_p, -torch.inf)
        kept_NK = torch.empty_like(kept_NK).scatter(-1, order_NK, sorted_NK).log_softmax(-1)
    return index_NK, kept_NK


def draw_token(
    logits_NV: Tensor,
    uniform_N: Tensor,
    truncation: Truncation,
    given_N: Tensor | None = None,
) -> Drawn:
    """A token for each row, from P_LM or what truncation leaves of it; `given_N` holds tokens that
    are not drawn, and -1 where one is."""
    summary = summarise(logits_NV)
    if truncation.describe():
        draw = functools.partial(_draw_truncated, truncation=truncation)
        looked_at = CHUNK * min(truncation.top_k or logits_NV.shape[-1], summary.top_RK.shape[1])
        token_N, proposal_N = few_rows_at_once(
            draw, logits_NV, uniform_N, *summary, looked_at=looked_at
        )
        log_prob_N = summary.log_prob(logits_NV, token_N)
    else:
        token_N = draw_by_summary(logits_NV, summary, uniform_N)
        if given_N is not None:
            token_N = torch.where(given_N < 0, token_N, given_N)
        log_prob_N = proposal_N = summary.log_prob(logits_NV, token_N)
    return Drawn(token_N, log_prob_N, proposal_N, summary.entropy())


def _draw_truncated(
    logits_NV: Tensor, uniform_N: Tensor, *summary: Tensor, truncation: Truncation
) -> tuple[Tensor, Tensor]:
    index_NK, proposal_NK = truncate(logits_NV, Summary(*summary), truncation)
    pick_N1 = inverse_cdf(proposal_NK.exp(), uniform_N)[:, None]
    return index_NK.gather(1, pick_N1)[:, 0], proposal_NK.gather(1, pick_N1)[:, 0]


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prefix_ids_GP: Tensor,
    *,
    samples_per_prefix: int,
    num_tokens: int,
    uniform_at: Callable[[int], Tensor],
    truncation: Truncation = UNTRUNCATED,
    end_of_text: int | None = None,
    padding: int = 0,
    given_NC: Tensor | None = None,
) -> Decoded:
    """Draw continuations; `uniform_at(step)` gives the N uniforms of a step.

    With `end_of_text`, a row that draws it is finished: the rest of the row is padding. Rows with
    tokens in `given_NC` take those instead of drawing, and go through the network like any other;
    rows that draw have -1 there.
    """
    assert given_NC is None or truncation.describe() is None
    logits_UV, next_logits = begin(model, prefix_ids_GP, samples_per_prefix, num_tokens)
    num_prefixes, device = len(prefix_ids_GP), prefix_ids_GP.device
    num_rows = num_prefixes * samples_per_prefix
    row_N = torch.arange(num_prefixes, device=device).repeat_interleave(samples_per_prefix)
    row_NC = torch.zeros((num_rows, num_tokens), dtype=torch.int64, device=device)
    ids_NC = torch.full((num_rows, num_tokens), padding, dtype=torch.int64, device=device)
    log_prob_NC, proposal_NC, entropy_NC = torch.zeros(3, num_rows, num_tokens, device=device)
    length_N = torch.full((num_rows,), num_tokens, dtype=torch.int64, device=device)
    running_N = torch.ones(num_rows, dtype=torch.bool, device=device)
    for step in range(num_tokens):
        if step > 0:
            logits_UV, row_N = next_logits(ids_NC[:, step - 1], step - 1)
        row_NC[:, step] = row_N
        shared = len(logits_UV) < num_rows
        logits_NV = logits_UV.index_select(0, row_N) if shared else logits_UV
        given_N = None if given_NC is None else given_NC[:, step]
        drawn = draw_token(logits_NV, uniform_at(step).to(device), truncation, given_N)
        del logits_UV, logits_NV  # before the next are made: they may be hundreds of megabytes
        ids_NC[:, step] = torch.where(running_N, drawn.token_N, padding)
        log_prob_NC[:, step] = torch.where(running_N, drawn.log_prob_N, 0.0)
        proposal_NC[:, step] = torch.where(running_N, drawn.proposal_log_prob_N, 0.0)
        entropy_NC[:, step] = torch.where(running_N, drawn.entropy_N, 0.0)
        if end_of_text is not None:
            ended_N = running_N & (drawn.token_N == end_of_text)
            length_N = torch.where(ended_N, step + 1, length_N)
            running_N = running_N & ~ended_N
            if not running_N.any():
                break
    return Decoded(ids_NC, length_N, log_prob_NC, proposal_NC, entropy_NC, row_NC)
