"""Noise contrastive estimation: the loss that trains an energy, and the accuracy it reaches.

Paper, section 3.1, Eq. 3. The noise is P_LM itself, so log P - log P_LM = -E and the energy is the
logit of a classifier between text (positives) and the LM's own continuations (negatives):

    loss = - E_{x+ ~ data} log 1 / (1 + exp(E(x+)))  -  E_{x- ~ P_LM} log 1 / (1 + exp(-E(x-)))

Each expectation is a mean over its own class, however many negatives a positive has. The optimum is
then E = log P_LM - log P_data, which is self-normalised (Theorem 1); an unweighted sum over K
negatives a positive would move it by log K.

Shapes: B positives; negatives M in any shape, e.g. (B, K). Energy is low for text.
"""

import math

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import logsigmoid

from residual_ebm.errors import UserError


def nce_loss(
    positive_energy_B: Tensor | ArrayLike, negative_energy_M: Tensor | ArrayLike
) -> Tensor:
    """Mean over each class, added; a scalar with the caller's graph, log 4 for a zero energy."""
    positive_energy_B = _energies("positive_energy", positive_energy_B)
    negative_energy_M = _energies("negative_energy", negative_energy_M)
    # logsigmoid rather than softplus: softplus turns linear at 20, and its gradient with it.
    return -logsigmoid(-positive_energy_B).mean() - logsigmoid(negative_energy_M).mean()


def nce_accuracy(
    positive_energy_B: Tensor | ArrayLike, negative_energy_M: Tensor | ArrayLike
) -> Tensor:
    """Mean of the two class accuracies: chance is 1/2 whatever the number of negatives.

    E = 0 decides nothing and counts one half, so a zero energy is at chance and not at 0 or 1.
    """
    positive_sign = _mean_sign(_energies("positive_energy", positive_energy_B))
    negative_sign = _mean_sign(_energies("negative_energy", negative_energy_M))
    # A class's accuracy is (1 -+ its mean sign) / 2.
    return (2 - positive_sign + negative_sign) / 4


def _mean_sign(energy: Tensor) -> Tensor:
    # sign(nan) is 0 in torch, which would pass a broken energy off as one at chance.
    return energy.detach().sign().masked_fill(energy.isnan(), math.nan).mean()


def _energies(field: str, energy: Tensor | ArrayLike) -> Tensor:
    if not isinstance(energy, Tensor):
        # A copy, because Arrow hands out read-only arrays and torch warns of those.
        energy = torch.from_numpy(np.array(energy))
    if energy.numel() == 0:
        raise UserError(field, "no energies", "both classes need at least one block")
    # Half precision would round the mean of many terms; float64 stays what it is.
    return energy.to(torch.promote_types(energy.dtype, torch.float32))
