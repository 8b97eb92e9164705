"""Language models: trained from scratch, adapted from a pretrained one, or taken as they are."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from residual_ebm.config import SCRATCH, LanguageModelConfig, Recipe
from residual_ebm.errors import UserError
from residual_ebm.files.blocks import cut_blocks, read_documents_ids
from residual_ebm.files.run_directory import RunDirectory, resume_folder
from residual_ebm.files.storage import check_manifest, is_complete, new_folder, write_json
from residual_ebm.models.device import resolve_device, use_recipe_threads
from residual_ebm.models.energy_inputs import same_vocabulary
from residual_ebm.models.language_model import end_of_text_id
from residual_ebm.models.layer_states import check_layers
from residual_ebm.models.loading import load_pretrained, load_tokenizer
from residual_ebm.models.parts import parts_of, share_of
from residual_ebm.models.ralm import RalmForCausalLM
from residual_ebm.models.training import History, batch_indices, forget_training
from residual_ebm.models.vocabulary_loss import next_token_loss
from residual_ebm.progress import QUIET, Progress
from residual_ebm.randomness import torch_seed
from residual_ebm.stages.training_run import (
    build_architecture,
    build_model,
    check_context,
    train_in_run,
)

SENTENCE = "Training the language model {name}"
SENTENCE_RESIDUAL = "Training the residual of {base} that makes the language model {name}"
SENTENCE_AS_IT_IS = "Taking {source} as it is for the language model {name}"
# The product of an adapted SmolLM2 and the downloaded one has a loss of 5.01 where the adapted one
# has 3.50; at this scale 3.54, and the gradient still reaches all of P_phi.
_PRETRAINED_RESIDUAL_SCALE = 0.1


def run(recipe: Recipe, run_dir: RunDirectory, progress: Progress = QUIET) -> None:
    use_recipe_threads(recipe)
    for config in recipe.language_models:
        if not is_complete(run_dir.language_model(config.name)):
            progress.stage(_sentence(config))
            _make(recipe, config, run_dir, progress)
        forget_training(resume_folder(run_dir.language_model(config.name)))


def _sentence(config: LanguageModelConfig) -> str:
    if config.residual_of is not None:
        return SENTENCE_RESIDUAL.format(name=config.name, base=config.residual_of)
    sentence = SENTENCE if config.training else SENTENCE_AS_IT_IS
    return sentence.format(name=config.name, source=config.source)


def _make(
    recipe: Recipe, config: LanguageModelConfig, run_dir: RunDirectory, progress: Progress
) -> None:
    check_manifest(run_dir.blocks)
    tokenizer = load_tokenizer(str(run_dir.blocks / "tokenizer"), "tokenizer")
    if config.residual_of is None:
        model = _initial_model(recipe, config, tokenizer, len(tokenizer))
    else:
        model = _on_top_of(recipe, config, tokenizer, run_dir.language_model(config.residual_of))
    for energy in recipe.energies:
        if energy.head is not None and recipe.language_model_of(energy) == config.name:
            check_layers(model, energy.head.layers, energy.name)  # before hours go into it
    model = model.to(resolve_device(recipe.device))
    folder = run_dir.language_model(config.name)
    history = History()
    if config.training is not None:
        history = _train(recipe, config, model, run_dir, progress)
    with new_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        write_json(temporary / "training.json", history.summary())


def _on_top_of(
    recipe: Recipe, config: LanguageModelConfig, tokenizer: PreTrainedTokenizerFast, base: Path
) -> RalmForCausalLM:
    field = f"language_models.{config.name}"
    below = load_pretrained(
        AutoModelForCausalLM, str(base), f"{field}.residual_of", dtype=torch.float32
    )
    # Some models have more rows than their tokenizer has tokens; the residual needs as many.
    vocabulary = below.config.vocab_size
    residual = _initial_model(recipe, config, tokenizer, vocabulary)
    if isinstance(residual, RalmForCausalLM) or residual.config.vocab_size != vocabulary:
        raise UserError(
            f"{field}.source",
            config.source,
            f"cannot be added to {config.residual_of}, which has {vocabulary} rows of logits; name"
            " a plain model with as many, or scratch",
        )
    scale = 1.0 if config.source == SCRATCH else _PRETRAINED_RESIDUAL_SCALE
    return RalmForCausalLM.of(below, residual, scale)


def _initial_model(
    recipe: Recipe,
    config: LanguageModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    vocabulary: int,
) -> PreTrainedModel:
    field = f"language_models.{config.name}"
    if config.source != SCRATCH:
        model = load_pretrained(
            AutoModelForCausalLM, config.source, f"{field}.source", dtype=torch.float32
        )
        own = load_tokenizer(config.source, f"{field}.source")
        if not (same_vocabulary(own, tokenizer) and own.eos_token_id == tokenizer.eos_token_id):
            raise UserError(
                "tokenizer.source",
                recipe.tokenizer.source,
                f"is not the tokenizer of {config.source}, whose token ids mean something else;"
                f" set tokenizer.source={config.source}",
            )
        check_context(model, recipe.block.length, f"{field}.source", config.source)
        return model
    assert config.architecture is not None
    end_of_text = end_of_text_id(tokenizer)
    architecture = build_architecture(
        config.architecture,
        f"{field}.architecture",
        recipe.block.length,
        vocab_size=vocabulary,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )
    with torch_seed(recipe.seed, "language_model", config.name):
        return build_model(
            AutoModelForCausalLM, architecture, f"{field}.architecture", config.architecture
        )


def _train(
    recipe: Recipe,
    config: LanguageModelConfig,
    model: PreTrainedModel,
    run_dir: RunDirectory,
    progress: Progress,
) -> History:
    assert config.training is not None
    training = config.training
    windows = {split: training_windows(recipe, run_dir, split) for split in ("train", "validation")}

    parts = parts_of(training, recipe.block.length)

    def loss_at(step: int, part: int) -> Tensor:
        chosen = batch_indices(
            len(windows["train"]), training.batch_size, step, recipe.seed, config.name
        )
        share = share_of(parts[part], training)
        return share * _loss(model, windows["train"][chosen[parts[part]]])

    def validate() -> dict[str, float]:
        total = count = 0.0
        held_out = windows["validation"][: config.validation_windows]
        for ids_BT in _batches(held_out, training.batch_size):
            total += _loss(model, ids_BT).item() * len(ids_BT)
            count += len(ids_BT)
        return {"loss": total / count, "perplexity": math.exp(total / count)}

    return train_in_run(
        run_dir,
        "train-lm",
        run_dir.language_model(config.name),
        model,
        training,
        block_length=recipe.block.length,
        tokens_per_item=recipe.block.length,
        loss_at=loss_at,
        validate=validate,
        seed=recipe.seed,
        progress=progress,
        dropout=False,
        num_parts=len(parts),
    )


def training_windows(recipe: Recipe, run_dir: RunDirectory, split: str) -> np.ndarray:
    """The split as one stream, end-of-text between documents, cut every T tokens.

    Also in `until_end` mode: the LM learns from whole documents, the short ones too.
    """
    documents = read_documents_ids(run_dir.blocks / f"documents-{split}.arrow")
    tokenizer = load_tokenizer(str(run_dir.blocks / "tokenizer"), "tokenizer")
    stream = recipe.block.model_copy(update={"continuation": "fixed"})
    windows = cut_blocks([list(ids) for ids in documents], stream, end_of_text_id(tokenizer))
    if not len(windows):
        raise UserError(
            "corpus.path", recipe.corpus.path, f"too small for one {split} window; give more text"
        )
    return windows.ids_BT


def _batches(ids_BT: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(ids_BT), batch_size):
        yield ids_BT[start : start + batch_size]


def _loss(model: PreTrainedModel, ids_BT: np.ndarray) -> Tensor:
    return next_token_loss(model, torch.from_numpy(ids_BT).to(model.device))
