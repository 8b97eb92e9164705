"""A causal model whose mask is taken away reads both ways, however it is run, saved and loaded."""

from pathlib import Path

import pytest
import torch
import toys
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from residual_ebm.models.both_ways import is_bidirectional, make_bidirectional
from residual_ebm.models.loading import load_pretrained
from residual_ebm.models.prefix_steps import can_share_prefix

FAMILIES = ("llama", "gpt2", "gpt_neox", "qwen3", "gemma3_text", "mistral")


@torch.inference_mode()
def first_states(model: PreTrainedModel, mask_BL: Tensor | None) -> Tensor:
    """Of a first token, before two different last tokens."""
    ids_BL = torch.tensor([[3, 4, 5], [3, 4, 6]])
    states: Tensor = model.base_model(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
    return states[:, 0]


MASKS = {
    "no mask": None,
    "no padding": torch.ones(2, 3, dtype=torch.int64),
    "padding": torch.tensor([[1, 1, 1], [1, 1, 0]]),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_first_token_sees_the_last(model_type: str, attention: str, tmp_path: Path) -> None:
    model = toys.causal_model(model_type)
    model.set_attn_implementation(attention)
    for mask_BL in MASKS.values():
        causal = first_states(model, mask_BL)
        assert torch.equal(causal[0], causal[1])
    assert not is_bidirectional(model)
    assert make_bidirectional(model)
    assert is_bidirectional(model)
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(AutoModel, str(tmp_path), "model", dtype=torch.float32)
    loaded.set_attn_implementation(attention)
    for name, mask_BL in MASKS.items():
        states = first_states(model, mask_BL)
        assert not torch.allclose(states[0], states[1], atol=1e-3), name
        torch.testing.assert_close(first_states(loaded, mask_BL), states)
    assert is_bidirectional(loaded)


def test_what_reads_both_ways_shares_no_prefix() -> None:
    model = toys.causal_model("llama")
    assert can_share_prefix(model, 6)
    make_bidirectional(model)
    assert not can_share_prefix(model, 6)


def test_a_model_that_insists_on_its_mask_is_told() -> None:
    model = toys.causal_model("llama")
    before = model.base_model.forward

    def left_to_right(input_ids: Tensor, attention_mask: Tensor | None) -> object:
        model.config.is_causal = True
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = True
        return before(input_ids=input_ids, attention_mask=attention_mask)

    model.base_model.forward = left_to_right
    assert not make_bidirectional(model)
