"""Energies by conditional noise contrastive estimation (section 3.1, equation 3).

Each positive is a real block; its negatives share the prefix and are drawn uniformly from those
stored. Both go through the same path, in one batch.

Shapes: P prefixes, S stored negatives of each, B prefixes of a batch, K negatives of each,
T tokens of a block, C of a continuation.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel

from residual_ebm.config import BlockConfig, EnergyConfig, HeadConfig, Recipe
from residual_ebm.errors import UserError
from residual_ebm.estimation.nce import nce_accuracy, nce_loss
from residual_ebm.files.blocks import Blocks, read_blocks
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.samples import SampleSet, join_rows, open_samples
from residual_ebm.files.storage import check_manifest, is_complete
from residual_ebm.models.device import use_recipe_threads
from residual_ebm.models.energy import EnergyInfo, EnergyModel
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.models.loading import load_pretrained, load_tokenizer
from residual_ebm.models.training import History, batch_indices, forget_training, train
from residual_ebm.progress import QUIET, Progress
from residual_ebm.randomness import generator, torch_seed
from residual_ebm.stages.negatives import source_split
from residual_ebm.stages.training_run import resume_folder, training_log

SENTENCE = "Training the energy {name} ({kind}) to tell real continuations from {model}'s"


class Batch(NamedTuple):
    """Blocks of one class."""

    ids_BT: Tensor
    length_B: Tensor


@dataclass(frozen=True)
class Contrast:
    """Real blocks and the stored negatives of their prefixes."""

    positives: Blocks
    negative_ids_PSC: np.ndarray
    negative_length_PS: np.ndarray
    prefix_length: int

    def __len__(self) -> int:
        return len(self.positives)

    def positive_batch(self, prefix_B: np.ndarray) -> Batch:
        part = self.positives.select(prefix_B)
        return Batch(torch.from_numpy(part.ids_BT), torch.from_numpy(part.length_B))

    def negative_batch(self, prefix_B: np.ndarray, sample_BK: np.ndarray) -> Batch:
        """Blocks of the same prefixes with the chosen stored continuations, B x K of them."""
        rows_B1 = prefix_B[:, None]
        continuation_BKC = self.negative_ids_PSC[rows_B1, sample_BK]
        prefix_BKP = np.repeat(
            self.positives.ids_BT[prefix_B, None, : self.prefix_length], sample_BK.shape[1], axis=1
        )
        ids_BKT = np.concatenate([prefix_BKP, continuation_BKC], axis=2)
        length_BK = self.prefix_length + self.negative_length_PS[rows_B1, sample_BK]
        return Batch(
            torch.from_numpy(ids_BKT.reshape(-1, ids_BKT.shape[2])),
            torch.from_numpy(length_BK.reshape(-1)),
        )


def read_contrast(blocks: Blocks, samples: SampleSet, block: BlockConfig) -> Contrast:
    """Put every stored negative beside the real block of its prefix."""
    rows = join_rows(list(samples.rows()))
    shape = (len(samples.block_P), samples.samples_per_prefix)
    ids_PSC = np.empty((*shape, block.num_new_tokens), dtype=np.int64)
    length_PS = np.empty(shape, dtype=np.int64)
    ids_PSC[rows.prefix_N, rows.sample_N] = rows.ids_NC
    length_PS[rows.prefix_N, rows.sample_N] = rows.length_N
    return Contrast(blocks.select(samples.block_P), ids_PSC, length_PS, block.prefix_length)


def run(recipe: Recipe, run_dir: RunDirectory, progress: Progress = QUIET) -> None:
    use_recipe_threads(recipe)
    for config in recipe.energies:
        folder = run_dir.energy(config.name)
        if not is_complete(folder):
            model = recipe.language_model_of(config)
            progress.stage(SENTENCE.format(name=config.name, kind=config.kind, model=model))
            _make(recipe, config, run_dir, progress)
        forget_training(resume_folder(folder))


def _make(recipe: Recipe, config: EnergyConfig, run_dir: RunDirectory, progress: Progress) -> None:
    name = recipe.language_model_of(config)
    check_manifest(run_dir.blocks)
    language_model = LanguageModel.from_pretrained(
        run_dir.language_model(name), precision=recipe.precision, device=recipe.device
    )
    contrasts = {}
    for split in ("train", "validation"):
        blocks = read_blocks(run_dir.blocks / f"{source_split(recipe, split)}.arrow")
        samples = open_samples(run_dir.negatives(name, split), language_model.fingerprint)
        contrasts[split] = read_contrast(blocks, samples, recipe.block)
    energy = _initial_energy(recipe, config, run_dir, language_model)
    history = train_nce(
        energy,
        config,
        contrasts["train"],
        contrasts["validation"],
        seed=recipe.seed,
        batch_size=recipe.evaluation.batch_size,
        run_dir=run_dir,
        progress=progress,
    )
    energy.save_pretrained(
        run_dir.energy(config.name), {"validations": history.validations, **_best(history)}
    )


def _best(history: History) -> dict[str, float | bool]:
    return {"best_step": history.best_step, "stopped_early": history.stopped_early}


def _initial_energy(
    recipe: Recipe, config: EnergyConfig, run_dir: RunDirectory, language_model: LanguageModel
) -> EnergyModel:
    info = EnergyInfo(
        name=config.name,
        kind=config.kind,
        language_model=language_model.fingerprint,
        prefix_length=recipe.block.prefix_length,
        block_length=recipe.block.length,
        continuation=recipe.block.continuation,
    )
    with torch_seed(recipe.seed, "energy", config.name):
        if config.kind == "heat":
            return EnergyModel.new_head(config.head or HeadConfig(), info, language_model)
        source = _backbone_source(config, run_dir)
        field = f"energies.{config.name}.source"
        # A masked LM's folder also loads as its bare encoder; its vocabulary layer is left behind.
        backbone = load_pretrained(AutoModel, source, field, dtype=torch.float32)
        _check_direction(backbone, config, field)
        return EnergyModel.from_backbone(
            backbone, load_tokenizer(source, field), info, language_model
        )


def _check_direction(backbone: PreTrainedModel, config: EnergyConfig, field: str) -> None:
    """UniT reads left to right and BiT both ways; a backbone that does the other is refused."""
    masked = type(backbone.config) in AutoModelForMaskedLM._model_mapping
    both_ways = masked and not getattr(backbone.config, "is_decoder", False)
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
) -> History:
    """Train an energy in place; validation sees every stored negative."""
    stored = contrast.negative_ids_PSC.shape[1]
    wanted = config.negatives_per_positive
    if wanted > stored:
        raise UserError(
            f"energies.{config.name}.negatives_per_positive",
            wanted,
            f"only {stored} negatives are stored for a prefix; raise negatives.samples_per_prefix",
        )
    training = config.training

    def energies(positive: Batch, negative: Batch) -> tuple[Tensor, Tensor]:
        # One batch for both classes: neither can be told by how it was padded or normalised.
        energy_B = energy(
            torch.cat([positive.ids_BT, negative.ids_BT]),
            torch.cat([positive.length_B, negative.length_B]),
        )
        return energy_B[: len(positive.ids_BT)], energy_B[len(positive.ids_BT) :]

    def loss_at(step: int) -> Tensor:
        prefix_B = batch_indices(len(contrast), training.batch_size, step, seed, config.name)
        draw = generator(seed, config.name, "negatives", step)
        sample_BK = draw.random((len(prefix_B), stored)).argsort(axis=1)[:, :wanted]
        return nce_loss(
            *energies(
                contrast.positive_batch(prefix_B), contrast.negative_batch(prefix_B, sample_BK)
            )
        )

    def validate() -> dict[str, float]:
        positives, negatives = [], []
        every_S = np.arange(validation.negative_ids_PSC.shape[1])
        for start in range(0, len(validation), batch_size):
            prefix_B = np.arange(start, min(start + batch_size, len(validation)))
            sample_BS = np.tile(every_S, (len(prefix_B), 1))
            positive_B, negative_B = energies(
                validation.positive_batch(prefix_B), validation.negative_batch(prefix_B, sample_BS)
            )
            positives.append(positive_B)
            negatives.append(negative_B)
        positive, negative = torch.cat(positives), torch.cat(negatives)
        return {
            "loss": nce_loss(positive, negative).item(),
            "accuracy": nce_accuracy(positive, negative).item(),
        }

    return train(
        energy.network,
        training,
        loss_at=loss_at,
        validate=validate,
        seed=seed,
        folder=resume_folder(run_dir.energy(config.name)),
        log=training_log(run_dir, "train-energy", config.name),
        progress=progress,
        label=config.name,
    )
