"""Products with weights laid out beforehand are the products they take the place of.

Shapes: B rows, T tokens.
"""

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import toys
from encoders import encoder
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_ebm.models import compiled, last_layer, packed_linear, quick_attention
from residual_ebm.models.compiled import compile_whole, compiled_layers, try_compiled
from residual_ebm.models.decoding import UNTRUNCATED
from residual_ebm.models.energy_inputs import TextInputs
from residual_ebm.models.energy_networks import TransformerEnergy
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.models.packed_linear import (
    FROM_ROWS,
    can_pack,
    multiply,
    pack,
    packed_layers,
)
from residual_ebm.models.quick_attention import quick_scoring
from residual_ebm.models.ralm import RalmForCausalLM

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
    monkeypatch.setattr(packed_linear, "UP_TO", 100)
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
@torch.inference_mode()
def test_weights_of_one_place_are_told_apart_by_shape_and_strides() -> None:
    draw = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(64, 64, generator=draw).bfloat16()
    rows = torch.randn(9, 64, generator=draw).bfloat16()
    model = toys.causal_model().bfloat16()
    views = [weight_OI, weight_OI.T, weight_OI[:32], weight_OI[::2]]
    assert len({view.data_ptr() for view in views}) == 1
    with packed_layers(model, FROM_ROWS):
        for view in (*views, *views):
            outcome = packed_linear._operator(rows, view, None)
            expected = nn.functional.linear(rows, view)
            torch.testing.assert_close(outcome, expected, rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("packs")
@torch.inference_mode()
def test_rows_of_another_type_are_multiplied_as_autocast_does() -> None:
    model = toys.causal_model().bfloat16()
    layer = linears(model)[0]
    rows = torch.randn(9, layer.in_features, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(rows)
        with packed_layers(model, FROM_ROWS):
            assert torch.equal(layer(rows), expected)


@pytest.mark.usefixtures("packs")
def test_gradients_of_another_thread_are_not_lost() -> None:
    model = toys.causal_model().bfloat16()
    layer = linears(model)[0]
    with torch.inference_mode():
        within = packed_layers(model, FROM_ROWS)
        within.__enter__()
    try:
        assert type(layer) is not nn.Linear
        layer(torch.ones(2, layer.in_features).bfloat16()).sum().backward()
        assert layer.weight.grad is not None
    finally:
        within.__exit__(None, None, None)
    assert type(layer) is nn.Linear


@pytest.mark.usefixtures("packs")
@torch.inference_mode()
def test_layouts_are_let_go() -> None:
    model, kept = toys.causal_model().bfloat16(), list[weakref.ref[Tensor]]()
    with packed_layers(model, FROM_ROWS):
        outcome(model)
        packed = packed_linear._packed.get()
        assert packed
        kept += [weakref.ref(layout) for _, layout in packed.values()]
        del packed
    assert not any(layout() is not None for layout in kept)
    assert packed_linear._packed.get() is None


@pytest.mark.usefixtures("packs")
@torch.inference_mode()
def test_neither_factor_of_a_ralm_has_its_vocabulary_laid_out() -> None:
    base, residual = (toys.causal_model(seed=seed).bfloat16() for seed in (0, 1))
    ralm = RalmForCausalLM.of(base, residual).eval()
    last = [part.get_output_embeddings() for part in ralm.parts]
    before = outcome(ralm)
    with packed_layers(ralm, FROM_ROWS):
        assert [type(layer) for layer in last] == [nn.Linear, nn.Linear]
        assert number_packed(ralm) == len(linears(ralm)) - 2
        torch.testing.assert_close(outcome(ralm), before, rtol=0.05, atol=0.05)


@pytest.fixture
def products(packs: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each product with a layout had, however few rows there are."""
    assert packs is None
    made: list[int] = []

    def counted(rows_RI: Tensor, packed_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        made.append(rows_RI.shape[0])
        return multiply(rows_RI, packed_OI, bias_O)

    for module in (packed_linear, last_layer):
        monkeypatch.setattr(module, "FROM_ROWS", 1)
        monkeypatch.setattr(module, "multiply", counted)
    return made


@pytest.mark.parametrize("with_features", [False, True])
def test_samples_are_drawn_with_layouts(
    products: list[int], with_features: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = LanguageModel(toys.causal_model().bfloat16(), toys.word_tokenizer())
    last = lm.model.get_output_embeddings()

    def drawn() -> tuple[Tensor, Tensor]:
        chunk: dict[str, Any] = {
            "prefix_ids_GP": torch.tensor([toys.prompt_ids()]),
            "prefix_numbers": [0],
            "first_sample": 0,
            "num_samples": 40,
            "num_tokens": 3,
            "seed": 0,
            "truncation": UNTRUNCATED,
            "stop_at_end": False,
        }
        decoded = (
            lm.sample_chunk_with_features(**chunk)[0] if with_features else lm.sample_chunk(**chunk)
        )
        return decoded.ids_NC, decoded.log_prob_NC

    ids_NC, log_prob_NC = drawn()
    num_layers = len([layer for layer in linears(lm.model) if layer is not last])
    assert len(products) == 3 * (num_layers + 1)  # once for the prefix, twice for samples
    for module in (packed_linear, last_layer):
        monkeypatch.setattr(module, "FROM_ROWS", 10**9)
    products.clear()
    plain_ids_NC, plain_log_prob_NC = drawn()
    assert not products
    same_N = (ids_NC == plain_ids_NC).all(-1)
    assert same_N.float().mean() > 0.8
    torch.testing.assert_close(log_prob_NC[same_N], plain_log_prob_NC[same_N], rtol=0, atol=0.05)


@pytest.mark.parametrize("frozen", [False, True])
def test_encoders_score_with_layouts_unless_their_layers_are_compiled_around_weights(
    products: list[int], frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encoder("bert", torch.bfloat16)
    monkeypatch.setattr(quick_attention, "has_tiles", lambda: False)
    monkeypatch.setattr(quick_attention, "attends_by_kernel", lambda _model: True)
    monkeypatch.setattr(quick_attention, "kernel_attention", lambda _model: nullcontext())
    monkeypatch.setattr(quick_attention, "frozen_layers", lambda *_: nullcontext(frozen))
    network = TransformerEnergy(model).bfloat16()
    ids_BL = torch.full((3, 5), 3)
    with torch.inference_mode(), quick_scoring(network, 15):
        network(TextInputs(ids_BL, torch.ones_like(ids_BL)))
    assert (len(products) == 0) == frozen


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

    def one_more(rows: Tensor) -> Tensor:
        return layer(rows) + 1

    with packed_layers(model, FROM_ROWS):
        fused = compile_whole(one_more)
        outcome = try_compiled(fused, one_more, rows)
        assert fused not in compiled._broken
        torch.testing.assert_close(outcome, one_more(rows), rtol=0.02, atol=0.02)
