"""A shared prefix gives what a prefix repeated for each row gives, for every family of models.

Shapes: N rows, T tokens, P tokens of a prefix, V vocabulary.
"""

from collections.abc import Callable

import pytest
import torch
import toys
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from residual_ebm.models import shared_prefix
from residual_ebm.models.prefix_steps import can_share_prefix
from residual_ebm.models.shared_prefix import (
    AfterPrefix,
    forward_after_prefix,
    prefix_batches,
)

WINDOWED = ("gemma3_text", "mistral")
SHARING = ("llama", "gpt2", "gpt_neox", "qwen3", "qwen2", "gemma", *WINDOWED)
LENGTH = 11


def model_of(model_type: str, window: int = LENGTH) -> PreTrainedModel:
    if model_type in WINDOWED:
        return toys.causal_model(model_type, sliding_window=window)
    if model_type in toys.ARCHITECTURES:
        return toys.causal_model(model_type)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=7,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return toys.scale_up(AutoModelForCausalLM.from_config(config, dtype=torch.float32), 8.0)


def rows(rows_per_prefix: list[int], prefix_length: int, num_own: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    prefixes = [torch.randint(0, 7, (prefix_length,), generator=draw) for _ in rows_per_prefix]
    repeated = torch.stack(
        [
            prefix
            for prefix, count in zip(prefixes, rows_per_prefix, strict=True)
            for _ in range(count)
        ]
    )
    return torch.cat([repeated, torch.randint(0, 7, (len(repeated), num_own), generator=draw)], 1)


@pytest.mark.parametrize("model_type", SHARING)
@pytest.mark.parametrize("rows_per_prefix", [[5], [3, 3], [1, 1, 1], [1, 4]], ids=str)
@pytest.mark.parametrize("tiles", [True, False])
@torch.inference_mode()
def test_logits_equal_those_of_whole_rows(
    model_type: str, rows_per_prefix: list[int], tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefix, "has_tiles", lambda: tiles)
    model = model_of(model_type)
    assert can_share_prefix(model, LENGTH)
    ids_NT = rows(rows_per_prefix, prefix_length=6, num_own=5)
    before = model.config._attn_implementation
    first_G1V, rest_NLV = forward_after_prefix(model, ids_NT, 6)
    assert model.config._attn_implementation == before
    whole_NTV = model(ids_NT).logits
    torch.testing.assert_close(rest_NLV, whole_NTV[:, 6:], rtol=1e-4, atol=1e-4)
    repeated = first_G1V.repeat_interleave(len(ids_NT) // len(first_G1V), 0)
    torch.testing.assert_close(repeated[:, 0], whole_NTV[:, 5], rtol=1e-4, atol=1e-4)
    num_prefixes = len(set(rows_per_prefix)) == 1 and len(rows_per_prefix)
    assert len(first_G1V) == (num_prefixes or len(ids_NT)), "the prefix was computed too often"


@torch.inference_mode()
def test_a_prefix_alone_has_no_rest() -> None:
    model = model_of("llama")
    (only_G1V,) = forward_after_prefix(model, rows([2], 4, 0), 4)
    assert only_G1V.shape == (1, 1, 7)


@pytest.mark.parametrize("model_type", WINDOWED)
@torch.inference_mode()
def test_windows_shorter_than_a_passage_do_not_share(model_type: str) -> None:
    model = model_of(model_type, window=LENGTH - 1)
    assert can_share_prefix(model, LENGTH - 1)
    assert not can_share_prefix(model, LENGTH)
    # The last token alone does not see the first: with one more the window makes a difference.
    ids_NT = rows([2], prefix_length=6, num_own=5)
    (_, rest_NLV), whole_NTV = forward_after_prefix(model, ids_NT, 6), model(ids_NT).logits
    torch.testing.assert_close(rest_NLV[:, :-1], whole_NTV[:, 6:-1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(rest_NLV[:, -1], whole_NTV[:, -1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("counts", "batch_size", "sizes"),
    [
        ([5, 5, 5, 2], 10, [10, 5, 2]),
        ([5, 5], 4, [4, 1, 4, 1]),
        ([4, 4], 4, [4, 4]),
        ([2, 2, 2, 3, 3], 5, [4, 2, 3, 3]),
        ([1] * 5, 3, [3, 2]),
        ([], 3, []),
    ],
    ids=str,
)
def test_no_batch_has_prefixes_with_more_rows_than_others(
    counts: list[int], batch_size: int, sizes: list[int]
) -> None:
    numbers = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    ids_NT = torch.stack([numbers, numbers, torch.arange(len(numbers))], dim=1)
    batches = list(prefix_batches(ids_NT, 2, batch_size))
    assert [batch.stop - batch.start for batch in batches] == sizes
    assert torch.equal(torch.cat([ids_NT[:0], *(ids_NT[batch] for batch in batches)]), ids_NT)


def test_a_failure_leaves_the_model_as_it_was() -> None:
    model = model_of("llama")
    before = model.config._attn_implementation
    with pytest.raises(IndexError):
        forward_after_prefix(model, torch.tensor([[1, 2, 99]]), 2)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("tiles", "num_queries", "heads"), [(True, 6, 1), (True, 7, 2), (False, 7, 1)]
)
@torch.inference_mode()
def test_keys_are_repeated_for_heads_only_where_that_is_quicker(
    tiles: bool, num_queries: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many prefixes with few samples each would otherwise hold every key several times."""
    monkeypatch.setattr(shared_prefix, "has_tiles", lambda: tiles)
    cache = DynamicCache()
    model_of("qwen3")(rows([1, 1, 1], 6, 0), past_key_values=cache)
    keys, values = AfterPrefix(cache, 1).own[0].prefix_for(2, num_queries)
    assert keys.shape == values.shape == (3, heads, 6, 8)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
@pytest.mark.parametrize("attend", [shared_prefix._attend, shared_prefix._attend_causal])
def test_scores_that_are_changed_are_refused(name: str, attend: Callable[..., object]) -> None:
    states = torch.ones(1, 1, 1, 4)
    with pytest.raises(ValueError, match=name):
        attend(torch.nn.Identity(), states, states, states, None, **{name: 1.0})
