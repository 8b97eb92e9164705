"""Our own encoders for BiT: masked-language modelling on the training blocks (section 4.1).

An encoder reads exactly what its energy will read: the blocks through the same bridge, decoded to
text first when its tokenizer is not the language model's.
"""

import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from residual_ebm.config import SCRATCH, EncoderConfig, Recipe
from residual_ebm.errors import UserError
from residual_ebm.files.blocks import Blocks, read_blocks
from residual_ebm.files.run_directory import RunDirectory, resume_folder
from residual_ebm.files.storage import check_manifest, is_complete, new_folder, write_json
from residual_ebm.files.tokenizers import train_tokenizer
from residual_ebm.models.both_ways import make_bidirectional
from residual_ebm.models.device import resolve_device, use_recipe_threads
from residual_ebm.models.energy_inputs import TextBridge, decode_blocks
from residual_ebm.models.loading import (
    context_length,
    load_pretrained,
    load_tokenizer,
    train_every_embedding,
)
from residual_ebm.models.masking import mask_tokens, num_hidden
from residual_ebm.models.parts import parts_of
from residual_ebm.models.training import History, batch_indices, forget_training
from residual_ebm.models.vocabulary_loss import masked_token_loss
from residual_ebm.progress import QUIET, Progress
from residual_ebm.randomness import generator, torch_seed
from residual_ebm.stages.training_run import (
    build_architecture,
    build_model,
    train_in_run,
)

SENTENCE = "Training the encoder {name} by masked-language modelling"
_VALIDATION_BLOCKS = 256


def run(recipe: Recipe, run_dir: RunDirectory, progress: Progress = QUIET) -> None:
    use_recipe_threads(recipe)
    for config in recipe.encoders:
        if not is_complete(run_dir.encoder(config.name)):
            progress.stage(SENTENCE.format(name=config.name))
            _make(recipe, config, run_dir, progress)
        forget_training(resume_folder(run_dir.encoder(config.name)))


def check_tokenizers(recipe: Recipe, run_dir: RunDirectory) -> None:
    """Refuse a tokenizer that cannot hide a token before hours go into the language model."""
    for config in recipe.encoders:
        if not is_complete(run_dir.encoder(config.name)) and not _trains_tokenizer(config):
            lm_tokenizer = load_tokenizer(str(run_dir.blocks / "tokenizer"), "tokenizer")
            _given_tokenizer(config, lm_tokenizer)


def _make(recipe: Recipe, config: EncoderConfig, run_dir: RunDirectory, progress: Progress) -> None:
    check_manifest(run_dir.blocks)
    lm_tokenizer = load_tokenizer(str(run_dir.blocks / "tokenizer"), "tokenizer")
    blocks = {
        split: read_blocks(run_dir.blocks / f"{split}.arrow") for split in ("train", "validation")
    }
    tokenizer = _tokenizer(config, lm_tokenizer, blocks["train"])
    if config.language_model is None:
        model = _new_model(recipe, config, tokenizer)
    else:
        model = _from_language_model(config, run_dir.language_model(config.language_model))
    model = model.to(resolve_device(recipe.device))
    history = _train(recipe, config, model, lm_tokenizer, tokenizer, blocks, run_dir, progress)
    with new_folder(run_dir.encoder(config.name)) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        write_json(temporary / "training.json", history.summary())


def _tokenizer(
    config: EncoderConfig, lm_tokenizer: PreTrainedTokenizerFast, train_blocks: Blocks
) -> PreTrainedTokenizerFast:
    if not _trains_tokenizer(config):
        return _given_tokenizer(config, lm_tokenizer)
    assert config.tokenizer is not None
    texts = decode_blocks(
        lm_tokenizer,
        torch.from_numpy(train_blocks.ids_BT),
        torch.from_numpy(train_blocks.length_B),
        "\n",
    )
    return train_tokenizer(texts, config.tokenizer.kind, config.tokenizer.vocab_size)


def _trains_tokenizer(config: EncoderConfig) -> bool:
    return config.tokenizer is not None and config.tokenizer.source == SCRATCH


def _given_tokenizer(
    config: EncoderConfig, lm_tokenizer: PreTrainedTokenizerFast
) -> PreTrainedTokenizerFast:
    """The language model's, or the one that the recipe names; it must be able to hide a token."""
    field = f"encoders.{config.name}.tokenizer"
    tokenizer = lm_tokenizer
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer.source, f"{field}.source")
    if tokenizer.mask_token_id is None:
        remedy = "has no mask token; give an encoder from scratch one, tokenizer: {source: scratch}"
        raise UserError(field, tokenizer.name_or_path, remedy)
    return tokenizer


def _from_language_model(config: EncoderConfig, folder: Path) -> PreTrainedModel:
    """Weights that know the language already; only looking ahead is new to them."""
    field = f"encoders.{config.name}.source"
    model: PreTrainedModel = load_pretrained(
        AutoModelForCausalLM, str(folder), field, dtype=torch.float32
    )
    train_every_embedding(model)
    if not make_bidirectional(model):
        raise UserError(field, config.source, "cannot look ahead; train one from scratch")
    return model


def _new_model(
    recipe: Recipe, config: EncoderConfig, tokenizer: PreTrainedTokenizerFast
) -> PreTrainedModel:
    assert config.architecture is not None
    architecture = build_architecture(
        config.architecture,
        f"encoders.{config.name}.architecture",
        recipe.block.length,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    field = f"encoders.{config.name}.architecture"
    if type(architecture) not in AutoModelForMaskedLM._model_mapping:
        raise UserError(
            f"{field}.model_type",
            config.architecture["model_type"],
            "has no masked-language model; use bert, roberta or modernbert",
        )
    with torch_seed(recipe.seed, "encoder", config.name):
        return build_model(AutoModelForMaskedLM, architecture, field, config.architecture)


def _train(
    recipe: Recipe,
    config: EncoderConfig,
    model: PreTrainedModel,
    lm_tokenizer: PreTrainedTokenizerFast,
    tokenizer: PreTrainedTokenizerFast,
    blocks: dict[str, Blocks],
    run_dir: RunDirectory,
    progress: Progress,
) -> History:
    bridge = TextBridge(lm_tokenizer, tokenizer, context_length(model.config))
    training = config.training

    parts = parts_of(training, recipe.block.length)

    def hide(batch: Blocks, step: int, purpose: str) -> tuple[Tensor, Tensor, Tensor]:
        inputs = bridge(torch.from_numpy(batch.ids_BT), torch.from_numpy(batch.length_B))
        draw = generator(recipe.seed, config.name, purpose, step)
        masked = mask_tokens(
            inputs.ids_BL, inputs.mask_BL, tokenizer, config.mask_probability, draw
        )
        return masked.ids_BL, inputs.mask_BL, masked.target_BL

    @functools.lru_cache(maxsize=1)  # the parts of a step are of one batch
    def batch_at(step: int) -> tuple[Tensor, Tensor, Tensor]:
        chosen = batch_indices(
            len(blocks["train"]), training.batch_size, step, recipe.seed, config.name
        )
        return hide(blocks["train"].select(chosen), step, "mask")

    def loss_at(step: int, part: int) -> Tensor:
        ids_BL, mask_BL, target_BL = batch_at(step)
        rows = parts[part]
        loss = masked_token_loss(model, ids_BL[rows], mask_BL[rows], target_BL[rows])
        return loss * num_hidden(target_BL[rows]) / num_hidden(target_BL)

    def validate() -> dict[str, float]:
        count = min(_VALIDATION_BLOCKS, len(blocks["validation"]))
        total = 0.0
        for start in range(0, count, training.batch_size):
            chosen = np.arange(start, min(start + training.batch_size, count))
            part = blocks["validation"].select(chosen)
            # Keyed by the place, not the step: every validation hides the same tokens.
            loss = masked_token_loss(model, *hide(part, start, "validation_mask"))
            total += loss.item() * len(part)
        return {"loss": total / count}

    return train_in_run(
        run_dir,
        "train-encoder",
        run_dir.encoder(config.name),
        model,
        training,
        block_length=recipe.block.length,
        tokens_per_item=recipe.block.length if bridge.same else None,
        loss_at=loss_at,
        validate=validate,
        seed=recipe.seed,
        progress=progress,
        num_parts=len(parts),
    )
