"""P_LM scores what it samples, and its samples are functions of their keys.

Shapes: B blocks, T tokens of a block, C new tokens, V vocabulary, N samples.
"""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from residual_ebm.config import ContinuationMode
from residual_ebm.errors import UserError
from residual_ebm.models import vocabulary
from residual_ebm.models.decoding import UNTRUNCATED, Decoded, Truncation
from residual_ebm.models.language_model import LanguageModel, Samples

# Longer than the windows of gemma (4) and mistral (3).
PREFIX = torch.tensor([3, 4, 5, 6, 3, 5, 4])
NUM_NEW = 8


def sample(
    lm: LanguageModel, num_samples: int, mode: ContinuationMode = "fixed", seed: int = 1
) -> Samples:
    return lm.sample(PREFIX, num_samples, NUM_NEW, seed, stop_at_end=mode == "until_end")


def blocks_of(samples: Samples) -> tuple[Tensor, Tensor]:
    ids_NT = torch.cat([PREFIX.expand(len(samples.ids_NT), -1), samples.ids_NT], dim=1)
    return ids_NT, len(PREFIX) + samples.length_N


@torch.inference_mode()
def plain_log_prob(lm: LanguageModel, ids_BT: Tensor, prefix_length: int) -> Tensor:
    """Softmax of the whole sequence's logits, one token after the other."""
    log_prob_BTV = lm.model(ids_BT, use_cache=False).logits.double().log_softmax(-1)
    columns = [
        log_prob_BTV[torch.arange(len(ids_BT)), place - 1, ids_BT[:, place]]
        for place in range(prefix_length, ids_BT.shape[1])
    ]
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("mode", toys.MODES)
@pytest.mark.parametrize("model_type", toys.ARCHITECTURES)
def test_sampled_log_probs_are_the_models_own(model_type: str, mode: ContinuationMode) -> None:
    lm = toys.language_model(model_type)
    samples = sample(lm, 200, mode)
    ids_NT, length_N = blocks_of(samples)
    own_NC = lm.log_prob(ids_NT, len(PREFIX), length_N)
    assert samples.log_prob_N.dtype == torch.float64
    assert torch.allclose(samples.log_prob_N, own_NC.double().sum(-1), atol=1e-4)
    assert torch.equal(samples.proposal_log_prob_N, samples.log_prob_N)
    plain_NC = plain_log_prob(lm, ids_NT, len(PREFIX))
    inside_NC = torch.arange(NUM_NEW) < samples.length_N[:, None]
    assert torch.allclose((plain_NC * inside_NC).sum(-1), samples.log_prob_N, atol=1e-4)
    assert (samples.length_N < NUM_NEW).any() == (mode == "until_end")


@pytest.mark.parametrize("model_type", ["gemma3_text", "mistral"])
def test_the_windows_of_the_toys_are_felt(model_type: str) -> None:
    # Otherwise the laws above would say nothing of sliding windows.
    unlimited = LanguageModel(
        toys.causal_model(model_type, sliding_window=toys.CONTEXT), toys.word_tokenizer()
    )
    ids_NT, _ = blocks_of(sample(toys.language_model(model_type), 20))
    within, without = (
        lm.log_prob(ids_NT, len(PREFIX)) for lm in (toys.language_model(model_type), unlimited)
    )
    assert (within - without).abs().max() > 0.1


def test_bfloat16_samples_are_scored_as_bfloat16() -> None:
    """The type that samples is the type that scores. Compiled, a decoder rounds less often: 0.1
    nats a token at most, 0.005 on average, for logits below 4 in 8 bits."""
    lm = LanguageModel(toys.causal_model().to(torch.bfloat16), toys.word_tokenizer())
    decoded = chunk(lm, PREFIX[None], [0], num_samples=300)
    ids_NT = torch.cat([PREFIX.expand(300, -1), decoded.ids_NC], dim=1)
    own_NC = lm.log_prob(ids_NT, len(PREFIX))
    assert own_NC.dtype == decoded.log_prob_NC.dtype == torch.float32
    difference_NC = (decoded.log_prob_NC - own_NC).abs()
    assert difference_NC.max() < 0.15
    assert difference_NC.mean() < 0.008
    # The float32 model is another distribution, further away than that.
    float32_NC = toys.language_model().log_prob(ids_NT, len(PREFIX))
    assert (float32_NC - own_NC).abs().mean() > 0.01


def chunk(
    lm: LanguageModel,
    prefix_ids_GP: Tensor,
    prefix_numbers: list[int],
    *,
    first_sample: int = 0,
    num_samples: int = 20,
    num_tokens: int = NUM_NEW,
    seed: int = 1,
    truncation: Truncation = UNTRUNCATED,
    mode: ContinuationMode = "fixed",
) -> Decoded:
    return lm.sample_chunk(
        prefix_ids_GP,
        prefix_numbers=prefix_numbers,
        first_sample=first_sample,
        num_samples=num_samples,
        num_tokens=num_tokens,
        seed=seed,
        truncation=truncation,
        stop_at_end=mode == "until_end",
    )


@pytest.mark.parametrize("mode", toys.MODES)
@pytest.mark.parametrize("top_k", [None, 3])
def test_a_sample_does_not_depend_on_the_chunk_size(
    mode: ContinuationMode, top_k: int | None
) -> None:
    lm = toys.language_model()
    whole, *others = (
        lm.sample(
            PREFIX, 23, NUM_NEW, 1, top_k=top_k, stop_at_end=mode == "until_end", chunk_size=size
        )
        for size in (512, 23, 7, 1)
    )
    assert len(whole.ids_NT.unique(dim=0)) > 10
    for other in others:
        assert torch.equal(other.ids_NT, whole.ids_NT)
        assert torch.equal(other.length_N, whole.length_N)
        assert torch.allclose(other.log_prob_N, whole.log_prob_N, atol=1e-4)
        assert torch.allclose(other.proposal_log_prob_N, whole.proposal_log_prob_N, atol=1e-4)


@pytest.mark.parametrize("mode", toys.MODES)
def test_a_sample_does_not_depend_on_the_prefixes_decoded_with_it(mode: ContinuationMode) -> None:
    lm = toys.language_model()
    prefix_ids_GP = torch.tensor([[3, 4, 5], [6, 6, 0], [3, 3, 3], [3, 3, 3]])
    numbers = [4, 9, 2, 11]
    together = chunk(lm, prefix_ids_GP, numbers, first_sample=5, mode=mode)
    for row, number in enumerate(numbers):
        alone = chunk(lm, prefix_ids_GP[row : row + 1], [number], first_sample=5, mode=mode)
        rows = slice(20 * row, 20 * row + 20)
        assert torch.equal(together.ids_NC[rows], alone.ids_NC)
        assert torch.equal(together.length_N[rows], alone.length_N)
        assert torch.allclose(together.log_prob_NC[rows], alone.log_prob_NC, atol=1e-4)
    # The same prefix under another number has samples of its own.
    assert not torch.equal(together.ids_NC[40:60], together.ids_NC[60:80])


@pytest.mark.parametrize("mode", toys.MODES)
def test_the_first_tokens_do_not_depend_on_how_many_are_asked_for(mode: ContinuationMode) -> None:
    lm = toys.language_model()
    long = chunk(lm, PREFIX[None], [0], mode=mode)
    for num_tokens in (1, 2, 5):
        short = chunk(lm, PREFIX[None], [0], num_tokens=num_tokens, mode=mode)
        assert short.ids_NC.shape == (20, num_tokens)
        assert torch.equal(short.ids_NC, long.ids_NC[:, :num_tokens])
        assert torch.equal(short.length_N, long.length_N.clamp(max=num_tokens))


def test_more_samples_begin_with_the_same_ones_and_seeds_differ() -> None:
    lm = toys.language_model()
    few, many, other = sample(lm, 10), sample(lm, 30), sample(lm, 30, seed=2)
    assert torch.equal(few.ids_NT, many.ids_NT[:10])
    assert not torch.equal(many.ids_NT, other.ids_NT)


def test_samples_do_not_touch_the_global_generator() -> None:
    lm = toys.language_model()
    torch.manual_seed(0)
    first = sample(lm, 10)
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(sample(lm, 10).ids_NT, first.ids_NT)
    torch.manual_seed(0)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(2, None), (None, 0.6), (3, 0.8)], ids=["top_k", "top_p", "both"]
)
@pytest.mark.parametrize("mode", toys.MODES)
def test_truncated_samples_keep_both_log_probs_apart(
    top_k: int | None, top_p: float | None, mode: ContinuationMode
) -> None:
    lm, every = toys.language_model(), toys.everything(mode)
    proposal_N = toys.truncated_log_prob(lm, every, top_k, top_p)
    assert proposal_N.exp().sum().item() == pytest.approx(1, abs=1e-6)
    samples = lm.sample(
        every.prefix_P,
        500,
        toys.NUM_NEW,
        0,
        top_k=top_k,
        top_p=top_p,
        stop_at_end=mode == "until_end",
    )
    number_N = every.number_of(samples.ids_NT)
    assert torch.allclose(samples.log_prob_N, every.log_prob_N[number_N], atol=1e-4)
    assert torch.allclose(samples.proposal_log_prob_N, proposal_N[number_N], atol=1e-4)
    assert (samples.proposal_log_prob_N > samples.log_prob_N + 0.1).any()
    expected = {"top_k": top_k, "top_p": top_p}
    assert samples.truncation == {key: value for key, value in expected.items() if value}


@pytest.mark.parametrize(
    "cut",
    [{"top_p": 1.0}, {"top_k": 7}, {"top_k": 50}, {"top_k": 7, "top_p": 1.0}],
    ids=str,
)
def test_cutting_nothing_off_is_sampling_from_the_model_itself(cut: dict[str, float]) -> None:
    lm = toys.language_model()
    assert len(lm.tokenizer) == 7
    plain = lm.sample(PREFIX, 200, NUM_NEW, 1)
    samples = lm.sample(PREFIX, 200, NUM_NEW, 1, **cut)  # type: ignore[arg-type]
    assert torch.equal(samples.ids_NT, plain.ids_NT)
    assert torch.allclose(samples.proposal_log_prob_N, plain.log_prob_N, atol=1e-4)
    # None says "draws of P_LM itself", and these are.
    assert plain.truncation is None
    assert samples.truncation is None


@pytest.mark.parametrize("model_type", toys.ARCHITECTURES)
def test_log_prob_is_the_softmax_of_each_token(model_type: str) -> None:
    lm = toys.language_model(model_type)
    ids_BT, _ = blocks_of(sample(lm, 30))
    for prefix_length in (1, 3, len(PREFIX), ids_BT.shape[1] - 1):
        log_prob_BC = lm.log_prob(ids_BT, prefix_length)
        assert log_prob_BC.shape == (30, ids_BT.shape[1] - prefix_length)
        expected_BC = plain_log_prob(lm, ids_BT, prefix_length)
        assert torch.allclose(log_prob_BC.double(), expected_BC, atol=1e-4)


@pytest.mark.parametrize("model_type", toys.ARCHITECTURES)
def test_padding_is_worth_nothing_and_changes_nothing(model_type: str) -> None:
    lm = toys.language_model(model_type)
    ids_NT, length_N = blocks_of(sample(lm, 100, "until_end"))
    log_prob_NC = lm.log_prob(ids_NT, len(PREFIX), length_N)
    padding_NT = torch.arange(ids_NT.shape[1]) >= length_N[:, None]
    padding_NC = padding_NT[:, len(PREFIX) :]
    assert padding_NC.any()
    assert (log_prob_NC[padding_NC] == 0).all()
    assert (log_prob_NC[~padding_NC] < 0).all()
    other_NT = torch.where(padding_NT, 5, ids_NT)
    assert torch.equal(lm.log_prob(other_NT, len(PREFIX), length_N), log_prob_NC)
    for row in range(0, 100, 9):
        length = int(length_N[row])
        alone_C = lm.log_prob(ids_NT[row : row + 1, :length], len(PREFIX))[0]
        assert torch.allclose(alone_C, log_prob_NC[row, : length - len(PREFIX)], atol=1e-5)


def test_a_batch_of_one_is_scored_as_a_batch_of_many() -> None:
    lm = toys.language_model()
    ids_NT, _ = blocks_of(sample(lm, 40))
    many_NC = lm.log_prob(ids_NT, len(PREFIX))
    one_NC = torch.cat([lm.log_prob(row_T[None], len(PREFIX)) for row_T in ids_NT])
    assert torch.allclose(one_NC, many_NC, atol=1e-5)


@pytest.mark.parametrize("mode", toys.MODES)
@pytest.mark.parametrize("model_type", toys.ARCHITECTURES)
def test_all_continuations_together_have_probability_one(
    model_type: str, mode: ContinuationMode
) -> None:
    lm = toys.language_model(model_type)
    for prefix in ([3], [4, 6], [0, 0, 5]):
        every = toys.enumerate_continuations(lm, prefix, 3, mode)
        assert len(every) == (7**3 if mode == "fixed" else 1 + 6 + 6 * 6 * 7)
        assert every.log_prob_N.exp().sum().item() == pytest.approx(1, abs=1e-5)


@torch.inference_mode()
def test_features_are_what_the_model_computed() -> None:
    lm = toys.language_model()
    ids_BT, _ = blocks_of(sample(lm, 20))
    features = lm.features(ids_BT, len(PREFIX))
    output = lm.model(ids_BT, use_cache=False, output_hidden_states=True)
    predicting = slice(len(PREFIX) - 1, -1)
    hidden_BCH = output.hidden_states[-1][:, predicting]
    log_prob_BCV = output.logits[:, predicting].double().log_softmax(-1)
    assert torch.allclose(features.hidden_BCH, hidden_BCH, atol=1e-4)
    entropy_BC = -(log_prob_BCV.exp() * log_prob_BCV).sum(-1)
    assert torch.allclose(features.entropy_BC.double(), entropy_BC, atol=1e-4)
    embedding_BCH = lm.model.get_input_embeddings().weight[ids_BT[:, len(PREFIX) :]]
    assert torch.equal(features.embedding_BCH, embedding_BCH)
    assert torch.equal(features.log_prob_BC, lm.log_prob(ids_BT, len(PREFIX)))
    assert features.hidden_BCH.shape == (20, NUM_NEW, lm.hidden_size)


def test_few_logits_at_once_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = toys.language_model()
    ids_BT, _ = blocks_of(sample(lm, 20))
    whole = lm.features(ids_BT, len(PREFIX))
    for numbers_at_once in (1, 20, 7 * 33):
        monkeypatch.setattr(vocabulary, "LOGITS_AT_ONCE", numbers_at_once)
        parts = lm.features(ids_BT, len(PREFIX))
        assert torch.allclose(parts.log_prob_BC, whole.log_prob_BC, atol=1e-6)
        assert torch.allclose(parts.entropy_BC, whole.entropy_BC, atol=1e-6)


def test_autocast_around_it_does_not_change_the_language_model() -> None:
    # HeaT trains under autocast; the features it sees there are those it sees later.
    lm = toys.language_model()
    ids_BT, _ = blocks_of(sample(lm, 20))
    outside, scored = lm.features(ids_BT, len(PREFIX)), lm.log_prob(ids_BT, len(PREFIX))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = lm.features(ids_BT, len(PREFIX))
        assert torch.equal(lm.log_prob(ids_BT, len(PREFIX)), scored)
    for name in outside._fields:
        assert getattr(inside, name).dtype == torch.float32
        assert torch.equal(getattr(inside, name), getattr(outside, name)), name


def test_dropout_is_off_even_for_a_model_that_was_training() -> None:
    model = toys.causal_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    ids_BT = torch.tensor([[3, 4, 5, 6, 3]])
    lm = LanguageModel(model.train(), toys.word_tokenizer())
    assert torch.equal(lm.log_prob(ids_BT, 2), lm.log_prob(ids_BT, 2))
    assert torch.allclose(lm.log_prob(ids_BT, 2), toys.language_model("gpt2").log_prob(ids_BT, 2))


def test_a_saved_model_is_the_same_model(tmp_path: Path) -> None:
    lm = toys.language_model()
    for name, model in (("one", lm.model), ("other", toys.causal_model(seed=7))):
        model.save_pretrained(tmp_path / name)
        lm.tokenizer.save_pretrained(tmp_path / name)
    loaded = LanguageModel.from_pretrained(tmp_path / "one", precision="float32", device="cpu")
    assert {weight.data_ptr() % 64 for weight in loaded.model.parameters()} == {0}
    ids_NT, _ = blocks_of(sample(lm, 20))
    assert torch.equal(loaded.log_prob(ids_NT, 3), lm.log_prob(ids_NT, 3))
    assert torch.equal(sample(loaded, 20).ids_NT, sample(lm, 20).ids_NT)
    again, other = (
        LanguageModel.from_pretrained(tmp_path / name, precision="float32", device="cpu")
        for name in ("one", "other")
    )
    assert loaded.fingerprint == again.fingerprint != other.fingerprint
    in_bfloat16 = LanguageModel.from_pretrained(tmp_path / "one", precision="bfloat16")
    assert in_bfloat16.model.dtype == torch.bfloat16


def test_more_tokens_than_the_context_are_refused() -> None:
    lm = toys.language_model()
    assert lm.context_length == toys.CONTEXT
    fits = toys.CONTEXT - len(PREFIX)
    assert lm.sample(PREFIX, 2, fits, 0).ids_NT.shape == (2, fits)
    with pytest.raises(UserError, match=r"prompt = 33 tokens.*context of 32; shorten"):
        lm.sample(PREFIX, 2, fits + 1, 0)


def test_a_tokenizer_without_an_end_of_text_is_refused() -> None:
    nameless = PreTrainedTokenizerFast(tokenizer_object=toys.word_tokenizer().backend_tokenizer)
    with pytest.raises(UserError, match="no end-of-text token"):
        LanguageModel(toys.causal_model(), nameless)


def test_of_earlier_chunks_only_sums_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory must not grow by what every token of every sample had."""
    lm = toys.language_model("llama")
    whole = sample(lm, 40)
    draw = lm.sample_chunk
    alive: list[weakref.ref[Tensor]] = []

    def watched(**chunk: Any) -> Decoded:
        gc.collect()
        assert not any(tensor() is not None for tensor in alive)
        decoded = draw(**chunk)
        alive.append(weakref.ref(decoded.log_prob_NC))
        alive.append(weakref.ref(decoded.proposal_log_prob_NC))
        return decoded

    monkeypatch.setattr(lm, "sample_chunk", watched)
    samples = lm.sample(PREFIX, 40, NUM_NEW, 1, chunk_size=10)
    assert len(alive) == 8
    assert torch.equal(samples.ids_NT, whole.ids_NT)
    torch.testing.assert_close(samples.log_prob_N, whole.log_prob_N, rtol=1e-5, atol=1e-5)
