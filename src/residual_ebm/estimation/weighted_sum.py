"""Weights with which several energies of one language model add up.

Each energy estimates the same log-ratio, log P_LM - log P_data, from another point of view: added
as they are they would correct twice. The weights are those with the lowest NCE loss, a logistic
regression on a few hundred held-out blocks, which is convex and has one solution.

Shapes: M energies, B positives, N negatives, K = M + 1 numbers to fit.
"""

from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize

from residual_ebm.errors import UserError
from residual_ebm.estimation.nce import nce_loss

# Where one energy separates the classes perfectly, weights would grow without end. Of energies
# divided by their spread, so that an energy's own scale changes nothing.
_SHRINKAGE = 1e-4
_SMALLEST_SPREAD = 1e-8  # of an energy that says nothing


class WeightedSum(NamedTuple):
    """E = constant + sum over energies of weight x energy."""

    weight_M: np.ndarray
    constant: float

    def __call__(self, energy_BM: np.ndarray) -> np.ndarray:
        return np.asarray(energy_BM @ self.weight_M + self.constant)


def fit_weighted_sum(positive_BM: np.ndarray, negative_NM: np.ndarray) -> WeightedSum:
    """The weights and the constant of the lowest NCE loss."""
    num_energies = positive_BM.shape[1]
    both = np.concatenate([positive_BM, negative_NM])
    if not np.isfinite(both).all():
        raise UserError("energies", "not all finite", "an energy of the sum is broken; train anew")
    spread_M = np.maximum(both.std(axis=0), _SMALLEST_SPREAD)
    classes = [torch.from_numpy(values / spread_M) for values in (positive_BM, negative_NM)]

    def loss_and_slope(weights: np.ndarray) -> tuple[float, np.ndarray]:
        weights_K = torch.from_numpy(weights).requires_grad_()
        positive_B, negative_N = (
            energies @ weights_K[:num_energies] + weights_K[num_energies] for energies in classes
        )
        loss = nce_loss(positive_B, negative_N) + _SHRINKAGE * weights_K.square().sum()
        (slope_K,) = torch.autograd.grad(loss, weights_K)
        return loss.item(), slope_K.numpy()

    start = np.append(spread_M / num_energies, 0.0)
    found = minimize(loss_and_slope, start, jac=True, method="L-BFGS-B", options={"maxiter": 1000})
    return WeightedSum(found.x[:num_energies] / spread_M, float(found.x[num_energies]))
