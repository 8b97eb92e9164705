"""The joint model one token at a time (section 3.2, equation 5).

With A_t = E[exp(-E) | x_<=t], the mean over what P_LM would write after x_<=t,

    P(x_t | x_<t) = P_LM(x_t | x_<t) A_t / A_(t-1).

A_p is Z(prefix); A_T is exp(-E(x)), exact. The numerator of a step is the denominator of the next,
so a chain of T - p estimates serves every step. At t = T nothing is left to write, and A_(T-1) is a
sum over the vocabulary: the last step can be had exactly, to check the estimate.

Shapes: S = steps + 1 links of the chain, C steps, V vocabulary, T tokens of a block, B blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from residual_ebm.errors import UserError
from residual_ebm.estimation.importance import effective_sample_size, log_weight, pareto_k
from residual_ebm.estimation.partition import log_partition_error
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.joint import JointModel
from residual_ebm.models.language_model import TokenFeatures
from residual_ebm.randomness import derive_seed

_BLOCKS_AT_ONCE = 256
_NORMAL_95 = 1.959964  # standard errors on each side of a 95 % interval


@dataclass(frozen=True)
class StepChain:
    """Bounds of log A_p ... log A_T for one block, with standard errors; the last link is exact."""

    lower_S: Tensor
    upper_S: Tensor
    error_S: Tensor
    lm_log_prob_C: Tensor
    # Of the C links that are estimated: all but the last.
    effective_sample_size_C: Tensor
    pareto_k_C: Tensor

    def log_prob_bounds(self) -> tuple[Tensor, Tensor]:
        """Bounds of log P(x_t | x_<t): lower numerator over upper denominator, and the reverse."""
        lower_C = self.lm_log_prob_C + self.lower_S[1:] - self.upper_S[:-1]
        upper_C = self.lm_log_prob_C + self.upper_S[1:] - self.lower_S[:-1]
        return lower_C, upper_C

    def published(self) -> tuple[Tensor, Tensor]:
        """The bounds, widened by what other samples might have given: 95 % intervals."""
        lower_C, upper_C = self.log_prob_bounds()
        # Links have samples of their own, so their errors are independent.
        margin_C = _NORMAL_95 * (self.error_S[1:].square() + self.error_S[:-1].square()).sqrt()
        return lower_C - margin_C, upper_C + margin_C

    def last_step_from(self, log_a: float) -> float:
        """log P(x_T | x_<T) with another value of log A_(T-1), e.g. the exact one."""
        return float(self.lm_log_prob_C[-1] + self.lower_S[-1]) - log_a


def step_chain(
    joint: JointModel, ids_T: Tensor, num_samples: int, *, seed: int, num_steps: int | None = None
) -> StepChain:
    """The chain of one block without padding, or of its last steps; `num_samples` completions for
    each link."""
    start, horizon = joint.block.prefix_length, joint.block.length
    ended = (
        joint.block.continuation == "until_end" and ids_T[-1] == joint.language_model.end_of_text
    )
    if not (len(ids_T) == horizon or (ended and start < len(ids_T) < horizon)):
        raise UserError(
            "block",
            f"{len(ids_T)} tokens",
            f"a chain needs a whole block: {horizon} tokens, or an end after the first {start}",
        )
    lower, upper, error, effective, heaviness = [], [], [], [], []
    first = start if num_steps is None else max(start, len(ids_T) - num_steps)
    for length in range(first, len(ids_T)):
        scored = joint.propose(
            ids_T[:length],
            num_samples,
            num_tokens=horizon - length,
            seed=derive_seed(seed, "per_step", length),
        )
        bounds = scored.log_partition()
        lower.append(float(bounds.lower))
        upper.append(float(bounds.upper))
        error.append(float(log_partition_error(scored.log_weight_N)))
        effective.append(float(effective_sample_size(scored.log_weight_N)))
        heaviness.append(pareto_k(scored.log_weight_N))
    # Padded to the horizon, as every block of a batch is.
    padding = torch.full((horizon - len(ids_T),), joint.language_model.end_of_text)
    block_1T = torch.cat([ids_T, padding])[None]
    length_1 = torch.tensor([len(ids_T)])
    last = float(log_weight(joint.energy(block_1T, length_1))[0])
    log_prob_1C = joint.language_model.log_prob(block_1T, start, length_1).double().cpu()
    return StepChain(
        torch.tensor([*lower, last], dtype=torch.float64),
        torch.tensor([*upper, last], dtype=torch.float64),
        torch.tensor([*error, 0.0], dtype=torch.float64),
        log_prob_1C[0, first - start : len(ids_T) - start],
        torch.tensor(effective, dtype=torch.float64),
        torch.tensor(heaviness, dtype=torch.float64),
    )


def exact_last_link(joint: JointModel, ids_T: Tensor) -> float:
    """log A_(T-1) of a block that fills the horizon, by enumeration of the vocabulary."""
    horizon = joint.block.length
    if len(ids_T) != horizon:
        raise UserError(
            "block", f"{len(ids_T)} tokens", f"only the last of {horizon} tokens is enumerable"
        )
    log_prob_V = joint.language_model.next_log_prob(ids_T[:-1])
    energy_V = _energies_of_last_tokens(joint, ids_T, log_prob_V)
    return float((log_prob_V + log_weight(energy_V).cpu()).logsumexp(0))


@torch.inference_mode()
def _energies_of_last_tokens(joint: JointModel, ids_T: Tensor, log_prob_V: Tensor) -> Tensor:
    """E of a block with every token of the vocabulary as its last one."""
    token_V = torch.arange(joint.language_model.vocabulary_size)
    energy, language_model = joint.energy_model, joint.language_model
    if not isinstance(energy, EnergyModel) or energy.info.kind != "heat":
        ids_VT = ids_T.expand(len(token_V), -1).clone()
        ids_VT[:, -1] = token_V
        return joint.energy(ids_VT)
    # HeaT reads states of P_LM, none of which has seen the last token: they are the same for all.
    start = joint.block.prefix_length
    shared = language_model.features(ids_T[None], start, energy.state_layers)
    embedding_VH = language_model.model.get_input_embeddings().weight
    energies = []
    for token_B in token_V.split(_BLOCKS_AT_ONCE):
        rows = TokenFeatures(
            *(part.expand(len(token_B), *part.shape[1:]).clone() for part in shared)
        )
        rows.embedding_BCH[:, -1] = embedding_VH[token_B]
        rows.log_prob_BC[:, -1] = log_prob_V[token_B].to(rows.log_prob_BC)
        mask_BC = torch.ones(rows.log_prob_BC.shape, dtype=torch.bool, device=language_model.device)
        energies.append(energy.of_features(rows, mask_BC).float().cpu())
    return torch.cat(energies)
