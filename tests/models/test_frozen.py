"""Layers compiled around their weights give what the network gives as it is.

Shapes: B blocks, L tokens.
"""

import logging
from typing import Any

import kernels
import pytest
import torch
import toys
from encoders import batch, encoder, error, states
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from residual_ebm.models import compiled, frozen, quick_attention
from residual_ebm.models.both_ways import make_bidirectional
from residual_ebm.models.encoder_attention import kernel_attention
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.energy_inputs import TextInputs
from residual_ebm.models.energy_networks import TransformerEnergy
from residual_ebm.models.frozen import frozen_layers
from residual_ebm.models.quick_attention import quick_scoring

kernel = kernels.kernel
ENOUGH = 10**12  # tokens
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def nothing_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_broken", set())


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def as_states_do(model: PreTrainedModel) -> Any:
    return lambda ids_BL, mask_BL: states(model, ids_BL, mask_BL)


@torch.inference_mode()
def frozen_states(model: PreTrainedModel, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
    with frozen_layers(model, ENOUGH, as_states_do(model)):
        assert sum("forward" in vars(layer) for layer in model.modules()) == 2
        return states(model, ids_BL, mask_BL)


@pytest.mark.parametrize("model_type", ["bert", "eurobert"])
@pytest.mark.usefixtures("kernel")
def test_one_compilation_a_layer_serves_all_batches_as_near_to_float32_as_plain(
    model_type: str,
) -> None:
    torch._dynamo.utils.counters.clear()
    model = encoder(model_type, torch.bfloat16)
    exact_model = encoder(model_type, torch.float32)
    with kernel_attention(model):
        for lengths in ((23, 2, 16, 30), (7,) * 7, (32,) * 61, (40, 39, 12)):
            ids_BL, mask_BL = batch(lengths)
            exact = states(exact_model, ids_BL, mask_BL)
            own = error(states(model, ids_BL, mask_BL), exact)
            assert error(frozen_states(model, ids_BL, mask_BL), exact) < 1.3 * own
    assert not compiled._broken
    assert graphs() == 2
    assert not any("forward" in vars(module) for module in model.modules())


def test_in_float32_it_is_exact() -> None:
    model = encoder("bert", torch.float32)
    ids_BL, mask_BL = batch((23, 2, 16, 30))
    expected = states(model, ids_BL, mask_BL)
    torch.testing.assert_close(frozen_states(model, ids_BL, mask_BL), expected, **CLOSE)


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
    with frozen_layers(model, frozen._FROM_READ // weights, as_states_do(model)):
        assert not any("forward" in vars(layer) for layer in layers)
    enough = frozen._FROM_READ // weights + 1
    with torch.inference_mode(), frozen_layers(model, enough, as_states_do(model)):
        assert all("forward" in vars(layer) for layer in layers)


@pytest.mark.usefixtures("kernel")
def test_what_was_read_first_changes_no_bit() -> None:
    """A resumed run may begin with another batch, or with another network of the same class."""
    torch.set_num_threads(2)
    try:
        read = []
        for begun_with in ((64, 60, 50, 70), (33, 35, 40)):
            model = encoder("bert", torch.bfloat16)
            with kernel_attention(model):
                frozen_states(model, *batch(begun_with))
                read.append(frozen_states(model, *batch((33, 35, 40))))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(read[0], read[1])


def scored(energy: EnergyModel, **options: Any) -> Tensor:
    ids_BT = torch.randint(3, 7, (9, toys.BLOCK_LENGTH), generator=torch.Generator().manual_seed(0))
    return energy.energy(ids_BT, **options)


@pytest.mark.usefixtures("kernel")
def test_energies_are_of_frozen_layers_where_there_are_many_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quick_attention, "has_tiles", lambda: False)
    energy = toys.trained_energy("bit_bpe")
    assert energy.tokenizer is not None
    assert isinstance(energy.network, TransformerEnergy)
    energy.network.backbone = toys.bert(energy.tokenizer, num_attention_heads=1)
    exact = scored(energy)
    energy.network.to(torch.bfloat16)
    plain = scored(energy, out_of=10**4)
    torch._dynamo.utils.counters.clear()
    assert torch.equal(scored(energy), plain)
    assert graphs() == 0
    many = scored(energy, out_of=10**12)
    assert graphs() == 2
    assert not compiled._broken
    for energies in (plain, many):
        assert float((energies - exact).abs().max() / exact.std()) < 0.1
    assert torch.equal(scored(energy), plain)


@pytest.mark.usefixtures("kernel")
def test_a_language_model_that_reads_both_ways_is_shown_what_it_will_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its layers are handed a cache where nobody says that there shall be none."""
    monkeypatch.setattr(quick_attention, "has_tiles", lambda: False)
    monkeypatch.setattr(frozen, "_FROM_READ", 0)
    model = toys.causal_model("llama", head_dim=16).bfloat16().model
    assert make_bidirectional(model)
    network = TransformerEnergy(model)
    inputs = TextInputs(*(part for part in batch((5, 9, 3))))
    inputs = TextInputs(inputs.ids_BL % 7, inputs.mask_BL.long())
    torch._dynamo.utils.counters.clear()
    with torch.inference_mode(), quick_scoring(network, 1) as lengths_of:
        assert lengths_of == 1
        network(inputs)
    assert graphs() == 2
    assert not compiled._broken


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
