"""Products with weights laid out beforehand are the products they take the place of.

Shapes: B rows, T tokens.
"""

import logging
import threading
from collections.abc import Callable

import pytest
import torch
import toys
from encoders import encoder
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_ebm.models import packed_linear
from residual_ebm.models.compiled import compile_whole, compiled_layers
from residual_ebm.models.packed_linear import (
    FROM_ROWS,
    can_pack,
    multiply,
    pack,
    packed_layers,
)

IDS_BT = torch.tensor([[3, 4, 5, 6], [6, 3, 3, 4]])


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without matrix tiles, where there are products of bfloat16 at all."""
    monkeypatch.setattr(packed_linear, "has_tiles", lambda: False)
    packed_linear._works.cache_clear()
    if not packed_linear._works():
        pytest.skip("no layout for bfloat16 here")


def linears(model: nn.Module) -> list[nn.Linear]:
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)]


def outcome(model: PreTrainedModel, ids_BT: Tensor = IDS_BT) -> Tensor:
    given = model(input_ids=ids_BT, use_cache=False)
    return (given.logits if "logits" in given else given.last_hidden_state).float()


def number_packed(model: nn.Module) -> int:
    return sum(type(layer) is not nn.Linear for layer in linears(model))


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("given", [(1,), (2, 3), (300,), (0,)])
@pytest.mark.parametrize("sizes", [(64, 48), (33, 577), (1, 2)])
@pytest.mark.parametrize("has_bias", [True, False])
@torch.inference_mode()
def test_products_are_those_of_torch(
    given: tuple[int, ...], sizes: tuple[int, int], has_bias: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(*given, sizes[1], generator=draw).bfloat16()
    weight_OI = torch.randn(sizes, generator=draw).bfloat16()
    bias_O = torch.randn(sizes[0], generator=draw).bfloat16() if has_bias else None
    assert can_pack(weight_OI)
    expected = nn.functional.linear(rows, weight_OI, bias_O)
    torch.testing.assert_close(
        multiply(rows, pack(weight_OI), bias_O), expected, rtol=0.01, atol=0.01
    )


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize(
    "make",
    [
        lambda: toys.causal_model().bfloat16(),
        lambda: toys.causal_model("gptj").bfloat16(),  # biases
        lambda: encoder("bert", torch.bfloat16),
    ],
    ids=["llama", "gptj", "bert"],
)
@torch.inference_mode()
def test_a_model_gives_what_it_gives_and_is_left_as_it_was(
    make: Callable[[], PreTrainedModel],
) -> None:
    model = make()
    last = model.get_output_embeddings()
    before = outcome(model)
    with packed_layers(model, FROM_ROWS):
        assert number_packed(model) == len([part for part in linears(model) if part is not last])
        torch.testing.assert_close(outcome(model), before, rtol=0.02, atol=0.02)
    assert number_packed(model) == 0
    with pytest.raises(IndexError), packed_layers(model, FROM_ROWS):
        outcome(model, torch.tensor([[10**6]]))
    assert number_packed(model) == 0
    assert torch.equal(outcome(model), before)


@pytest.mark.usefixtures("packs")
@torch.inference_mode()
def test_weights_that_changed_in_between_are_seen() -> None:
    model = toys.causal_model().bfloat16()
    with packed_layers(model, FROM_ROWS):
        before = outcome(model)
    for layer in linears(model):
        layer.weight.mul_(2)  # in inference mode: nothing counts such changes
    with packed_layers(model, FROM_ROWS):
        torch.testing.assert_close(outcome(model), (after := outcome(model)))
    assert float((after - before).abs().max()) > 0.1
    torch.testing.assert_close(after, outcome(model), rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("packs")
def test_nothing_is_laid_out_for_few_rows_for_gradients_or_in_float32() -> None:
    model = toys.causal_model().bfloat16()
    with torch.inference_mode(), packed_layers(model, FROM_ROWS - 1):
        assert number_packed(model) == 0
    with packed_layers(model, FROM_ROWS):
        assert number_packed(model) == 0
    with torch.inference_mode(), packed_layers(model.float(), FROM_ROWS):
        assert number_packed(model) == 0


@pytest.mark.usefixtures("packs")
@torch.inference_mode()
def test_more_weights_than_there_may_be_room_for_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_UP_TO", 100)
    model = toys.causal_model().bfloat16()
    with packed_layers(model, FROM_ROWS):
        assert number_packed(model) == 0


class _Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.usefixtures("packs")
@torch.inference_mode()
def test_a_layer_that_multiplies_in_its_own_way_goes_on_doing_so() -> None:
    model = toys.causal_model().bfloat16()
    linears(model)[0].__class__ = _Doubled
    before = outcome(model)
    with packed_layers(model, FROM_ROWS):
        assert type(linears(model)[0]) is _Doubled
        torch.testing.assert_close(outcome(model), before, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("packs")
@torch.inference_mode()
def test_another_thread_may_use_the_model_meanwhile() -> None:
    model = toys.causal_model().bfloat16()
    before, seen = outcome(model), list[Tensor]()

    def elsewhere() -> None:
        with torch.inference_mode():
            seen.append(outcome(model))

    with packed_layers(model, FROM_ROWS):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert torch.equal(seen[0], before)


def graphs_of(model: PreTrainedModel, ids_BT: Tensor) -> tuple[Tensor, int]:
    torch._dynamo.utils.counters.clear()
    with compiled_layers(model, len(ids_BT)):
        states = outcome(model, ids_BT)
    return states, int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.usefixtures("packs")
@torch.inference_mode()
def test_compiled_layers_are_as_many_as_without_whatever_their_weights() -> None:
    ids_BT = torch.randint(0, 7, (300, 1), generator=torch.Generator().manual_seed(0))
    model = toys.causal_model(num_hidden_layers=5, hidden_size=512).bfloat16()
    expected, plain = graphs_of(model, ids_BT)
    with packed_layers(model, FROM_ROWS):
        within, packed = graphs_of(model, ids_BT)
    assert 1 <= packed <= plain < 5
    torch.testing.assert_close(within, expected, rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("packs")
def test_weights_of_one_place_and_two_shapes_are_told_apart() -> None:
    model = toys.causal_model().bfloat16()
    attention = model.get_decoder().layers[0].self_attn
    first_weights = attention.q_proj.weight.data[: len(attention.k_proj.weight)]
    attention.k_proj.weight = nn.Parameter(first_weights, requires_grad=False)
    assert attention.k_proj.weight.data_ptr() == attention.q_proj.weight.data_ptr()
    with torch.inference_mode():
        before = outcome(model)
        with packed_layers(model, FROM_ROWS):
            torch.testing.assert_close(outcome(model), before, rtol=0.02, atol=0.02)


def test_without_the_operators_products_are_torchs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(_weight_OI: Tensor) -> Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(packed_linear, "has_tiles", lambda: False)
    monkeypatch.setattr(packed_linear, "pack", gone)
    packed_linear._works.cache_clear()
    try:
        model = toys.causal_model().bfloat16()
        with caplog.at_level(logging.WARNING), torch.inference_mode():
            for _ in range(2):
                with packed_layers(model, FROM_ROWS):
                    assert number_packed(model) == 0
        assert len(caplog.records) == 1
        assert "no such operator" in caplog.text
    finally:
        packed_linear._works.cache_clear()


def test_products_that_come_out_otherwise_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "multiply", lambda rows, _packed: rows[:, :32] * 0)
    packed_linear._works.cache_clear()
    try:
        assert not packed_linear._works()
    finally:
        packed_linear._works.cache_clear()


@pytest.mark.usefixtures("packs")
@torch.inference_mode()
def test_the_compiler_does_not_look_inside() -> None:
    model = toys.causal_model().bfloat16()
    layer = linears(model)[0]
    rows = torch.randn(300, layer.in_features).bfloat16()
    with packed_layers(model, FROM_ROWS):
        compiled = compile_whole(lambda rows: layer(rows) + 1)
        torch.testing.assert_close(compiled(rows), layer(rows) + 1, rtol=0.02, atol=0.02)
