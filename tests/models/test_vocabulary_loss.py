"""The loss in pieces is the loss of the whole, gradients included."""

import pytest
import torch
import toys
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    Gemma2Config,
    GraniteConfig,
    PretrainedConfig,
)

from residual_ebm.models import compiled, vocabulary_loss
from residual_ebm.models.both_ways import make_bidirectional
from residual_ebm.models.masking import IGNORED
from residual_ebm.models.ralm import RalmForCausalLM
from residual_ebm.models.vocabulary_loss import masked_token_loss, next_token_loss


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize("rows_at_once", [1, 4, 1000])
def test_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch, model_type: str, rows_at_once: int
) -> None:
    model = toys.causal_model(model_type)
    monkeypatch.setattr(vocabulary_loss, "_LOGITS_AT_ONCE", 7 * rows_at_once)
    monkeypatch.setattr(vocabulary_loss, "FROM_ROWS", 1)
    ids_BT = torch.randint(0, 7, (3, 9), generator=torch.Generator().manual_seed(0))
    logits = model(ids_BT).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids_BT[:, 1:].flatten())
    (2 * expected).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = next_token_loss(model, ids_BT)
    (2 * loss).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients.pop(name), rtol=1e-3, atol=1e-4)
    assert not gradients


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [(Gemma2Config, {"final_logit_softcapping": 0.5}), (GraniteConfig, {"logits_scaling": 3.0})],
)
def test_logits_that_are_changed_after_the_last_layer(
    config_class: type[PretrainedConfig], changes: dict[str, float]
) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 7, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    model = AutoModelForCausalLM.from_config(
        config_class(**sizes, **heads, **changes, pad_token_id=0)
    )
    ids_BT = torch.randint(0, 7, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # as a residual starts
        next_token_loss(model, ids_BT)
        model.get_output_embeddings().weight.normal_().mul_(5)
    logits_RV = model(ids_BT).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits_RV, ids_BT[:, 1:].flatten())
    torch.testing.assert_close(next_token_loss(model, ids_BT), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("families", [("llama", "llama"), ("gpt2", "qwen3")], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("rows_at_once", [4, 1000])
def test_two_last_layers_of_which_one_learns(
    monkeypatch: pytest.MonkeyPatch, families: tuple[str, str], scale: float, rows_at_once: int
) -> None:
    base, residual = (toys.causal_model(family, seed=seed) for seed, family in enumerate(families))
    model = RalmForCausalLM.of(base, residual, scale).eval()
    monkeypatch.setattr(vocabulary_loss, "_LOGITS_AT_ONCE", 7 * rows_at_once)
    monkeypatch.setattr(vocabulary_loss, "FROM_ROWS", 1)
    ids_BT = torch.randint(0, 7, (3, 9), generator=torch.Generator().manual_seed(0))
    logits_RV = model(ids_BT).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits_RV, ids_BT[:, 1:].flatten())
    expected.backward()
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: p.grad.clone() for name, p in learning.items()}
    model.zero_grad()
    # Whole tables of logits are what the model itself would make.
    monkeypatch.setattr(RalmForCausalLM, "forward", None)
    loss = next_token_loss(model, ids_BT)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, parameter in learning.items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4)
    assert all(parameter.grad is None for parameter in base.parameters())
    with torch.no_grad():
        torch.testing.assert_close(next_token_loss(model, ids_BT), expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_products_give_nearly_the_same_loss() -> None:
    model = toys.causal_model()
    ids_BT = torch.randint(0, 7, (8, 20), generator=torch.Generator().manual_seed(0))
    exact = next_token_loss(model, ids_BT)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = next_token_loss(model, ids_BT)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)


def test_nothing_is_kept_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toys.causal_model()
    ids_BT = torch.randint(0, 7, (2, 5))
    made: list[Tensor] = []

    def zeros_like(like: Tensor) -> Tensor:
        made.append(like)
        return like.new_zeros(like.shape)

    monkeypatch.setattr(torch, "zeros_like", zeros_like)
    with torch.no_grad():
        assert not next_token_loss(model, ids_BT).requires_grad
    assert not made, "the gradient of the vocabulary layer was computed"
    next_token_loss(model, ids_BT)
    assert made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiled_slope_is_that_of_the_plain_way(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    logits_RV = (3 * torch.randn(300, 2**14, generator=draw)).to(dtype)
    target_R = torch.randint(0, 2**14, (300,), generator=draw)
    share = torch.tensor(1 / 300)
    fused_loss, fused = vocabulary_loss._loss_and_slope(logits_RV, target_R, share)
    assert not compiled._broken
    plain_loss, plain = vocabulary_loss._loss_and_slope_plain(logits_RV, target_R, share)
    torch.testing.assert_close(fused_loss, plain_loss, rtol=1e-5, atol=1e-5)
    assert fused.dtype == plain.dtype == dtype
    torch.testing.assert_close(fused, plain, rtol=1e-2, atol=1e-8)
    exact = logits_RV.double().requires_grad_()
    torch.nn.functional.cross_entropy(exact, target_R).backward()
    assert exact.grad is not None
    torch.testing.assert_close(fused.double(), exact.grad, rtol=1e-2, atol=1e-8)


def test_pieces_of_large_vocabularies_are_still_compiled() -> None:
    for vocabulary in (7, 49_152, 151_936, 262_144):
        pieces = [rows.stop - rows.start for rows in vocabulary_loss._some_rows(5000, vocabulary)]
        assert min(pieces) >= compiled.FROM_ROWS
        assert max(pieces) * vocabulary <= 2**26


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_as_they_are_need_no_float32_copy(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(vocabulary_loss, "_LOGITS_AT_ONCE", 50 * 4)
    monkeypatch.setattr(vocabulary_loss, "FROM_ROWS", 1)
    seen: list[tuple[int, torch.dtype]] = []
    right = vocabulary_loss._loss_and_slope

    def watched(logits: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((len(logits), logits.dtype))
        return right(logits, *rest)

    monkeypatch.setattr(vocabulary_loss, "_loss_and_slope", watched)
    draw = torch.Generator().manual_seed(0)
    logits_RV = (2 * torch.randn(10, 50, generator=draw)).to(dtype).requires_grad_()
    target_R = torch.randint(50, (10,), generator=draw)
    loss = vocabulary_loss._cross_entropy(logits_RV, target_R)
    (loss / 3).backward()
    assert seen == [(4, dtype), (4, dtype), (2, dtype)]
    exact = logits_RV.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, target_R)
    (expected / 3).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert logits_RV.grad is not None
    assert exact.grad is not None
    assert logits_RV.grad.dtype == dtype
    torch.testing.assert_close(logits_RV.grad.double(), exact.grad, rtol=2e-2, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(vocabulary_loss._cross_entropy(logits_RV, target_R), loss)
    assert vocabulary_loss._cross_entropy(logits_RV[:0], target_R[:0]) == 0
    # A third, which bfloat16 rounds, must not be rounded before it meets the slope.
    (whole,) = torch.autograd.grad(vocabulary_loss._cross_entropy(logits_RV, target_R), logits_RV)
    third = torch.tensor(1 / 3)
    torch.testing.assert_close(logits_RV.grad, (whole.float() * third).to(dtype), rtol=0, atol=0)
    assert len(seen) == 6  # without gradients none is computed


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2"])
def test_a_trial_spends_no_random_numbers(model_type: str) -> None:
    """The first step of a process, which tries the model out, drops the same numbers."""
    config = {
        "gpt2": toys.causal_model("gpt2").config,
        "gemma2": Gemma2Config(
            vocab_size=7,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            attention_dropout=0.3,
        ),
    }[model_type]
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    ids_BT = torch.arange(12).view(2, 6) % 7
    losses = []
    for _ in range(2):
        torch.manual_seed(5)
        losses.append(float(next_token_loss(model, ids_BT).detach()))
    assert model.training
    assert losses[0] == losses[1]
    assert float(next_token_loss(model, ids_BT).detach()) != losses[0]


@pytest.mark.parametrize("kind", ["bert", "modernbert", "mobilebert", "llama"])
def test_hidden_tokens_alone_give_the_loss_of_all_logits(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "llama":
        model = toys.causal_model("llama")
        assert make_bidirectional(model)
    else:
        sizes = {"vocab_size": 7, "hidden_size": 16, "intermediate_size": 16, "pad_token_id": 0}
        config = AutoConfig.for_model(
            kind, **sizes, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=32
        )
        if kind == "mobilebert":  # uses the weights of its last layer without calling it
            config.embedding_size = 8
            config.use_bottleneck = False
            config.true_hidden_size = config.intra_bottleneck_size = 16
        model = toys.scale_up(AutoModelForMaskedLM.from_config(config, dtype=torch.float32), 4.0)
    draw = torch.Generator().manual_seed(0)
    ids_BL = torch.randint(1, 7, (3, 9), generator=draw)
    mask_BL = torch.ones_like(ids_BL)
    mask_BL[1, 6:] = 0
    hidden_BL = (torch.rand(3, 9, generator=draw) < 0.4) & (mask_BL > 0)
    target_BL = torch.where(hidden_BL, ids_BL, IGNORED)
    logits = model(input_ids=ids_BL, attention_mask=mask_BL).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target_BL.flatten())
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = masked_token_loss(model, ids_BL, mask_BL, target_BL)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            model.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-5, msg=name
        )
    model(input_ids=ids_BL, attention_mask=mask_BL)  # the hook is gone
