"""Compiled functions give what the plain ones give, and where there is no compiler, the plain ones.

Shapes: R rows, V vocabulary; N rows, K heads of keys, r queries of a head, S own tokens, D size.
"""

import contextvars
import logging
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.async_compile import AsyncCompile
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from residual_ebm.config import TrainingConfig
from residual_ebm.models import beginnings, compiled, shared_prefix, vocabulary
from residual_ebm.models.compiled import compiled_instead_of, compiled_training
from residual_ebm.models.decoding import Decoded, Truncation, decode
from residual_ebm.models.training import TrainingLog, train
from residual_ebm.models.vocabulary_loss import next_token_loss
from residual_ebm.progress import QUIET
from residual_ebm.randomness import uniform

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
MANY = 300


@pytest.fixture
def nothing_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """And many rows are enough, however small."""
    monkeypatch.setattr(compiled, "_broken", set())
    monkeypatch.setattr(compiled, "_pays", lambda _device, rows, *_: rows >= 256)


@pytest.mark.parametrize("size", [7, 256, 1000])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.usefixtures("nothing_broken")
def test_summaries_are_those_of_the_plain_way(size: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(size)
    logits_RV = (4 * torch.randn(MANY, size, generator=draw)).to(dtype)
    logits_RV[:, 3] = -torch.inf
    logits_RV[5, :4] = -torch.inf
    fused, plain = vocabulary._summarise(logits_RV), vocabulary._summarise_in_pieces(logits_RV)
    assert not compiled._broken
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    summary = vocabulary.summarise(logits_RV)
    exact = torch.distributions.Categorical(logits=logits_RV.double().clamp(min=-1e4))
    torch.testing.assert_close(summary.entropy().double(), exact.entropy(), rtol=1e-4, atol=1e-5)
    token_R = logits_RV.argmax(-1)
    torch.testing.assert_close(
        summary.log_prob(logits_RV, token_R).double(), exact.log_prob(token_R), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.usefixtures("nothing_broken")
def test_own_tokens_are_attended_as_in_the_plain_way(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(MANY, 2, *shape, generator=draw).to(dtype)

    for own_tokens in (1, 2, 9):
        arguments = (
            3 * normal(3, 16),
            normal(40, 16)[:, :, :own_tokens],  # a slice of a buffer, as in decoding
            normal(40, 16)[:, :, :own_tokens],
            normal(3, 16),
            normal(3).float(),
            torch.tensor(0.3),
        )
        fused = shared_prefix._merge_own(*arguments)
        assert fused.dtype == dtype
        tolerance = TOLERANCE[dtype]
        plain = shared_prefix._own_by_attention(*arguments)
        torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance)
    assert not compiled._broken


def random_model(model_type: str, num_layers: int = 3) -> PreTrainedModel:
    config = AutoConfig.for_model(
        model_type,
        vocab_size=7,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1 if model_type not in ("gpt2", "gpt_neox") else 2,
        head_dim=8,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return toys.scale_up(AutoModelForCausalLM.from_config(config, dtype=torch.float32), 8.0)


def _double(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.usefixtures("nothing_broken")
def test_without_a_compiler_the_plain_way_is_taken_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_arguments: object, **_options: object) -> object:
        def refuse(*_inputs: Tensor) -> None:
            raise TorchDynamoException("no g++ here\nand much more")

        return refuse

    monkeypatch.setattr(torch, "compile", no_compiler)

    @compiled_instead_of(_double, from_numbers=0)
    def double(x: Tensor) -> Tensor:
        return x + x

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(double(torch.ones(MANY)), torch.full((MANY,), 2.0))
    assert [record.getMessage() for record in caplog.records] == [
        "_double is not compiled here: no g++ here and much more"
    ]


@pytest.mark.parametrize(
    ("rows", "numbers", "pays"),
    [(256, 1000, True), (255, 1000, False), (256, 999, False), (10_000, 10_000, True)],
)
def test_where_it_pays(rows: int, numbers: int, pays: bool) -> None:
    assert compiled._pays(torch.device("cpu"), rows, numbers, 1000) == pays
    assert not compiled._pays(torch.device("meta"), rows, numbers, 1000)


@pytest.mark.usefixtures("nothing_broken")
def test_few_rows_are_not_worth_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail)

    @compiled_instead_of(_double, from_numbers=0)
    def double(x: Tensor) -> Tensor:
        return x + x

    assert torch.equal(double(torch.ones(255)), torch.full((255,), 2.0))


def test_an_error_of_another_kind_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that has run in part must not run again: it would keep its keys twice."""

    def fail(*_inputs: Tensor) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)

    @compiled_instead_of(_double, from_numbers=0)
    def double(x: Tensor) -> Tensor:
        return x + x

    with pytest.raises(RuntimeError, match="out of memory"):
        double(torch.ones(MANY))


def compile_anew() -> None:
    torch._dynamo.reset()
    compiled._compiled_forwards.clear()
    compiled._shown.clear()


@pytest.mark.usefixtures("nothing_broken")
def test_one_compilation_serves_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama", num_layers=7)
    monkeypatch.setattr(beginnings, "_PARTED_FROM", 0.0)  # many rows from the first token on
    compile_anew()
    torch._dynamo.utils.counters.clear()
    decode(
        model,
        torch.tensor([[3, 4, 5]]),
        samples_per_prefix=MANY,
        num_tokens=6,
        uniform_at=lambda step: torch.from_numpy(uniform(0, 0, step, 0, MANY)),
    )
    assert not compiled._broken
    # Own tokens, the vocabulary, and the layer: with number 0, with 1, and for all others.
    assert 3 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5


@pytest.mark.usefixtures("nothing_broken")
def test_the_compiler_sees_the_same_sizes_first_whatever_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, ...]] = []

    def compiled_double(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return 2 * x

    monkeypatch.setattr(torch, "compile", lambda *_, **__: compiled_double)

    @compiled_instead_of(_double, from_numbers=0, first=lambda x: (x[:256, :2],))
    def double(x: Tensor) -> Tensor:
        return x + x

    wide = torch.randn(MANY, 9)
    assert torch.equal(double(wide), 2 * wide)
    assert seen == [(256, 2), (MANY, 9)]
    double(torch.randn(2 * MANY, 5))
    assert seen[2:] == [(2 * MANY, 5)]
    double(wide.double())  # which the compiler would make other loops for
    assert seen[3:] == [(256, 2), (MANY, 9)]


@pytest.mark.usefixtures("nothing_broken")
def test_options_of_the_compiler_do_not_pile_up() -> None:
    """Each patch of its configuration would stay alive in this thread."""
    logits_RV = torch.randn(MANY, 64)
    vocabulary.summarise(logits_RV)
    before = len(contextvars.copy_context())
    for _ in range(5):
        vocabulary.summarise(logits_RV)
    assert len(contextvars.copy_context()) == before
    assert not torch._dynamo.config.allow_unspec_int_on_nn_module


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "qwen3", "gemma"])
@pytest.mark.usefixtures("nothing_broken")
def test_compiled_layers_decode_what_plain_ones_do(
    monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    model = random_model(model_type)
    monkeypatch.setattr(beginnings, "_PARTED_FROM", 0.0)
    prefix_GP = torch.tensor([[3, 4, 5], [5, 6, 2]])

    def decoded() -> Decoded:
        return decode(
            model,
            prefix_GP,
            samples_per_prefix=MANY // 2,
            num_tokens=5,
            uniform_at=lambda step: torch.from_numpy(uniform(0, 0, step, 0, MANY)),
        )

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "_pays", lambda *_: False)
        plain = decoded()
    fused = decoded()
    assert not compiled._broken
    assert torch.equal(fused.ids_NC, plain.ids_NC)
    torch.testing.assert_close(fused.log_prob_NC, plain.log_prob_NC, rtol=1e-4, atol=1e-4)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.usefixtures("nothing_broken")
def test_rows_that_become_many_on_the_way_decode_what_plain_ones_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Samples that begin alike are few rows at first, which are not compiled."""
    model = random_model("llama")
    rows_of_passes: list[int] = []
    layer = compiled.repeated_layers(model)[0]
    layer.register_forward_pre_hook(lambda _layer, inputs: rows_of_passes.append(len(inputs[0])))

    def decoded() -> Decoded:
        rows_of_passes.clear()
        return decode(
            model,
            torch.tensor([[3, 4, 5], [5, 6, 2]]),
            samples_per_prefix=2 * MANY,
            num_tokens=9,
            uniform_at=lambda step: torch.from_numpy(uniform(0, 0, step, 0, 4 * MANY)),
        )

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "_pays", lambda *_: False)
        patch.setattr(beginnings, "_PARTED_FROM", 0.0)
        plain = decoded()
    fused = decoded()
    assert not compiled._broken
    # A pass over the prefixes, few rows, many that are shared, and then one for each sample.
    assert rows_of_passes[1] < 256
    assert any(256 <= rows < 4 * MANY for rows in rows_of_passes)
    assert rows_of_passes[-1] == 4 * MANY
    assert torch.equal(fused.ids_NC, plain.ids_NC)
    torch.testing.assert_close(fused.log_prob_NC, plain.log_prob_NC, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", [{}, {"truncation": Truncation(top_k=2), "num_tokens": 16}])
@pytest.mark.usefixtures("nothing_broken")
def test_what_was_decoded_first_changes_no_bit_of_what_follows(
    first: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler sees the first chunk's size, and how many tokens its samples had when they
    became many rows: a resumed run may begin with another one."""
    monkeypatch.setattr(
        shared_prefix, "can_attend", lambda _query: False
    )  # the kernel has no sizes
    config = AutoConfig.for_model(
        "llama",
        vocab_size=600,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    toys.scale_up(model, 4.0)

    def decoded(rows: int, **options: Any) -> Decoded:
        return decode(
            model,
            torch.tensor([[3, 4, 5]]),
            samples_per_prefix=rows,
            uniform_at=lambda step: torch.from_numpy(uniform(0, 0, step, 0, rows)),
            **{"num_tokens": 20, **options},
        )

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compile_anew()
        decoded(900, **first)
        after = decoded(MANY)
        compile_anew()
        alone = decoded(MANY)
    finally:
        torch.set_num_threads(threads)
    assert not compiled._broken
    assert len(after.ids_NC.unique()) > 50
    for one, other in zip(after, alone, strict=True):
        assert torch.equal(one, other)


def _learnt(model: PreTrainedModel, ids_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch and the gradient of every weight."""
    loss: Tensor = model(ids_BT, labels=ids_BT).loss
    loss.backward()
    gradients = {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    model.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
@pytest.mark.usefixtures("nothing_broken")
def test_compiled_layers_learn_what_plain_ones_do(
    monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    model = random_model(model_type).train()
    ids_BT = torch.randint(0, 7, (3, 9), generator=torch.Generator().manual_seed(0))
    expected, gradients = _learnt(model, ids_BT)
    monkeypatch.setattr(compiled, "_FROM_TRAINED", 1)
    torch._dynamo.reset()
    compiled._compiled_forwards.clear()
    torch._dynamo.utils.counters.clear()
    with compiled_training(model, num_tokens=1):
        loss, fused = _learnt(model, ids_BT)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with torch.no_grad():
            model(ids_BT)
        # Layers with number 0, with 1, and all others.
        assert 1 <= graphs <= 3
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "validation is not"
    assert not compiled._broken
    assert not any("forward" in vars(module) for module in model.modules())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert fused.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused[name], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "changes", "options", "expected"),
    [
        ("llama", {}, {"num_tokens": 10**11}, True),
        ("llama", {}, {"num_tokens": 10**3}, False),
        ("llama", {"attention_dropout": 0.1}, {"num_tokens": 10**11}, False),
        ("llama", {"dropout": 0.1}, {"num_tokens": 10**11}, False),
        ("gpt2", {}, {"num_tokens": 10**11}, False),  # drops out
        ("gpt2", {}, {"num_tokens": 10**11, "dropout": False}, True),
    ],
    ids=str,
)
def test_which_trainings_are_compiled(
    model_type: str, changes: dict[str, float], options: dict[str, Any], expected: bool
) -> None:
    model = random_model(model_type)
    layers = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
    assert len(layers) == 3
    for layer in layers:
        vars(layer).update(changes)
    with compiled_training(model, **options):
        assert all(("forward" in vars(layer)) == expected for layer in layers)


@pytest.mark.usefixtures("nothing_broken")
def test_an_interrupted_compiled_training_ends_with_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever else the process compiled of the same layers before."""
    monkeypatch.setattr(compiled, "_FROM_TRAINED", 1)
    ids_SBT = torch.randint(0, 7, (4, 3, 9), generator=torch.Generator().manual_seed(0))
    config = TrainingConfig(
        steps=4,
        batch_size=3,
        learning_rate=1e-2,
        precision="bfloat16",
        validate_every=4,
        checkpoint_every=10,
    )
    log = TrainingLog(write=lambda _step, _values: None, rewind=lambda _step: None)

    def trained(folder: str, stop_at: int | None, *, fresh: bool = True) -> PreTrainedModel:
        if fresh:  # as in a process of its own
            torch._dynamo.reset()
            compiled._compiled_forwards.clear()
        model = random_model("llama")

        def loss_at(step: int, _part: int) -> Tensor:
            if step == stop_at:
                signal.raise_signal(signal.SIGINT)
            return next_token_loss(model, ids_SBT[step])

        torch._dynamo.utils.counters.clear()
        with compiled_training(model, 1, dropout=False):
            train(
                model,
                config,
                loss_at=loss_at,
                validate=lambda: {"loss": next_token_loss(model, ids_SBT[0]).item()},
                seed=0,
                folder=tmp_path / folder,
                log=log,
                progress=QUIET,
                label="toy",
            )
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
        return model

    whole = trained("whole", None)
    with pytest.raises(KeyboardInterrupt):
        trained("parts", 1)
    torch._dynamo.reset()
    compiled._compiled_forwards.clear()
    other = random_model("llama")
    with compiled_training(other, 1, dropout=False):
        next_token_loss(other, ids_SBT[0][:2, :5]).backward()
    resumed = trained("parts", None, fresh=False)
    assert not compiled._broken
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_a_network_of_no_model_trains_as_it_is() -> None:
    network = torch.nn.Linear(2, 1)
    with compiled_training(network, 10**15):
        assert "forward" not in vars(network)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_child_does_not_wait_for_threads_of_its_parent() -> None:
    with torch._inductor.config.patch(compile_threads=2):
        AsyncCompile.pool().submit(int).result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the very thing
        child = os.fork()
    if child == 0:
        os._exit(AsyncCompile.pool.cache_info().currsize)
    assert os.waitpid(child, 0)[1] == 0
    assert AsyncCompile.pool.cache_info().currsize == 1
