"""Each model takes the best way that is right for it, and says so where that is not the quickest.

Shapes: N rows, C new tokens, P tokens of a prefix.
"""

from typing import Any

import pytest
import torch
import toys
from test_decoding import ancestral_sampling, decode_prompt
from transformers import PreTrainedModel

from residual_ebm.config import ContinuationMode
from residual_ebm.models import prefix_steps
from residual_ebm.models.decoding import UNTRUNCATED
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.models.layer_states import states_captured
from residual_ebm.models.prefix_steps import Way, can_share_prefix, way_of

PREFIX = torch.tensor([3, 4, 5, 6, 3, 5, 4])
NUM_NEW = 8
NOT_SHARING = {**toys.REPEATING, **toys.READING_AGAIN}


def test_each_family_takes_its_way() -> None:
    ways = {name: way_of(toys.causal_model(name), 15) for name in NOT_SHARING}
    assert ways == {
        **dict.fromkeys(toys.REPEATING, Way.REPEATED),
        **dict.fromkeys(toys.READING_AGAIN, Way.READ_AGAIN),
    }
    assert way_of(toys.causal_model("llama"), 15) is Way.SHARED


@pytest.mark.parametrize("mode", toys.MODES)
@pytest.mark.parametrize("model_type", NOT_SHARING)
def test_samples_are_those_of_ancestral_sampling(model_type: str, mode: ContinuationMode) -> None:
    lm = toys.language_model(model_type)
    new_ids_NC, length_N = ancestral_sampling(lm, PREFIX, 60, NUM_NEW, mode)
    decoded = decode_prompt(lm, PREFIX, 60, NUM_NEW, mode)
    assert torch.equal(decoded.ids_NC, new_ids_NC)
    assert torch.equal(decoded.length_N, length_N)
    assert len(new_ids_NC.unique(dim=0)) > (20 if mode == "fixed" else 2)


@pytest.mark.parametrize("model_type", NOT_SHARING)
def test_samples_are_scored_as_they_were_drawn(model_type: str) -> None:
    lm = toys.language_model(model_type)
    samples = lm.sample(PREFIX, 50, NUM_NEW, seed=1)
    ids_NT = torch.cat([PREFIX.expand(50, -1), samples.ids_NT], dim=1)
    own_N = lm.log_prob(ids_NT, len(PREFIX)).double().sum(-1)
    torch.testing.assert_close(samples.log_prob_N, own_N, rtol=1e-4, atol=1e-4)
    # The prefix matters: what follows another one is worth something else.
    other_NT = ids_NT.clone()
    other_NT[:, : len(PREFIX) - 1] = 4
    assert (lm.log_prob(other_NT, len(PREFIX)).double().sum(-1) - own_N).abs().max() > 0.1


@pytest.mark.parametrize("model_type", ["llama", "gptj", "mamba"])
def test_states_of_a_trial_are_not_among_those_wanted(model_type: str) -> None:
    lm = LanguageModel(toys.causal_model(model_type), toys.word_tokenizer())  # never tried before
    arguments: dict[str, Any] = {
        "prefix_ids_GP": PREFIX[None],
        "prefix_numbers": [0],
        "first_sample": 0,
        "num_samples": 6,
        "num_tokens": NUM_NEW,
        "seed": 0,
        "truncation": UNTRUNCATED,
        "stop_at_end": False,
    }
    decoded, features = lm.sample_chunk_with_features(**arguments)
    ids_NT = torch.cat([PREFIX.expand(6, -1), decoded.ids_NC], dim=1)
    again = LanguageModel(toys.causal_model(model_type), toys.word_tokenizer())
    of_blocks = again.features(ids_NT, len(PREFIX))
    torch.testing.assert_close(features.hidden_BCH, of_blocks.hidden_BCH, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_forgets_its_prefix_is_found_out(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    model = toys.causal_model("llama").to(dtype)
    plain = type(model).forward

    def forgetful(self: PreTrainedModel, ids: torch.Tensor, **options: object) -> object:
        options.pop("past_key_values", None)
        return plain(self, ids, **options)

    assert can_share_prefix(model, 15)
    prefix_steps._tried.clear()
    monkeypatch.setattr(type(model), "forward", forgetful)
    assert way_of(model, 15) is Way.READ_AGAIN


def test_a_trial_leaves_the_model_as_it_was() -> None:
    model = toys.causal_model("gpt2")
    model.train()
    model.transformer.h[0].eval()
    states: list[torch.Tensor] = []
    with states_captured(model, states):
        assert can_share_prefix(model, 15)
    assert model.training
    assert not any(part.training for part in model.transformer.h[0].modules())
    assert model.transformer.h[1].attn.training
    assert can_share_prefix(model, 15)  # known by now: dropout was off in the trial


def test_what_is_not_quickest_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    prefix_steps._tell_once.cache_clear()
    for model_type in ("llama", "mistral", "mistral", "mamba"):
        decode_prompt(toys.language_model(model_type), torch.tensor([3, 4, 3]), 4, 2, "fixed")
    ours = [record for record in caplog.records if record.name == prefix_steps.__name__]
    assert [record.getMessage() for record in ours] == [
        "MistralForCausalLM has attention of its own; its prefix is repeated for each sample",
        "MambaForCausalLM keeps no keys and values; all tokens are read again for every new one",
    ]
