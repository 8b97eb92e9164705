"""What a distribution over the vocabulary is asked for: a draw, a log-prob, an entropy.

One pass over fifty thousand logits costs as much as a layer of the network, so a row is summarised
once, in float32, and everything else is read off the summary.

Shapes: R rows, V vocabulary, K chunks of the vocabulary, c tokens of a chunk.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from residual_ebm.models.compiled import compiled_instead_of
from residual_ebm.models.summary_kernel import CHUNK, can_summarise, summarise_rows

# Float32 copies of logits are made for this many numbers at a time: they stay in the cache.
LOGITS_AT_ONCE = 2**21
_NEVER = -1e4  # a log mass whose exponential is zero
_LOWEST = -1e30  # below any logit


class Summary(NamedTuple):
    """Of masses exp(logit - largest), which need not add up to one."""

    largest_R: Tensor
    mass_RK: Tensor  # of each chunk
    expected_R: Tensor  # sum of mass x log mass
    top_RK: Tensor  # the largest logit of each chunk

    def total(self) -> Tensor:
        return self.mass_RK.sum(-1, dtype=torch.float64).float()

    def log_prob(self, logits_RV: Tensor, token_R: Tensor) -> Tensor:
        logit_R = logits_RV.gather(1, token_R[:, None])[:, 0].float()
        return logit_R - self.largest_R - self.total().log()

    def entropy(self) -> Tensor:
        return self.total().log() - self.expected_R / self.total()


def few_rows_at_once(
    function: Callable[..., tuple[Tensor, ...]],
    logits_RV: Tensor,
    *columns_R: Tensor,
    looked_at: int | None = None,
) -> list[Tensor]:
    """`function(logits, *columns)` for a few rows at a time, the columns of its answers joined;
    `looked_at` is how many logits of a row it copies, all of them if not said."""
    rows_at_once = max(1, LOGITS_AT_ONCE // (looked_at or logits_RV.shape[-1]))
    pieces = (tensor.split(rows_at_once) for tensor in (logits_RV, *columns_R))
    parts = [function(*rows) for rows in zip(*pieces, strict=True)]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def summarise(logits_RV: Tensor) -> Summary:
    if can_summarise(logits_RV):
        return Summary(*summarise_rows(logits_RV))
    return Summary(*_summarise(logits_RV))


def _summarise_in_pieces(logits_RV: Tensor) -> Sequence[Tensor]:
    return few_rows_at_once(_summarise_rows, logits_RV)


def _summarise_rows(logits_RV: Tensor) -> tuple[Tensor, ...]:
    padding = -logits_RV.shape[-1] % CHUNK
    if padding:
        logits_RV = torch.nn.functional.pad(logits_RV, (0, padding), value=-torch.inf)
    # Chunk by chunk, each against its own largest: compiled, memory is read once. A chunk of
    # nothing but -inf has a largest too, so that no difference is without meaning.
    logits_RKc = logits_RV.view(len(logits_RV), -1, CHUNK).float()
    top_RK1 = logits_RKc.amax(-1, keepdim=True).clamp(min=_LOWEST)
    score_RKc = logits_RKc - top_RK1
    mass_RKc = score_RKc.exp()
    mass_RK = mass_RKc.sum(-1)
    # exp(-inf) x -inf is no number; a token that cannot come adds nothing.
    expected_RK = (mass_RKc * score_RKc.clamp(min=_NEVER)).sum(-1)
    top_RK = top_RK1[..., 0]
    largest_R1 = top_RK.amax(-1, keepdim=True)
    shift_RK = (top_RK - largest_R1).clamp(min=_NEVER)
    scale_RK = shift_RK.exp()
    expected_R = ((expected_RK + mass_RK * shift_RK) * scale_RK).sum(-1)
    return largest_R1[:, 0], mass_RK * scale_RK, expected_R, top_RK


@compiled_instead_of(_summarise_in_pieces, from_numbers=2**22)
def _summarise(logits_RV: Tensor) -> Sequence[Tensor]:
    return _summarise_rows(logits_RV)


def token_statistics(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, entropy of each distribution; logits have one dimension more."""
    logits_RV, target_R = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    summary = summarise(logits_RV)
    log_prob_R = summary.log_prob(logits_RV, target_R)
    return log_prob_R.view(target.shape), summary.entropy().view(target.shape)


def draw_by_summary(logits_RV: Tensor, summary: Summary, uniform_R: Tensor) -> Tensor:
    """Tokens by inverse CDF, in two levels: sums of chunks, then the tokens of the one that holds
    the token, which alone is looked at again."""

    def masses_of(chunk_R: Tensor) -> Tensor:
        score_Rc, _ = _of_chunks(logits_RV, chunk_R[:, None])
        return (score_Rc.float() - summary.largest_R[:, None]).exp()

    return _search(summary.mass_RK.double(), masses_of, uniform_R)


def top_tokens(logits_RV: Tensor, summary: Summary, count: int) -> tuple[Tensor, Tensor]:
    """The largest logits and their tokens, (R, count), largest first.

    They lie in the chunks with the largest maxima, as many of those as tokens are wanted, so most
    of the vocabulary is never looked at again.
    """
    vocabulary = logits_RV.shape[-1]
    num_chunks = min(count, summary.top_RK.shape[1])
    chunk_Rk = summary.top_RK.topk(num_chunks, dim=-1).indices
    candidate_RC, token_RC = _of_chunks(logits_RV, chunk_Rk)
    logit_Rk, pick_Rk = candidate_RC.topk(min(count, vocabulary), dim=-1)
    return logit_Rk, token_RC.gather(1, pick_Rk)


def _of_chunks(logits_RV: Tensor, chunk_Rk: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of some chunks of each row, one after the other, and their tokens; what lies
    behind the end of the vocabulary cannot come, and counts as its last token."""
    place_c = torch.arange(CHUNK, device=logits_RV.device)
    token_RC = (chunk_Rk[..., None] * CHUNK + place_c).flatten(1)
    last = logits_RV.shape[-1] - 1
    behind_RC, token_RC = token_RC > last, token_RC.clamp(max=last)
    return logits_RV.gather(1, token_RC).masked_fill(behind_RC, -torch.inf), token_RC


def inverse_cdf(mass_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The first token whose cumulative mass exceeds u times the total; zero mass is never drawn.

    u = 0 gives the first token with mass, u = 1 the last: rounding cannot run off either end.
    """
    num_rows, vocabulary = mass_RV.shape
    mass_RV = torch.nn.functional.pad(mass_RV, (0, -vocabulary % CHUNK))
    mass_RKc = mass_RV.view(num_rows, -1, CHUNK)
    rows_R = torch.arange(num_rows, device=mass_RV.device)
    chunk_mass_RK = mass_RKc.sum(-1, dtype=torch.float64)
    return _search(chunk_mass_RK, lambda chunk_R: mass_RKc[rows_R, chunk_R], uniform_R)


def _search(
    chunk_mass_RK: Tensor, masses_of: Callable[[Tensor], Tensor], uniform_R: Tensor
) -> Tensor:
    """Float64 sums: of chunks, then of the tokens of the chunk found. These may add up to a little
    less than the chunk was said to have; without the ratio of both, what is missing would all go to
    its last token, however unlikely that is."""
    chunk_cdf_RK = chunk_mass_RK.cumsum(-1)
    target_R = uniform_R.to(torch.float64) * chunk_cdf_RK[:, -1]
    chunk_R1 = _first_above(chunk_cdf_RK, target_R)[:, None]
    mass_R = chunk_mass_RK.gather(1, chunk_R1)[:, 0]
    before_R = chunk_cdf_RK.gather(1, chunk_R1)[:, 0] - mass_R
    cdf_Rc = masses_of(chunk_R1[:, 0]).cumsum(-1, dtype=torch.float64)
    inside_R = (target_R - before_R) * (cdf_Rc[:, -1] / mass_R)
    return chunk_R1[:, 0] * CHUNK + _first_above(cdf_Rc, inside_R)


def _first_above(cdf_RK: Tensor, target_R: Tensor) -> Tensor:
    first_R = (cdf_RK <= target_R[:, None]).sum(-1)
    last_with_mass_R = (cdf_RK < cdf_RK[:, -1:]).sum(-1)
    return torch.minimum(first_R, last_with_mass_R)
