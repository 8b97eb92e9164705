"""The joint model's distribution over the next token (appendix A.1, top-k auto-regressive
sampling).

    P(v | x_<t) = P_LM(v | x_<t) A_t(x_<t v) / A_(t-1)

for the likeliest tokens v of P_LM, A_t estimated from completions of x_<t v up to the horizon. What
is left out of the candidates is left out of both distributions: the best few are shown, each
normalised among its own.

Shapes: G candidates, S completions of each, N = G x S rows, L tokens of the context, T of a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from residual_ebm.errors import UserError
from residual_ebm.estimation.importance import log_weight
from residual_ebm.estimation.partition import log_partition_bounds, log_partition_error
from residual_ebm.models.decoding import UNTRUNCATED
from residual_ebm.models.joint import JointModel
from residual_ebm.progress import QUIET, Progress
from residual_ebm.randomness import derive_seed

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class NextTokens:
    """Candidates, the likeliest of P_LM first."""

    token_G: Tensor
    lm_log_prob_G: Tensor  # log P_LM(v | context)
    log_a_G: Tensor  # log of the mean weight of what follows
    error_G: Tensor  # one standard error of it; 0 where nothing follows

    def best_of_lm(self, count: int) -> list[tuple[int, float]]:
        return _best(self.token_G, self.lm_log_prob_G, count)

    def best_of_joint(self, count: int) -> list[tuple[int, float]]:
        return _best(self.token_G, self.lm_log_prob_G + self.log_a_G, count)


def _best(token_G: Tensor, score_G: Tensor, count: int) -> list[tuple[int, float]]:
    """The best tokens with their probabilities, normalised among themselves."""
    score_K, place_K = score_G.topk(min(count, len(score_G)))
    probabilities = score_K.softmax(-1).tolist()
    return list(zip(token_G[place_K].tolist(), probabilities, strict=True))


@torch.inference_mode()
def next_tokens(
    joint: JointModel,
    prefix_ids: Tensor,
    given_ids: Tensor,
    *,
    num_candidates: int = 128,
    num_samples: int = 100,
    seed: int = 0,
    progress: Progress = QUIET,
) -> NextTokens:
    """What follows a prefix and the tokens of a continuation that are given already."""
    horizon = joint.block.num_new_tokens
    left = horizon - len(given_ids) - 1  # tokens after the next one
    if left < 0:
        raise UserError("given", f"{len(given_ids)} tokens", f"the horizon is {horizon} tokens")
    if num_samples < 2:
        raise UserError("num_samples", num_samples, "a spread needs at least 2 samples")
    context_L = torch.cat([prefix_ids, given_ids])
    num_candidates = min(num_candidates, joint.language_model.vocabulary_size)
    log_prob_V = joint.language_model.next_log_prob(context_L)
    lm_log_prob_G, token_G = log_prob_V.topk(num_candidates)
    context_GL = torch.cat([context_L.expand(num_candidates, -1), token_G[:, None]], dim=1)
    if left == 0:
        energy_G = joint.energy_model.energy(context_GL, prefix_length=len(prefix_ids))
        log_a_G = log_weight(energy_G).cpu()
        return NextTokens(token_G, lm_log_prob_G, log_a_G, torch.zeros_like(log_a_G))
    weights = []
    at_once = max(1, _ROWS_AT_ONCE // num_candidates)
    with progress.bar("completions", num_candidates * num_samples) as bar:
        for first in range(0, num_samples, at_once):
            count = min(at_once, num_samples - first)
            weights.append(_completed(joint, context_GL, first, count, left, seed))
            bar.advance(num_candidates * count)
    log_weight_GS = torch.cat(weights, dim=1)
    return NextTokens(
        token_G,
        lm_log_prob_G,
        log_partition_bounds(log_weight_GS).lower,
        log_partition_error(log_weight_GS),
    )


def _completed(
    joint: JointModel, context_GL: Tensor, first: int, count: int, left: int, seed: int
) -> Tensor:
    """Log-weights (G, S) of completions of each context."""
    num_contexts = len(context_GL)
    until_end = joint.block.continuation == "until_end"
    decoded = joint.language_model.sample_chunk(
        context_GL,
        prefix_numbers=list(range(num_contexts)),
        first_sample=first,
        num_samples=count,
        num_tokens=left,
        seed=derive_seed(seed, "next_token"),
        truncation=UNTRUNCATED,
        stop_at_end=until_end,
    )
    context_NL = context_GL.repeat_interleave(count, dim=0)
    ids_NT = torch.cat([context_NL, decoded.ids_NC.cpu()], dim=1)
    length_N = context_NL.shape[1] + decoded.length_N.cpu()
    if until_end:  # what ended with the candidate itself goes no further
        ended_N = context_NL[:, -1] == joint.language_model.end_of_text
        ids_NT[ended_N, context_NL.shape[1] :] = joint.language_model.end_of_text
        length_N[ended_N] = context_NL.shape[1]
    prefix_length = ids_NT.shape[1] - joint.block.num_new_tokens
    energy_N = joint.energy_model.energy(ids_NT, length_N, prefix_length=prefix_length)
    return log_weight(energy_N).cpu().view(num_contexts, count)
