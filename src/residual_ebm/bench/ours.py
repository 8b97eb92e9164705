"""Our own candidates: each does what a stage of a run does, through the same code.

Negatives are drawn as for UniT and BiT; for HeaT the real blocks would be read beside them.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from residual_ebm.bench.inputs import real_blocks
from residual_ebm.bench.workers import Work
from residual_ebm.config import HeadConfig, Precision, TrainingConfig
from residual_ebm.estimation.importance import log_weight
from residual_ebm.estimation.nce import nce_loss
from residual_ebm.estimation.partition import log_partition_bounds
from residual_ebm.models.compiled import compiled_training
from residual_ebm.models.decoding import Truncation
from residual_ebm.models.energy import EnergyInfo, EnergyModel
from residual_ebm.models.language_model import LanguageModel, continuation_mask
from residual_ebm.models.loading import load_pretrained, load_tokenizer
from residual_ebm.models.quick_attention import quick_backward
from residual_ebm.models.training import TrainingLog, train
from residual_ebm.models.vocabulary_loss import next_token_loss
from residual_ebm.progress import QUIET

# Tokens or blocks: what is worth compiling in a real training or evaluation is compiled here.
_LONG = 10**8
_NO_LOG = TrainingLog(write=lambda _step, _values: None, rewind=lambda _step: None)


def draw(
    *,
    model: str,
    precision: Precision,
    text: str,
    prefix_length: int,
    num_tokens: int,
    num_prefixes: int,
    samples_per_prefix: int,
    top_k: int | None,
    threads: int,
) -> Work:
    """Samples of one prefix or of several, all at once; a unit is a token."""
    torch.set_num_threads(threads)
    language_model = LanguageModel.from_pretrained(model, precision=precision, device="cpu")
    prefix_GP = real_blocks(text, language_model.tokenizer, num_prefixes, prefix_length)

    def run() -> None:
        language_model.sample_chunk(
            prefix_ids_GP=prefix_GP,
            prefix_numbers=list(range(num_prefixes)),
            first_sample=0,
            num_samples=samples_per_prefix,
            num_tokens=num_tokens,
            seed=0,
            truncation=Truncation(top_k=top_k),
            stop_at_end=False,
        )

    return Work(run, num_prefixes * samples_per_prefix * num_tokens)


def score(
    *,
    model: str,
    encoder: str,
    precision: Precision,
    text: str,
    num_blocks: int,
    length: int,
    batch_size: int,
    threads: int,
) -> Work:
    """Energies of blocks of the language model's ids, decoded and encoded on the way."""
    torch.set_num_threads(threads)
    energy = _encoder_energy(model, encoder, length, precision)
    energy.network.to(energy.language_model.model.dtype)
    ids_BT = real_blocks(text, energy.language_model.tokenizer, num_blocks, length)
    return Work(lambda: energy.energy(ids_BT, batch_size=batch_size, out_of=_LONG), num_blocks)


def train_lm(
    *,
    architecture: dict[str, Any],
    precision: Precision,
    batch_size: int,
    length: int,
    steps: int,
    threads: int,
) -> Work:
    """Steps of a language model from scratch; a unit is a token."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
    ids_BT = torch.randint(0, model.config.vocab_size, (batch_size, length))

    def run() -> None:
        with quick_backward(model, length), compiled_training(model, _LONG):
            _train(model, lambda _step, _part: next_token_loss(model, ids_BT), steps, precision)

    return Work(run, steps * batch_size * length)


def train_nce(
    *,
    model: str,
    encoder: str,
    precision: Precision,
    text: str,
    num_pairs: int,
    length: int,
    steps: int,
    threads: int,
) -> Work:
    """NCE steps of a pretrained encoder, half of a batch as positives; a unit is a block."""
    torch.set_num_threads(threads)
    energy = _encoder_energy(model, encoder, length, precision)
    ids_BT = real_blocks(text, energy.language_model.tokenizer, 2 * num_pairs, length)
    num_tokens = _LONG if energy.tokens_read(length, 1) else 0  # else lengths vary

    def loss_at(_step: int, _part: int) -> Tensor:
        energy_B = energy(ids_BT)
        return nce_loss(energy_B[:num_pairs], energy_B[num_pairs:])

    def run() -> None:
        attention = quick_backward(energy.network, length)
        with attention, compiled_training(energy.network, num_tokens):
            _train(energy.network, loss_at, steps, precision)

    return Work(run, steps * len(ids_BT))


def evaluate(
    *,
    model: str,
    encoder: str | None,
    precision: Precision,
    text: str,
    prefix_length: int,
    num_tokens: int,
    num_samples: int,
    chunk_size: int,
    batch_size: int,
    threads: int,
    scored: bool = True,
) -> Work:
    """Proposals of one prefix, their energies and the bounds of log Z; a unit is a sample.

    The energy is an encoder, or HeaT where none is named; not scored, they are only drawn.
    """
    torch.set_num_threads(threads)
    length = prefix_length + num_tokens
    if encoder is None:
        language_model = LanguageModel.from_pretrained(model, precision=precision, device="cpu")
        energy = EnergyModel.new_head(
            HeadConfig(), _info("heat", prefix_length, length), language_model
        )
        energy.network.to(language_model.model.dtype)
    else:
        energy = _encoder_energy(model, encoder, length, precision)
        energy.network.to(energy.language_model.model.dtype)
        language_model = energy.language_model
    prefix_GP = real_blocks(text, language_model.tokenizer, 1, prefix_length)

    def energies_of(first: int) -> Tensor:
        arguments: dict[str, Any] = {
            "prefix_ids_GP": prefix_GP,
            "prefix_numbers": [0],
            "first_sample": first,
            "num_samples": min(chunk_size, num_samples - first),
            "num_tokens": num_tokens,
            "seed": 0,
            "truncation": Truncation(),
            "stop_at_end": False,
        }
        if not scored:
            return language_model.sample_chunk(**arguments).log_prob_NC.sum(-1)
        if encoder is None:
            decoded, features = language_model.sample_chunk_with_features(**arguments)
            mask_NC = continuation_mask(decoded.ids_NC, 0, decoded.length_N)
            with torch.inference_mode():
                return energy.of_features(features, mask_NC)
        decoded = language_model.sample_chunk(**arguments)
        prefix_NP = prefix_GP.expand(len(decoded.ids_NC), -1)
        blocks_NT = torch.cat([prefix_NP, decoded.ids_NC], dim=1)
        return energy.energy(blocks_NT, batch_size=batch_size, out_of=num_samples)

    def run() -> None:
        parts = [energies_of(first).float() for first in range(0, num_samples, chunk_size)]
        log_partition_bounds(log_weight(torch.cat(parts)))

    return Work(run, num_samples, warm_up=lambda: energies_of(0))


def _info(kind: Any, prefix_length: int, length: int) -> EnergyInfo:
    return EnergyInfo("bench", kind, "", prefix_length, length, "fixed")


def _encoder_energy(model: str, encoder: str, length: int, precision: Precision) -> EnergyModel:
    language_model = LanguageModel.from_pretrained(model, precision=precision, device="cpu")
    backbone = load_pretrained(AutoModel, encoder, "encoder", dtype=torch.float32)
    tokenizer = load_tokenizer(encoder, "encoder")
    return EnergyModel.from_backbone(
        backbone, tokenizer, _info("bit", length // 2, length), language_model
    )


def _train(module: Any, loss_at: Any, steps: int, precision: Precision) -> None:
    config = TrainingConfig(
        steps=steps,
        batch_size=1,
        learning_rate=1e-5,
        precision=precision,
        validate_every=steps,
        checkpoint_every=steps + 1,
    )
    with tempfile.TemporaryDirectory() as folder:
        train(
            module,
            config,
            loss_at=loss_at,
            validate=lambda: {"loss": 0.0},
            seed=0,
            folder=Path(folder),
            log=_NO_LOG,
            progress=QUIET,
            label="bench",
        )
