"""Laws of the NCE loss: its optimum, its gradient, and an accuracy that is fair to both classes."""

import math

import numpy as np
import pytest
import torch

from residual_ebm.errors import UserError
from residual_ebm.estimation.nce import nce_accuracy, nce_loss


@pytest.mark.parametrize("num_negatives", [1, 3, 16])
def test_several_negatives_do_not_shift_the_energy(num_negatives: int) -> None:
    # One constant energy cannot tell two classes apart: its optimum is 0. Under an unweighted sum
    # over the negatives it would be log K.
    constant = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for _ in range(500):
        loss = nce_loss(constant.expand(4), constant.expand(4, num_negatives))
        (gradient,) = torch.autograd.grad(loss, constant)
        constant = (constant - 0.2 * gradient).detach().requires_grad_()
    assert constant.item() == pytest.approx(0, abs=1e-9)


def test_the_optimum_is_the_log_ratio_of_noise_to_data() -> None:
    # Theorem 1 on three points: with every block in proportion to its probability (out of 10 data
    # blocks and 20 samples), E = log P_LM - log P_data is where the gradient vanishes.
    data_count, noise_count = [5, 3, 2], [4, 4, 12]
    energy_V = torch.tensor(
        [math.log((q / 20) / (p / 10)) for p, q in zip(data_count, noise_count, strict=True)],
        dtype=torch.float64,
        requires_grad=True,
    )
    loss = nce_loss(
        energy_V.repeat_interleave(torch.tensor(data_count)),
        energy_V.repeat_interleave(torch.tensor(noise_count)),
    )
    (gradient_V,) = torch.autograd.grad(loss, energy_V)
    assert gradient_V.tolist() == pytest.approx([0, 0, 0], abs=1e-12)


def test_value_and_gradient_in_closed_form() -> None:
    positive_B = torch.tensor([-1.0, 0.5], dtype=torch.float64, requires_grad=True)
    negative_BK = torch.tensor(
        [[2.0, -0.3, 0.0], [30.0, -21.0, 1.0]], dtype=torch.float64, requires_grad=True
    )
    loss = nce_loss(positive_B, negative_BK)
    expected = (
        sum(math.log1p(math.exp(energy)) for energy in positive_B.tolist()) / 2
        + sum(math.log1p(math.exp(-energy)) for energy in negative_BK.flatten().tolist()) / 6
    )
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-14)
    gradient_B, gradient_BK = torch.autograd.grad(loss, [positive_B, negative_BK])
    # Lowers the energy of text, raises that of samples; relative, so that e^-30 counts too.
    torch.testing.assert_close(gradient_B, positive_B.sigmoid() / 2, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient_BK, -(-negative_BK).sigmoid() / 6, rtol=1e-12, atol=0)


def test_the_classes_are_symmetric_under_a_change_of_sign() -> None:
    positive, negative = torch.tensor([0.3, -2.0]), torch.tensor([1.0, 0.1, -0.4])
    torch.testing.assert_close(nce_loss(positive, negative), nce_loss(-negative, -positive))


def test_zero_energy_is_at_chance() -> None:
    assert nce_loss(torch.zeros(4), torch.zeros(4, 3)).item() == pytest.approx(math.log(4))
    assert nce_accuracy(torch.zeros(4), torch.zeros(4, 3)).item() == 0.5


def test_extreme_energies_stay_finite() -> None:
    wrong = nce_loss(torch.tensor([1e4]), torch.tensor([-1e4]))
    assert wrong.item() == pytest.approx(2e4)
    assert nce_loss(torch.tensor([-1e4]), torch.tensor([1e4])).item() == 0


def test_half_precision_is_averaged_in_float32() -> None:
    positive_B = torch.full((1000,), 0.1, dtype=torch.bfloat16, requires_grad=True)
    loss = nce_loss(positive_B, positive_B)
    assert loss.dtype == torch.float32
    energy = positive_B[0].item()
    expected = math.log1p(math.exp(energy)) + math.log1p(math.exp(-energy))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    (gradient_B,) = torch.autograd.grad(loss, positive_B)
    assert gradient_B.dtype == torch.bfloat16


def test_accuracy_is_the_mean_over_classes_with_ties_one_half() -> None:
    # Positives: one right of two. Negatives: right, tie, wrong, wrong, i.e. 1.5 of 4.
    accuracy = nce_accuracy(torch.tensor([-1.0, 2.0]), torch.tensor([[1.0, 0.0], [-1.0, -2.0]]))
    assert accuracy.item() == pytest.approx((1 / 2 + 1.5 / 4) / 2)
    assert nce_accuracy([-0.1], [0.1, 2.0, 3.0]).item() == 1
    assert nce_accuracy([0.1], [-0.1, -2.0, -3.0]).item() == 0
    # A constant energy knows nothing, however many negatives there are.
    assert nce_accuracy(torch.ones(2), torch.ones(2, 7)).item() == 0.5


def test_nan_energies_show_in_both() -> None:
    assert nce_loss([math.nan], [0.0]).isnan()
    assert nce_accuracy([0.0], [math.nan]).isnan()
    assert nce_accuracy([math.nan, -1.0], [0.0]).isnan()


def test_an_empty_class_is_refused() -> None:
    with pytest.raises(UserError, match="negative_energy"):
        nce_loss(torch.zeros(2), torch.zeros(0))
    with pytest.raises(UserError, match="positive_energy"):
        nce_accuracy(torch.zeros(0), torch.zeros(2))


def test_read_only_arrays_are_taken_without_a_warning() -> None:
    energy_B = np.array([0.5, -0.5], dtype=np.float32)
    energy_B.flags.writeable = False
    writable_B = energy_B.copy()
    assert nce_loss(energy_B, energy_B) == nce_loss(writable_B, writable_B)
