"""Sampling from the joint model by importance resampling (section 3.3, Algorithm 1).

Draw n proposals from P_LM, weigh each by exp(-E), resample one. As n grows the draw comes from
P_LM exp(-E) / Z; with top-k or top-p proposals the target is the truncated P_LM times exp(-E),
normalised. For finite n the effective sample size says how many proposals really took part.

Shapes: N proposals, T new tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residual_ebm.estimation.importance import effective_sample_size, log_weight, resample
from residual_ebm.estimation.partition import LogPartitionBounds, log_partition_bounds
from residual_ebm.files.samples import refuse_truncation
from residual_ebm.models.language_model import Samples
from residual_ebm.randomness import derive_seed, uniform


@dataclass(frozen=True)
class ScoredSet:
    """Proposals of one prefix with their energies."""

    proposals: Samples
    energy_N: Tensor

    @property
    def log_weight_N(self) -> Tensor:
        return log_weight(self.energy_N)

    @property
    def effective_sample_size(self) -> float:
        return float(effective_sample_size(self.log_weight_N))

    @property
    def target(self) -> str:
        """The distribution a draw tends to as the number of proposals grows."""
        cut: dict[str, Any] = self.proposals.truncation or {}
        how = ", ".join(f"{name}={value}" for name, value in cut.items())
        return f"P_LM[{how}] exp(-E) / Z" if how else "P_LM exp(-E) / Z"

    def draw(self, seed: int, num_draws: int = 1) -> Tensor:
        """Proposal numbers resampled by weight."""
        uniform_S = uniform(derive_seed(seed, "resample"), 0, 0, 0, num_draws)
        return resample(self.log_weight_N, torch.from_numpy(uniform_S))

    def log_partition(self) -> LogPartitionBounds:
        """Bounds of log Z; refused for truncated proposals, which are not draws from P_LM."""
        refuse_truncation(self.proposals.truncation, "proposals")
        return log_partition_bounds(self.log_weight_N)
