"""Quick dropout drops as often as asked, everywhere alike, keeps the mean, and is repeatable."""

import pytest
import torch
from torch import nn

from residual_ebm.models.quick_dropout import QuickDropout, quick_dropout


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_how_many_are_dropped_and_how_the_rest_is_scaled(
    probability: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    dropped = quick_dropout(torch.ones(1000, 1001, dtype=dtype), probability)
    share = (dropped == 0).float().mean().item()
    real = round(256 * probability) / 256
    assert abs(real - probability) <= 1 / 512
    assert abs(share - real) < 0.002  # four standard errors
    assert dropped.float().mean().item() == pytest.approx(1.0, abs=0.005)
    assert len(dropped.unique()) == 2


def test_every_place_is_dropped_alike() -> None:
    """Each of the eight bytes of a word, and each bit of it, must be random."""
    torch.manual_seed(0)
    dropped = (quick_dropout(torch.ones(80_000, 8), 0.5) == 0).float()
    assert (dropped.mean(0) - 0.5).abs().max() < 0.008
    assert (torch.corrcoef(dropped.T) - torch.eye(8)).abs().max() < 0.016
    rare = (quick_dropout(torch.ones(80_000, 8), 1 / 256) == 0).float()
    assert (rare.mean(0) - 1 / 256).abs().max() < 0.001


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_any_number_of_elements(count: int) -> None:
    assert quick_dropout(torch.ones(count), 0.5).shape == (count,)


def test_gradients_pass_where_values_do() -> None:
    values = torch.ones(1000, requires_grad=True)
    dropped = quick_dropout(values, 0.3)
    dropped.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, dropped.detach())


def test_the_seed_decides() -> None:
    def drop(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return quick_dropout(torch.ones(1000), 0.5)

    assert torch.equal(drop(1), drop(1))
    assert not torch.equal(drop(1), drop(2))


def test_models_use_it_within_and_not_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Dropout(0.5)
    calls: list[float] = []

    def spy(values: torch.Tensor, probability: float) -> torch.Tensor:
        calls.append(probability)
        return values

    monkeypatch.setattr("residual_ebm.models.quick_dropout.quick_dropout", spy)
    with QuickDropout():
        layer(torch.ones(3))
        nn.functional.dropout(torch.ones(3), p=0.25)
        layer.eval()(torch.ones(3))
    layer.train()(torch.ones(3))
    assert calls == [0.5, 0.25]


@pytest.mark.parametrize("probability", [0.0, 0.999, 1.0])
def test_nothing_and_everything(probability: float) -> None:
    with QuickDropout():
        dropped = nn.Dropout(probability)(torch.ones(100))
    assert dropped.isfinite().all()
    if probability != 0.999:
        assert torch.equal(dropped, torch.full((100,), 1 - probability))
