"""A given continuation goes through the decoder like a drawn one, and disturbs none of those."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import toys

from residual_ebm.config import ContinuationMode
from residual_ebm.models import beginnings, prefix_steps
from residual_ebm.models.decoding import UNTRUNCATED, Decoded
from residual_ebm.models.language_model import LanguageModel, TokenFeatures

PREFIX_GP = torch.tensor([[3, 4, 3], [5, 6, 4]])
NUM_SAMPLES = 30


def sample(lm: LanguageModel, mode: ContinuationMode, **more: Any) -> tuple[Decoded, TokenFeatures]:
    return lm.sample_chunk_with_features(
        prefix_ids_GP=PREFIX_GP,
        prefix_numbers=[0, 1],
        first_sample=0,
        num_samples=NUM_SAMPLES,
        num_tokens=toys.NUM_NEW,
        seed=0,
        truncation=UNTRUNCATED,
        stop_at_end=mode == "until_end",
        **more,
    )


def first_and_rest(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    by_prefix = values.view(len(PREFIX_GP), 1 + NUM_SAMPLES, *values.shape[1:])
    return by_prefix[:, 0], by_prefix[:, 1:].flatten(0, 1)


@pytest.mark.parametrize("mode", toys.MODES)
def test_given_tokens_are_taken_and_scored(mode: ContinuationMode) -> None:
    lm = toys.language_model()
    given_GC = torch.randint(3, 7, (2, toys.NUM_NEW), generator=torch.Generator().manual_seed(0))
    if mode == "until_end":
        given_GC[0, 1:] = lm.end_of_text
    decoded, features = sample(lm, mode, given_ids_GC=given_GC)
    ids_GC, _ = first_and_rest(decoded.ids_NC)
    assert torch.equal(ids_GC, given_GC)
    length_G, _ = first_and_rest(decoded.length_N)
    assert length_G.tolist() == [2 if mode == "until_end" else toys.NUM_NEW, toys.NUM_NEW]
    blocks_GT = torch.cat([PREFIX_GP, given_GC], dim=1)
    expected_GC = lm.log_prob(blocks_GT, toys.PREFIX_LENGTH, toys.PREFIX_LENGTH + length_G)
    log_prob_GC, _ = first_and_rest(decoded.log_prob_NC)
    torch.testing.assert_close(log_prob_GC, expected_GC)
    read = lm.features(blocks_GT, toys.PREFIX_LENGTH)
    hidden_GCH, _ = first_and_rest(features.hidden_BCH)
    torch.testing.assert_close(hidden_GCH[1], read.hidden_BCH[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(hidden_GCH[0, :2], read.hidden_BCH[0, :2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", toys.MODES)
def test_the_others_are_drawn_as_without_them(mode: ContinuationMode) -> None:
    lm = toys.language_model()
    alone, _ = sample(lm, mode)
    beside, _ = sample(lm, mode, given_ids_GC=torch.full((2, toys.NUM_NEW), 5))
    assert torch.equal(first_and_rest(beside.ids_NC)[1], alone.ids_NC)
    assert torch.equal(first_and_rest(beside.length_N)[1], alone.length_N)
    torch.testing.assert_close(first_and_rest(beside.log_prob_NC)[1], alone.log_prob_NC)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_given_row_cannot_be_told_from_a_drawn_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, together: bool
) -> None:
    """The same tokens leave the same states, bit for bit, also where each sample has a row of its
    own: an energy that learns from them cannot find out which class it sees from how numbers were
    rounded."""
    if not together:
        monkeypatch.setattr(beginnings, "_PARTED_FROM", 0.0)
    lm = LanguageModel(deepcopy(toys.language_model().model).to(dtype), toys.word_tokenizer())
    alone, _ = sample(lm, "fixed")
    one_of_each_GC = alone.ids_NC.view(2, NUM_SAMPLES, -1)[:, 7]
    decoded, features = sample(lm, "fixed", given_ids_GC=one_of_each_GC)
    own_GC, drawn_NC = first_and_rest(decoded.ids_NC)
    same_N = (drawn_NC.view(2, NUM_SAMPLES, -1) == own_GC[:, None]).all(-1)
    assert same_N[:, 7].all()
    for part in (features.hidden_BCH, features.log_prob_BC, features.entropy_BC):
        own, drawn = first_and_rest(part)
        assert torch.equal(own, drawn.view(2, NUM_SAMPLES, *part.shape[1:])[:, 7])


def test_prefixes_that_are_read_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = toys.language_model()
    given_GC = torch.full((2, toys.NUM_NEW), 5)
    _, at_once = sample(lm, "fixed", given_ids_GC=given_GC)
    monkeypatch.setattr(prefix_steps, "_PREFIX_TOKENS_AT_ONCE", 1)
    _, in_two = sample(lm, "fixed", given_ids_GC=given_GC)
    torch.testing.assert_close(in_two.hidden_BCH, at_once.hidden_BCH)
