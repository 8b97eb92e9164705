"""A toy world in which everything can be enumerated: seven tokens, three given, three to come.

Every network has random weights, scaled up so that its distribution is far from uniform and depends
on every token before; energies are scaled to a standard deviation of one over all continuations.

Shapes: B blocks, T tokens of a block, P tokens of a prefix, C tokens of a continuation, V words of
the vocabulary, N continuations.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from residual_ebm.config import ContinuationMode, EnergyKind, HeadConfig
from residual_ebm.files.tokenizers import train_tokenizer
from residual_ebm.models.energy import EnergyInfo, EnergyModel
from residual_ebm.models.joint import JointModel
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.randomness import torch_seed

torch.set_num_threads(1)

MODES: tuple[ContinuationMode, ...] = ("fixed", "until_end")
ENERGIES = ("heat", "unit", "bit", "bit_bpe")
PREFIX_LENGTH = 3
NUM_NEW = 3
BLOCK_LENGTH = PREFIX_LENGTH + NUM_NEW
CONTEXT = 32
PROMPT = "ba do ba"
WORDS = ("ba", "do", "gi", "lu")
END, MASK, UNKNOWN = 0, 1, 2  # ids of the special tokens; the words follow
_SIZES = {"vocab_size": 3 + len(WORDS), "max_position_embeddings": CONTEXT}
_LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
# What each architecture calls its sizes; windows shorter than a block where there are windows.
_FULL: dict[str, object] = {**_LAYERS, "intermediate_size": 32}
_GROUPED: dict[str, object] = {**_FULL, "num_key_value_heads": 1, "head_dim": 8}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": _GROUPED,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "gpt_neox": _FULL,
    "qwen3": _GROUPED,
    "gemma3_text": {
        **_GROUPED,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {**_GROUPED, "sliding_window": 3},
}
# Whose prefix is repeated: attention of their own, scores that are capped, two attentions a layer.
REPEATING: dict[str, dict[str, object]] = {
    "gptj": {"n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4},
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "falcon": {**_LAYERS, "alibi": False},
    "gemma2": {**_GROUPED, "attn_logit_softcapping": 2.0, "sliding_window": CONTEXT},
    "diffllama": {**_GROUPED, "num_key_value_heads": 2},
}
# Whose memory is something else than keys and values, or not of every layer.
READING_AGAIN: dict[str, dict[str, object]] = {
    "mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "lfm2": {**_GROUPED, "layer_types": ["conv", "full_attention"]},
}


def scale_up(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """Random weights as libraries draw them hardly look at their input; these do."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(factor)
    return model.eval()


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([" ".join(WORDS)], "word", 3 + len(WORDS))


@cache
def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Another vocabulary: bytes and a few merges."""
    return train_tokenizer(["ba do gi lu ba do ba"], "bpe", 264)


def causal_model(model_type: str = "llama", seed: int = 0, **changes: object) -> PreTrainedModel:
    known = ARCHITECTURES | REPEATING | READING_AGAIN
    sizes = {**_SIZES, **known[model_type], **changes}
    config = AutoConfig.for_model(
        model_type, **sizes, bos_token_id=END, eos_token_id=END, pad_token_id=None
    )
    with torch_seed(seed, "causal", model_type):
        return scale_up(AutoModelForCausalLM.from_config(config, dtype=torch.float32), 15.0)


@cache
def language_model(model_type: str = "llama") -> LanguageModel:
    return LanguageModel(causal_model(model_type), word_tokenizer(), f"toy {model_type}")


def bert(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **changes: object) -> PreTrainedModel:
    sizes = {**_FULL, "vocab_size": len(tokenizer), "max_position_embeddings": 3 * CONTEXT}
    config = AutoConfig.for_model(
        "bert",
        **{**sizes, **changes},
        pad_token_id=int(tokenizer.pad_token_id),
    )
    with torch_seed(seed, "bert"):
        return scale_up(AutoModel.from_config(config, dtype=torch.float32), 15.0)


def energy_info(kind: EnergyKind, mode: ContinuationMode) -> EnergyInfo:
    return EnergyInfo(kind, kind, "toy llama", PREFIX_LENGTH, BLOCK_LENGTH, mode)


def fresh_energy(name: str, mode: ContinuationMode = "fixed") -> EnergyModel:
    """An energy as training starts with it: random network, last layer zero."""
    lm = language_model()
    if name == "heat":
        head = HeadConfig(hidden_size=16, num_layers=1, num_heads=2)
        info = replace(energy_info("heat", mode), head=head.model_dump())
        with torch_seed(0, "heat"):
            return EnergyModel.new_head(head, info, lm)
    if name == "unit":
        return EnergyModel.from_backbone(
            causal_model().model, word_tokenizer(), energy_info("unit", mode), lm
        )
    tokenizer = bpe_tokenizer() if name == "bit_bpe" else word_tokenizer()
    return EnergyModel.from_backbone(bert(tokenizer), tokenizer, energy_info("bit", mode), lm)


def trained_energy(name: str, mode: ContinuationMode = "fixed", spread: float = 1.0) -> EnergyModel:
    """An energy with a last layer: standard deviation `spread` over all continuations."""
    energy = fresh_energy(name, mode)
    scalar = energy.network.scalar
    every = everything(mode)
    with torch_seed(0, "scalar", name), torch.no_grad():
        scalar.weight.normal_()
        scalar.weight.mul_(spread / energy.energy(every.ids_NT, every.length_N).std())
        scalar.bias.fill_(0.3)
    return energy


@cache
def joint_model(name: str = "heat", mode: ContinuationMode = "fixed") -> JointModel:
    return JointModel(language_model(), trained_energy(name, mode))


@dataclass(frozen=True)
class Everything:
    """Every continuation of one prefix, as blocks, with its probability."""

    prefix_P: Tensor
    ids_NT: Tensor
    length_N: Tensor
    log_prob_N: Tensor  # log P_LM, float64
    log_prob_NC: Tensor

    def __len__(self) -> int:
        return len(self.ids_NT)

    def number_of(self, new_ids_MC: Tensor) -> Tensor:
        """Which of the continuations each row is."""
        key_N, key_M = (
            _as_number(ids) for ids in (self.ids_NT[:, len(self.prefix_P) :], new_ids_MC)
        )
        sorted_N, order_N = key_N.sort()
        place_M = torch.searchsorted(sorted_N, key_M)
        assert torch.equal(sorted_N[place_M], key_M), "a row is not among the continuations"
        return order_N[place_M]

    def counts(self, new_ids_MC: Tensor) -> np.ndarray:
        return torch.bincount(self.number_of(new_ids_MC), minlength=len(self)).numpy()


def _as_number(ids_NC: Tensor) -> Tensor:
    return (ids_NC * 100 ** torch.arange(ids_NC.shape[1])).sum(-1)


def enumerate_continuations(
    lm: LanguageModel, prefix: Sequence[int], num_new: int, mode: ContinuationMode
) -> Everything:
    """All V^C continuations; in until_end mode those that stop at end-of-text or at the horizon."""
    vocabulary = len(lm.tokenizer)
    rows = {}
    for new in itertools.product(range(vocabulary), repeat=num_new):
        length = num_new
        if mode == "until_end" and END in new:
            length = new.index(END) + 1
        rows[(*prefix, *new[:length], *[END] * (num_new - length))] = len(prefix) + length
    ids_NT, length_N = torch.tensor(list(rows)), torch.tensor(list(rows.values()))
    log_prob_NC = lm.log_prob(ids_NT, len(prefix), length_N).double()
    return Everything(torch.tensor(prefix), ids_NT, length_N, log_prob_NC.sum(-1), log_prob_NC)


def prompt_ids() -> list[int]:
    return [int(token) for token in word_tokenizer()(PROMPT)["input_ids"]]


@cache
def everything(mode: ContinuationMode) -> Everything:
    """Every continuation of PROMPT under the toy language model."""
    return enumerate_continuations(language_model(), prompt_ids(), NUM_NEW, mode)


def chi_square_p(counts_N: np.ndarray, prob_N: Tensor) -> float:
    """p-value of counts under a distribution; cells that expect fewer than 5 share one cell."""
    expected_N = prob_N.numpy() / float(prob_N.sum()) * counts_N.sum()
    # No smoothing of the impossible: one count where nothing can be decides the matter.
    if counts_N[expected_N == 0].any():
        return 0.0
    rare_N = expected_N < 5
    observed, expected = counts_N[~rare_N], expected_N[~rare_N]
    assert len(expected) >= 8, "too few cells to tell anything"
    if expected_N[rare_N].sum() > 0:
        observed = np.append(observed, counts_N[rare_N].sum())
        expected = np.append(expected, expected_N[rare_N].sum())
    return float(stats.chisquare(observed, expected).pvalue)


def truncated_log_prob(
    lm: LanguageModel, every: Everything, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Log-probability of every continuation under a truncated P_LM, token by token, plainly."""
    with torch.inference_mode():
        logits_NTV = lm.model(every.ids_NT, use_cache=False).logits.double()
    start = len(every.prefix_P)
    prob_NCV = logits_NTV[:, start - 1 : -1].softmax(-1)
    total_N = torch.zeros(len(every), dtype=torch.float64)
    for row, length in enumerate(every.length_N.tolist()):
        for step in range(length - start):
            order = prob_NCV[row, step].argsort(descending=True).tolist()[:top_k]
            mass_V = prob_NCV[row, step].numpy()
            kept = order[:1]
            while len(kept) < len(order) and (
                top_p is None or mass_V[kept].sum() < top_p * mass_V[order].sum()
            ):
                kept.append(order[len(kept)])
            token = int(every.ids_NT[row, start + step])
            share = mass_V[token] / mass_V[kept].sum() if token in kept else 0.0
            total_N[row] += np.log(share) if share else -np.inf
    return total_N
