"""States of further layers: those that the model itself reports, by whatever way it is run."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import toys
from transformers import AutoConfig, AutoModelForCausalLM

from residual_ebm.config import HeadConfig
from residual_ebm.errors import UserError
from residual_ebm.models.decoding import UNTRUNCATED
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.kept_features import KeptFeatures
from residual_ebm.models.language_model import LanguageModel, continuation_mask
from residual_ebm.models.layer_states import check_layers, select_layers, union_of
from residual_ebm.models.ralm import RalmForCausalLM
from residual_ebm.progress import QUIET

SIZES: dict[str, Any] = {"vocab_size": 16, "num_hidden_layers": 3, "hidden_size": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, **HEADS},
    "gpt2": {"vocab_size": 16, "n_layer": 3, "n_embd": 8, "n_head": 2},
    "gpt_neox": {**SIZES, "num_attention_heads": 2, "intermediate_size": 16},
    "qwen2": {**SIZES, **HEADS},
}
IDS_BT = torch.tensor([[3, 4, 3, 5, 6, 4], [3, 4, 3, 6, 6, 5], [5, 6, 4, 3, 3, 3]])


def language_model(model_type: str) -> LanguageModel:
    config = AutoConfig.for_model(
        model_type, bos_token_id=0, eos_token_id=0, pad_token_id=0, **FAMILIES[model_type]
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():  # new weights are small, and layers do next to nothing
            weight.mul_(10 if weight.ndim > 1 else 1)
    return LanguageModel(model, toys.word_tokenizer())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_states_are_those_that_the_model_reports(model_type: str) -> None:
    lm = language_model(model_type)
    features = lm.features(IDS_BT, 3, layers=[1, 2])
    with torch.inference_mode():
        reported = lm.model(IDS_BT, output_hidden_states=True).hidden_states
    # The state before a token predicts it; entry 0 is the embeddings.
    expected = torch.cat([reported[layer][:, 2:-1] for layer in (-1, 1, 2)], dim=-1)
    torch.testing.assert_close(features.hidden_BCH, expected, rtol=1e-4, atol=1e-5)
    parts = features.hidden_BCH.chunk(3, dim=-1)
    assert all((one - other).abs().max() > 0.01 for one, other in pairwise(parts))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_decoder_has_the_same_states(model_type: str) -> None:
    lm = language_model(model_type)
    prefix_GP = IDS_BT[[0, 2], :3]
    decoded, features = lm.sample_chunk_with_features(
        layers=[2],
        prefix_ids_GP=prefix_GP,
        prefix_numbers=[0, 1],
        first_sample=0,
        num_samples=4,
        num_tokens=3,
        seed=0,
        truncation=UNTRUNCATED,
        stop_at_end=False,
    )
    blocks_NT = torch.cat([prefix_GP.repeat_interleave(4, 0), decoded.ids_NC], dim=1)
    expected = lm.features(blocks_NT, 3, layers=[2]).hidden_BCH
    torch.testing.assert_close(features.hidden_BCH, expected, rtol=1e-4, atol=1e-5)


def test_heads_on_other_layers_share_what_was_kept() -> None:
    lm = language_model("llama")
    info = toys.fresh_energy("heat").info
    wanted = {"none": [], "first": [1], "others": [2, 3]}
    every = union_of(list(wanted.values()))
    assert every == [1, 2, 3]
    decoded, features = lm.sample_chunk_with_features(
        layers=every,
        prefix_ids_GP=torch.tensor([[3, 4, 3]]),
        prefix_numbers=[0],
        first_sample=0,
        num_samples=6,
        num_tokens=toys.NUM_NEW,
        seed=0,
        truncation=UNTRUNCATED,
        stop_at_end=False,
    )
    ids_NT = torch.cat([torch.tensor([[3, 4, 3]]).expand(6, -1), decoded.ids_NC], dim=1)
    mask_NC = continuation_mask(decoded.ids_NC, 0, decoded.length_N)
    for layers in wanted.values():
        head = HeadConfig(layers=layers, hidden_size=8, num_layers=1, num_heads=1)
        energy = EnergyModel.new_head(head, info, lm)
        assert isinstance(energy.info.head, dict)
        torch.nn.init.normal_(energy.network.scalar.weight)
        expected = energy.energy(ids_NT, prefix_length=3)
        assert expected.std() > 1e-3
        own = features._replace(
            hidden_BCH=select_layers(features.hidden_BCH, every, energy.state_layers)
        )
        with torch.inference_mode():
            torch.testing.assert_close(
                energy.of_features(own, mask_NC), expected, rtol=1e-3, atol=1e-4
            )
        kept = KeptFeatures(energy, ids_NT, torch.full((6,), ids_NT.shape[1]))
        kept.compute(4, QUIET)
        torch.testing.assert_close(kept(torch.arange(6)).detach(), expected, rtol=1e-3, atol=1e-4)


def test_layers_are_taken_out_by_number() -> None:
    states = torch.randn(2, 3, 3 * 4)
    swapped = torch.cat([states[..., :4], states[..., 8:], states[..., 4:8]], dim=-1)
    torch.testing.assert_close(select_layers(states, [2, 5], [5]), swapped[..., :8])
    assert select_layers(states, [2, 5], [2, 5]) is states
    torch.testing.assert_close(select_layers(states, [2, 5], []), states[..., :4])


def test_a_layer_that_is_not_there_is_refused() -> None:
    lm = language_model("llama")
    check_layers(lm.model, [1, 3], "heat")
    with pytest.raises(UserError, match=r"energies\.heat\.head\.layers.*4.*has 3 layers"):
        check_layers(lm.model, [1, 4], "heat")
    with pytest.raises(UserError, match="has 3 layers"):
        EnergyModel.new_head(HeadConfig(layers=[9]), toys.fresh_energy("heat").info, lm)


@pytest.mark.parametrize("layers", [[2, 1], [1, 1], [0]])
def test_layers_that_make_no_sense_are_refused(layers: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rising order|greater than or equal"):
        HeadConfig(layers=layers)


def test_one_layer_is_a_layer() -> None:
    config = AutoConfig.for_model("llama", **{**FAMILIES["llama"], "num_hidden_layers": 1})
    model = AutoModelForCausalLM.from_config(config)
    check_layers(model, [1], "heat")
    with pytest.raises(UserError, match="has 1 layers"):
        check_layers(model, [2], "heat")


def test_layers_of_another_width_than_the_last_are_refused() -> None:
    config = AutoConfig.for_model(
        "opt",
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=2,
        ffn_dim=8,
        num_attention_heads=2,
        word_embed_proj_dim=4,
    )
    with pytest.raises(UserError, match="cannot be told apart"):
        check_layers(AutoModelForCausalLM.from_config(config), [1], "heat")


def test_a_residual_has_the_layers_of_its_base() -> None:
    base, residual = (language_model("llama").model for _ in range(2))
    lm = LanguageModel(RalmForCausalLM.of(base, residual), toys.word_tokenizer())
    features = lm.features(IDS_BT, 3, layers=[2])
    with torch.inference_mode():
        reported = base(IDS_BT, output_hidden_states=True).hidden_states
    expected = torch.cat([reported[layer][:, 2:-1] for layer in (-1, 2)], dim=-1)
    torch.testing.assert_close(features.hidden_BCH, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="has 3 layers"):
        check_layers(lm.model, [4], "heat")
