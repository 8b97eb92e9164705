"""Energies by conditional noise contrastive estimation (section 3.1, equation 3).

Each positive is a real block; its negatives share the prefix and are drawn uniformly from those
stored. Both go through the same path, in one batch, a positive and its negatives side by side, so
that a network can read their prefix once.

Shapes: P prefixes, S stored negatives of each, B prefixes of a batch, K negatives of each,
J = 1 + K blocks of a prefix, the positive first, T tokens of a block, C of a continuation.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from residual_ebm.config import EnergyConfig, HeadConfig, Recipe
from residual_ebm.errors import UserError
from residual_ebm.estimation.detection import auc
from residual_ebm.estimation.nce import nce_accuracy, nce_loss
from residual_ebm.files.run_directory import RunDirectory, resume_folder
from residual_ebm.files.states import open_states
from residual_ebm.files.storage import check_manifest, delete_folder, is_complete
from residual_ebm.models.both_ways import is_bidirectional
from residual_ebm.models.device import use_recipe_threads
from residual_ebm.models.energy import EnergyModel, energy_info
from residual_ebm.models.energy_batches import rows_at_once
from residual_ebm.models.energy_inputs import TextBridge
from residual_ebm.models.kept_features import KeptFeatures
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.models.loading import context_length, load_pretrained, load_tokenizer
from residual_ebm.models.parts import parts_of, share_of
from residual_ebm.models.training import autocast, batch_indices, forget_training
from residual_ebm.progress import QUIET, Progress
from residual_ebm.randomness import generator, torch_seed
from residual_ebm.stages.contrast import Contrast, contrast_of
from residual_ebm.stages.negatives import SPLITS, training_prefixes
from residual_ebm.stages.sum_energies import make_sum
from residual_ebm.stages.training_run import train_in_run

SENTENCE = "Training the energy {name} ({kind}) to tell real continuations from {model}'s"


def run(recipe: Recipe, run_dir: RunDirectory, progress: Progress = QUIET) -> None:
    use_recipe_threads(recipe)
    for config in recipe.energies:
        folder = run_dir.energy(config.name)
        if not is_complete(folder):
            model = recipe.language_model_of(config)
            progress.stage(SENTENCE.format(name=config.name, kind=config.kind, model=model))
            _make(recipe, config, run_dir, progress)
        forget_training(resume_folder(folder))
    for entry in recipe.sums:
        if not is_complete(run_dir.energy(entry.name)):
            make_sum(recipe, entry, run_dir, progress)
    # Large, and of no more use once every HeaT has learnt from them.
    delete_folder(run_dir.states)


def _make(recipe: Recipe, config: EnergyConfig, run_dir: RunDirectory, progress: Progress) -> None:
    name = recipe.language_model_of(config)
    check_manifest(run_dir.blocks)
    language_model = LanguageModel.from_pretrained(
        run_dir.language_model(name), precision=recipe.precision, device=recipe.device
    )
    contrasts = {
        split: contrast_of(recipe, run_dir, name, split, language_model) for split in SPLITS
    }
    energy = _initial_energy(recipe, config, run_dir, language_model)
    summary = train_nce(
        energy,
        config,
        contrasts["train"],
        contrasts["validation"],
        seed=recipe.seed,
        batch_size=recipe.evaluation.batch_size,
        run_dir=run_dir,
        progress=progress,
    )
    energy.save_pretrained(run_dir.energy(config.name), summary)


def _initial_energy(
    recipe: Recipe, config: EnergyConfig, run_dir: RunDirectory, language_model: LanguageModel
) -> EnergyModel:
    info = energy_info(recipe, config.name, config.kind, language_model)
    with torch_seed(recipe.seed, "energy", config.name):
        if config.kind == "heat":
            return EnergyModel.new_head(config.head or HeadConfig(), info, language_model)
        backbone, tokenizer = _load_backbone(recipe, config, run_dir)
        return EnergyModel.from_backbone(backbone, tokenizer, info, language_model)


def check_pretrained(recipe: Recipe, run_dir: RunDirectory) -> None:
    """Refuse a network that cannot be an energy before hours go into its negatives."""
    for config in recipe.energies:
        if config.is_pretrained and not is_complete(run_dir.energy(config.name)):
            _load_backbone(recipe, config, run_dir)


def _load_backbone(
    recipe: Recipe, config: EnergyConfig, run_dir: RunDirectory
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The network that becomes an energy, able to read the blocks, and its tokenizer."""
    source = _backbone_source(config, run_dir)
    field = f"energies.{config.name}.source"
    # A masked LM's folder also loads as its bare encoder; its vocabulary layer is left behind.
    backbone = load_pretrained(AutoModel, source, field, dtype=torch.float32)
    _check_direction(backbone, config, field)
    _check_architecture(backbone, config)
    tokenizer = load_tokenizer(source, field)
    own = load_tokenizer(str(run_dir.blocks / "tokenizer"), "tokenizer")
    bridge = TextBridge(own, tokenizer, context_length(backbone.config))
    for split in ("train", "validation"):
        blocks, block_P = training_prefixes(recipe, run_dir, split)
        real = blocks.select(block_P)
        bridge.check_context(
            torch.from_numpy(real.ids_BT),
            torch.from_numpy(real.length_B),
            field,
            str(config.source),
        )
    return backbone, tokenizer


def _check_architecture(backbone: PreTrainedModel, config: EnergyConfig) -> None:
    for key, value in (config.architecture or {}).items():
        loaded = getattr(backbone.config, key, None)
        if loaded != value:
            raise UserError(
                f"energies.{config.name}.architecture.{key}",
                value,
                f"{config.source} has {loaded}; correct it or leave architecture out",
            )


def _check_direction(backbone: PreTrainedModel, config: EnergyConfig, field: str) -> None:
    """UniT reads left to right and BiT both ways; a backbone that does the other is refused."""
    masked = type(backbone.config) in AutoModelForMaskedLM._model_mapping
    both_ways = is_bidirectional(backbone) or (
        masked and not getattr(backbone.config, "is_decoder", False)
    )
    if both_ways != (config.kind == "bit"):
        reads = "both ways" if both_ways else "left to right"
        remedy = {"bit": "an encoder, or kind: unit", "unit": "a causal LM, or kind: bit"}
        raise UserError(field, config.source, f"reads {reads}; give {remedy[config.kind]}")


def _backbone_source(config: EnergyConfig, run_dir: RunDirectory) -> str:
    assert config.source is not None
    scheme, _, target = config.source.partition(":")
    if scheme == "lm":
        return str(run_dir.language_model(target))
    if scheme == "encoder":
        return str(run_dir.encoder(target))
    return config.source


def train_nce(
    energy: EnergyModel,
    config: EnergyConfig,
    contrast: Contrast,
    validation: Contrast,
    *,
    seed: int,
    batch_size: int,
    run_dir: RunDirectory,
    progress: Progress,
) -> dict[str, Any]:
    """Train an energy in place; validation sees every stored negative. What became of it, and how
    well it tells real text from samples, of training prefixes and of validation prefixes."""
    wanted = config.negatives_per_positive
    if wanted > contrast.num_stored:
        raise UserError(
            f"energies.{config.name}.negatives_per_positive",
            wanted,
            f"only {contrast.num_stored} negatives are stored for a prefix; raise"
            " negatives.samples_per_prefix",
        )
    training = config.training
    energies = {
        id(part): _energies_of(energy, part, batch_size, progress)
        for part in (contrast, validation)
    }

    tokens_per_item = energy.tokens_read(contrast.positives.ids_BT.shape[1], 1 + wanted)
    # Text of another vocabulary has about as many tokens.
    parts = parts_of(training, tokens_per_item or contrast.positives.ids_BT.shape[1] * (1 + wanted))

    def loss_at(step: int, part: int) -> Tensor:
        prefix_B = batch_indices(len(contrast), training.batch_size, step, seed, config.name)
        draw = generator(seed, config.name, "negatives", step)
        order_BS = draw.random((len(prefix_B), contrast.num_stored)).argsort(axis=1)
        rows = parts[part]
        energy_BJ = energies[id(contrast)](prefix_B[rows], order_BS[rows, :wanted])
        share = share_of(rows, training)
        return share * nce_loss(energy_BJ[:, 0], energy_BJ[:, 1:].flatten())

    def both_classes(part: Contrast, prefix_P: np.ndarray) -> tuple[Tensor, Tensor]:
        """Energies of real blocks and of all their stored negatives."""
        every_S = np.arange(part.num_stored)
        at_once = batch_size
        if config.kind != "heat":  # which reads kept states, a few numbers a token
            length = (1 + part.num_stored) * part.positives.ids_BT.shape[1]
            at_once = rows_at_once(batch_size, length, energy.language_model.device)
        found = [
            energies[id(part)](prefix_B, np.tile(every_S, (len(prefix_B), 1)))
            for prefix_B in np.split(prefix_P, range(at_once, len(prefix_P), at_once))
        ]
        energy_PJ = torch.cat(found)
        return energy_PJ[:, 0], energy_PJ[:, 1:].flatten()

    def validate() -> dict[str, float]:
        classes = both_classes(validation, np.arange(len(validation)))
        return {"loss": nce_loss(*classes).item(), "accuracy": nce_accuracy(*classes).item()}

    history = train_in_run(
        run_dir,
        "train-energy",
        run_dir.energy(config.name),
        energy.network,
        training,
        block_length=energy.info.block_length,
        tokens_per_item=tokens_per_item,
        loss_at=loss_at,
        validate=validate,
        seed=seed,
        progress=progress,
        num_parts=len(parts),
    )
    some_P = generator(seed, config.name, "detection").permutation(len(contrast))
    tried = {
        "train": (contrast, np.sort(some_P[: len(validation)])),
        "validation": (validation, np.arange(len(validation))),
    }
    with torch.no_grad(), autocast(training.precision, energy.language_model.device):
        detection = {split: _detection(*both_classes(*of)) for split, of in tried.items()}
    return {**history.summary(), "detection": detection}


def _detection(real_P: Tensor, sample_M: Tensor) -> dict[str, float]:
    return {
        "num_prefixes": len(real_P),
        "loss": nce_loss(real_P, sample_M).item(),
        "accuracy": nce_accuracy(real_P, sample_M).item(),
        "auc": auc(real_P.float().cpu(), sample_M.float().cpu()),
    }


def _energies_of(
    energy: EnergyModel, contrast: Contrast, batch_size: int, progress: Progress
) -> Callable[[np.ndarray, np.ndarray], Tensor]:
    """A function from prefixes and the numbers of their negatives to energies (B, J)."""

    def from_blocks(prefix_B: np.ndarray, sample_BK: np.ndarray) -> Tensor:
        # One batch for both classes: neither can be told by how it was padded or normalised.
        ids_BT, length_B = contrast.batch(prefix_B, sample_BK)
        num_blocks = 1 + sample_BK.shape[1]
        return energy(ids_BT, length_B, blocks_per_prefix=num_blocks).view(len(prefix_B), -1)

    num_blocks = 1 + contrast.num_stored
    if energy.info.kind != "heat" or not KeptFeatures.fit(
        energy.language_model,
        len(contrast) * num_blocks,
        contrast.negative_ids_PSC.shape[2],
        len(energy.state_layers),
    ):
        return from_blocks

    kept = KeptFeatures(energy, *contrast.every_block())
    if contrast.states is not None:
        states = open_states(contrast.states, energy.language_model.fingerprint)
        kept.load(states.rows(), states.layers, num_blocks)
    else:  # as many blocks at a time as a batch of validation has, whole prefixes each
        kept.compute(max(1, batch_size // num_blocks) * num_blocks, progress)

    def from_kept(prefix_B: np.ndarray, sample_BK: np.ndarray) -> Tensor:
        first_B1 = num_blocks * prefix_B[:, None]
        block_BJ = np.concatenate([first_B1, first_B1 + 1 + sample_BK], axis=1)
        return kept(torch.from_numpy(block_BJ.reshape(-1))).view(block_BJ.shape)

    return from_kept
