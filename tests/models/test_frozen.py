"""Layers compiled around their weights give what the network gives as it is.

Shapes: B blocks, L tokens.
"""

import logging
from typing import Any

import kernels
import pytest
import torch
from encoders import batch, encoder, error, states
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from residual_ebm.models import compiled, frozen
from residual_ebm.models.encoder_attention import kernel_attention
from residual_ebm.models.frozen import frozen_layers

kernel = kernels.kernel
ENOUGH = 10**12  # tokens
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def nothing_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_broken", set())


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@torch.inference_mode()
def frozen_states(model: PreTrainedModel, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
    with frozen_layers(model, ENOUGH):
        return states(model, ids_BL, mask_BL)


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_every_layer_keeps_to_its_own_weights(model_type: str) -> None:
    model = encoder(model_type, torch.float32)
    batches = [batch(lengths) for lengths in ((23, 2, 16, 30), (7, 7), (40, 39, 12))]
    for ids_BL, mask_BL in batches:
        expected = states(model, ids_BL, mask_BL)
        torch.testing.assert_close(frozen_states(model, ids_BL, mask_BL), expected, **CLOSE)
    assert not compiled._broken
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.usefixtures("kernel")
def test_with_the_kernel_it_is_as_near_to_float32_as_without() -> None:
    """ModernBERT, of whose layers every other one sees a window only, and not by the kernel."""
    ids_BL, mask_BL = batch((23, 2, 16, 30))
    exact = states(encoder("modernbert", torch.float32), ids_BL, mask_BL)
    model = encoder("modernbert", torch.bfloat16)
    own = error(states(model, ids_BL, mask_BL), exact)
    with kernel_attention(model):
        assert error(frozen_states(model, ids_BL, mask_BL), exact) < 1.3 * own
    assert not compiled._broken


def changed_in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        next(iter(compiled.repeated_layers(model)[1].parameters())).mul_(3)


def put_elsewhere(model: PreTrainedModel) -> None:
    for weight in compiled.repeated_layers(model)[1].parameters():
        weight.data = 3 * weight.data


def test_weights_that_change_are_seen() -> None:
    model = encoder("bert", torch.float32)
    ids_BL, mask_BL = batch((5, 9))
    before = frozen_states(model, ids_BL, mask_BL)
    for change in (changed_in_place, put_elsewhere):
        change(model)
        after = frozen_states(model, ids_BL, mask_BL)
        assert error(after, before) > 0.05
        torch.testing.assert_close(after, states(model, ids_BL, mask_BL), **CLOSE)
        before = after
    compiled_so_far = graphs()
    assert torch.equal(frozen_states(model, ids_BL, mask_BL), before)
    assert graphs() == compiled_so_far, "what has not changed is not compiled again"


def test_two_networks_of_one_class_are_told_apart() -> None:
    one, other = encoder("bert", torch.float32), encoder("bert", torch.float32)
    changed_in_place(other)
    ids_BL, mask_BL = batch((5, 9))
    for model in (one, other, one):
        expected = states(model, ids_BL, mask_BL)
        torch.testing.assert_close(frozen_states(model, ids_BL, mask_BL), expected, **CLOSE)


def test_single_rows_are_not_compiled_for() -> None:
    model = encoder("bert", torch.float32)
    ids_BL, mask_BL = batch((5, 9))
    frozen_states(model, ids_BL, mask_BL)
    compiled_so_far = graphs()
    for rows in (slice(0, 1), slice(0, 2)):
        few = ids_BL[rows, :5], mask_BL[rows, :5]
        torch.testing.assert_close(frozen_states(model, *few), states(model, *few), **CLOSE)
    assert graphs() == compiled_so_far


def test_a_little_to_read_is_read_as_ever() -> None:
    model = encoder("bert", torch.float32)
    layers = compiled.repeated_layers(model)
    weights = sum(weight.numel() for layer in layers for weight in layer.parameters())
    with frozen_layers(model, frozen._FROM_READ // weights):
        assert not any("forward" in vars(layer) for layer in layers)
    with torch.inference_mode(), frozen_layers(model, frozen._FROM_READ // weights + 1):
        assert all("forward" in vars(layer) for layer in layers)


def test_what_was_read_first_changes_no_bit() -> None:
    """A resumed run may begin with another batch."""
    torch.set_num_threads(2)
    try:
        read = []
        for begun_with in ((64, 60, 50, 70), (2, 2), (33, 35, 40)):
            torch._dynamo.reset()
            model = encoder("bert", torch.bfloat16)
            frozen_states(model, *batch(begun_with))
            read.append(frozen_states(model, *batch((33, 35, 40))))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(read[0], read[2])
    assert torch.equal(read[1], read[2])


def test_where_it_cannot_be_compiled_the_network_reads_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(function: Any, **_options: Any) -> Any:
        def fails(*_arguments: Any, **_named: Any) -> Any:
            raise TorchDynamoException(f"no compiler for {function.__name__}")

        return fails

    monkeypatch.setattr(torch, "compile", no_compiler)
    model = encoder("bert", torch.float32)
    ids_BL, mask_BL = batch((5, 9))
    with caplog.at_level(logging.WARNING):
        outcome = frozen_states(model, ids_BL, mask_BL)
    assert torch.equal(outcome, states(model, ids_BL, mask_BL))
    assert len(caplog.records) == 1
    assert "not compiled here" in caplog.text
