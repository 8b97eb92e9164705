"""RALM is a language model like any other, and P_LM itself when P_phi is constant.

Shapes: B blocks, T tokens, P tokens of a prefix, V vocabulary, N samples.
"""

from pathlib import Path

import pytest
import torch
import toys
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from residual_ebm.config import ContinuationMode
from residual_ebm.models import compiled
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.models.prefix_steps import can_share_prefix
from residual_ebm.models.ralm import RalmForCausalLM
from residual_ebm.models.vocabulary_loss import next_token_loss

PAIRS = [
    ("llama", "llama"),
    ("gpt2", "gpt2"),
    ("gpt2", "llama"),
    ("gpt_neox", "qwen3"),
    ("llama", "mistral"),
]


def ralm(
    base: str = "llama", residual: str = "llama", residual_scale: float = 1.0
) -> RalmForCausalLM:
    return RalmForCausalLM.of(
        toys.causal_model(base, seed=0), toys.causal_model(residual, seed=5), residual_scale
    ).eval()


def some_ids(rows: int = 3, length: int = 9) -> Tensor:
    return torch.randint(0, 7, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("base", "residual"), PAIRS)
@torch.inference_mode()
def test_probabilities_are_the_normalised_product(base: str, residual: str) -> None:
    model, ids_BT = ralm(base, residual), some_ids()
    prob_BTV = model(ids_BT).logits.double().softmax(-1)
    first = toys.causal_model(base, seed=0)(ids_BT).logits.double().softmax(-1)
    second = toys.causal_model(residual, seed=5)(ids_BT).logits.double().softmax(-1)
    product_BTV = first * second / (first * second).sum(-1, keepdim=True)
    torch.testing.assert_close(prob_BTV, product_BTV, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(prob_BTV.sum(-1), torch.ones(3, 9).double())
    assert (prob_BTV - first).abs().max() > 0.1  # the residual matters here


@torch.inference_mode()
def test_a_constant_residual_is_the_language_model_itself() -> None:
    model = ralm()
    model.residual.get_output_embeddings().weight.zero_()
    lm = LanguageModel(model, toys.word_tokenizer())
    ids_BT = some_ids(20, toys.BLOCK_LENGTH)
    expected_BC = toys.language_model().log_prob(ids_BT, toys.PREFIX_LENGTH)
    log_prob_BC = lm.log_prob(ids_BT, toys.PREFIX_LENGTH)
    torch.testing.assert_close(log_prob_BC, expected_BC, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("base", "residual"), PAIRS)
@torch.inference_mode()
def test_one_cache_serves_both_parts(base: str, residual: str) -> None:
    model, ids_BT = ralm(base, residual), some_ids()
    cache = DynamicCache()
    parts = [
        model(ids_BT[:, start:end], past_key_values=cache, use_cache=True).logits
        for start, end in ((0, 4), (4, 5), (5, 9))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids_BT).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", toys.MODES)
@pytest.mark.parametrize(("base", "residual"), PAIRS)
def test_samples_follow_it(base: str, residual: str, mode: ContinuationMode) -> None:
    lm = LanguageModel(ralm(base, residual), toys.word_tokenizer(), "toy ralm")
    assert can_share_prefix(lm.model, toys.BLOCK_LENGTH) == (residual != "mistral")
    every = toys.enumerate_continuations(lm, toys.prompt_ids(), toys.NUM_NEW, mode)
    samples = lm.sample(every.prefix_P, 4000, toys.NUM_NEW, seed=1, stop_at_end=mode == "until_end")
    assert toys.chi_square_p(every.counts(samples.ids_NT), every.log_prob_N.exp()) > 1e-3
    number_N = every.number_of(samples.ids_NT)
    torch.testing.assert_close(samples.log_prob_N, every.log_prob_N[number_N], rtol=1e-3, atol=1e-3)


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    model, ids_BT = ralm("gpt2", "llama", residual_scale=0.3), some_ids()
    model.save_pretrained(tmp_path)
    toys.word_tokenizer().save_pretrained(tmp_path)
    loaded = LanguageModel.from_pretrained(tmp_path, precision="float32")
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids_BT).logits, model(ids_BT).logits)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), RalmForCausalLM)
    assert loaded.vocabulary_size == 7
    assert loaded.context_length == toys.CONTEXT
    # What does not learn before it is saved does not learn afterwards.
    learning = [name for name, value in loaded.model.named_parameters() if value.requires_grad]
    assert learning
    assert all(name.startswith("residual.") for name in learning)
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".bin", ".pt", ".pkl")]


def gradients(model: PreTrainedModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_only_the_residual_learns() -> None:
    model = ralm()
    loss = next_token_loss(model, some_ids())
    logits_RV = model(some_ids()).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits_RV, some_ids()[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert gradients(model)
    assert all(name.startswith("residual.") for name in gradients(model))


def test_precision_is_that_of_both_parts(tmp_path: Path) -> None:
    ralm("gpt2", "llama").save_pretrained(tmp_path)
    toys.word_tokenizer().save_pretrained(tmp_path)
    loaded = LanguageModel.from_pretrained(tmp_path, precision="bfloat16")
    assert {value.dtype for value in loaded.model.parameters()} == {torch.bfloat16}


@torch.inference_mode()
def test_it_generates_as_transformers_models_do() -> None:
    model, ids_BT = ralm("gpt2", "llama"), some_ids(2, 4)
    generated = model.generate(
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        do_sample=False,
        max_new_tokens=3,
        min_new_tokens=3,
        pad_token_id=0,
    )
    expected = ids_BT
    for _ in range(3):
        logits_BV = model(expected).logits[:, -1]
        logits_BV[:, toys.END] = -torch.inf  # as min_new_tokens does
        expected = torch.cat([expected, logits_BV.argmax(-1, keepdim=True)], 1)
    assert torch.equal(generated, expected)
    logits_RV = model(ids_BT).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits_RV, ids_BT[:, 1:].flatten())
    torch.testing.assert_close(model(ids_BT, labels=ids_BT).loss, loss)


def test_compiled_layers_of_both_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = LanguageModel(ralm("llama", "qwen3"), toys.word_tokenizer())
    prefix_P = torch.tensor([3, 4, 5])
    plain = lm.sample(prefix_P, 300, 5, seed=0)
    monkeypatch.setattr(compiled, "_pays", lambda _device, rows, *_: rows >= 256)
    monkeypatch.setattr(compiled, "_broken", set())
    fused = lm.sample(prefix_P, 300, 5, seed=0)
    assert not compiled._broken
    assert torch.equal(fused.ids_NT, plain.ids_NT)
    torch.testing.assert_close(fused.log_prob_N, plain.log_prob_N, rtol=1e-4, atol=1e-4)


def test_a_part_with_attention_of_its_own_keeps_its_prefix_to_itself() -> None:
    model = ralm()
    assert can_share_prefix(model, 6)
    type(model.residual)._supports_attention_backend = False
    try:
        assert not can_share_prefix(model, 6)
    finally:
        type(model.residual)._supports_attention_backend = True


def test_a_scaled_residual_is_a_flatter_one() -> None:
    ids_BT = some_ids()
    with torch.inference_mode():
        model = ralm(residual_scale=0.3)
        base_BTV, residual_BTV = (part(ids_BT, use_cache=False).logits for part in model.parts)
        torch.testing.assert_close(model(ids_BT).logits, base_BTV + 0.3 * residual_BTV)


def test_a_residual_that_says_nothing_at_first_still_learns() -> None:
    model = ralm()
    with torch.no_grad():
        model.residual.get_output_embeddings().weight.zero_()
    next_token_loss(model, some_ids()).backward()
    gradient = model.residual.get_output_embeddings().weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 0
