"""Samples that begin alike are one row of the network, and nobody can tell.

Shapes: G prefixes, S samples of each, N = G x S, U rows of the network, C tokens.
"""

from typing import Any

import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from residual_ebm.models import beginnings
from residual_ebm.models.beginnings import Beginnings
from residual_ebm.models.decoding import UNTRUNCATED, Decoded
from residual_ebm.models.language_model import LanguageModel, TokenFeatures

CPU = torch.device("cpu")
PREFIX_GP = torch.tensor([[3, 4, 3], [5, 6, 4]])
NUM_SAMPLES, NUM_TOKENS = 40, 6


@settings(derandomize=True, deadline=None)
@given(
    num_prefixes=st.integers(1, 4),
    samples_per_prefix=st.integers(1, 12),
    vocabulary=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_every_sample_has_a_row_with_its_own_tokens(
    num_prefixes: int, samples_per_prefix: int, vocabulary: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    num_samples = num_prefixes * samples_per_prefix
    token_NC = torch.randint(vocabulary, (num_samples, 5), generator=draw)
    alike = Beginnings(num_prefixes, samples_per_prefix, CPU)
    prefix_N = torch.arange(num_prefixes).repeat_interleave(samples_per_prefix)
    history_UC = torch.arange(num_prefixes)[:, None]  # what each row stands for, prefix first
    for step in range(5):
        token_U, before_U = alike.go_on(token_NC[:, step])
        if before_U is not None:
            history_UC = history_UC[before_U]
        history_UC = torch.cat([history_UC, token_U[:, None]], dim=1)
        expected_NC = torch.cat([prefix_N[:, None], token_NC[:, : step + 1]], dim=1)
        assert torch.equal(history_UC[alike.row_N], expected_NC)
        # Attention to the prefixes takes as many rows of each, prefix by prefix.
        by_prefix_GM = history_UC[:, 0].view(num_prefixes, -1)
        assert (by_prefix_GM == torch.arange(num_prefixes)[:, None]).all()
        by_prefix_GSC = expected_NC.view(num_prefixes, samples_per_prefix, -1)
        most = max(len(rows.unique(dim=0)) for rows in by_prefix_GSC)
        assert by_prefix_GM.shape[1] in (most, samples_per_prefix)


def test_rows_are_as_few_as_there_are_beginnings() -> None:
    alike = Beginnings(2, 10, CPU)
    token_N = torch.tensor([7] * 9 + [5] + [1, 2, 3] * 3 + [1])
    token_U, before_U = alike.go_on(token_N)
    assert len(token_U) == 2 * 3
    assert before_U is not None
    assert before_U.tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(token_U[alike.row_N], token_N)


def test_from_many_beginnings_on_every_sample_has_a_row_for_good() -> None:
    alike = Beginnings(1, 20, CPU)
    token_U, before_U = alike.go_on(torch.arange(20) // 2)
    assert len(token_U) == 10
    several_N = torch.arange(20).clamp(max=18)  # 19 of 20
    token_U, before_U = alike.go_on(several_N)
    assert torch.equal(token_U, several_N)
    assert before_U is not None
    assert torch.equal(before_U, torch.arange(20) // 2)
    assert torch.equal(alike.row_N, torch.arange(20))
    same_N = torch.zeros(20, dtype=torch.int64)  # as they may be after their end
    token_U, before_U = alike.go_on(same_N)
    assert torch.equal(token_U, same_N)
    assert before_U is None


def sample(lm: LanguageModel, **more: Any) -> tuple[Decoded, TokenFeatures]:
    arguments: dict[str, Any] = {
        "prefix_ids_GP": PREFIX_GP,
        "prefix_numbers": [0, 1],
        "first_sample": 0,
        "num_samples": NUM_SAMPLES,
        "num_tokens": NUM_TOKENS,
        "seed": 0,
        "truncation": UNTRUNCATED,
        "stop_at_end": False,
    }
    return lm.sample_chunk_with_features(**(arguments | more))


@pytest.mark.parametrize("stop_at_end", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "qwen3", "gemma3_text"])
def test_samples_and_states_are_those_of_rows_of_their_own(
    monkeypatch: pytest.MonkeyPatch, model_type: str, stop_at_end: bool
) -> None:
    # Gemma's window holds a whole passage here: else it would repeat its prefix.
    sizes = {"sliding_window": toys.CONTEXT} if model_type == "gemma3_text" else {}
    lm = LanguageModel(toys.causal_model(model_type, **sizes), toys.word_tokenizer())
    given_GC = torch.randint(3, 7, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    together, states = sample(lm, stop_at_end=stop_at_end, given_ids_GC=given_GC)
    monkeypatch.setattr(beginnings, "_PARTED_FROM", 0.0)
    apart, own_states = sample(lm, stop_at_end=stop_at_end, given_ids_GC=given_GC)
    assert torch.equal(together.ids_NC, apart.ids_NC)
    assert torch.equal(together.length_N, apart.length_N)
    for one, other in zip(together[2:5], apart[2:5], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for shared, own in zip(states, own_states, strict=True):
        torch.testing.assert_close(shared, own, rtol=1e-4, atol=1e-4)
    # They did share rows, and parted, or there was nothing to compare.
    num_rows = len(together.ids_NC)
    assert (apart.row_NC[:, 1:] == torch.arange(num_rows)[:, None]).all()
    rows_of_pass = together.row_NC.max(0).values
    assert 1 < rows_of_pass[1] < rows_of_pass[3] < num_rows


def test_states_are_those_of_the_blocks_read_at_once() -> None:
    lm = toys.language_model()
    decoded, states = sample(lm)
    prefix_NP = PREFIX_GP.repeat_interleave(NUM_SAMPLES, dim=0)
    read = lm.features(torch.cat([prefix_NP, decoded.ids_NC], dim=1), PREFIX_GP.shape[1])
    for drawn, whole in zip(states, read, strict=True):
        torch.testing.assert_close(drawn, whole, rtol=1e-4, atol=1e-4)


def test_rows_that_do_not_part_are_not_moved() -> None:
    alike = Beginnings(2, 10, CPU)
    token_N = torch.tensor([7] * 9 + [5] + [1, 2, 3] * 3 + [1])
    alike.go_on(token_N)
    token_U, before_U = alike.go_on(token_N + 1)
    assert before_U is None
    assert torch.equal(token_U[alike.row_N], token_N + 1)
    assert len(token_U) == 2 * 3


def test_the_network_reads_what_samples_share_once() -> None:
    lm = toys.language_model()
    sample(lm)  # how its prefix can be used is tried once
    rows_read: list[int] = []

    def count(_module: Any, inputs: tuple[Tensor, ...]) -> None:
        rows_read.append(len(inputs[0]))

    hook = lm.model.get_input_embeddings().register_forward_pre_hook(count)
    try:
        lm.sample(PREFIX_GP[0], NUM_SAMPLES, NUM_TOKENS, seed=0, top_k=1)
    finally:
        hook.remove()
    assert rows_read == [1] * NUM_TOKENS
