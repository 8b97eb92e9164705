"""Drawing negatives and proposals: untruncated samples of P_LM, in shards that survive a kill."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from residual_ebm.config import BlockConfig, Recipe, SamplingConfig
from residual_ebm.files.blocks import Blocks
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.samples import (
    Chunk,
    SampleRows,
    join_rows,
    plan_shards,
    sample_manifest,
    shard_path,
    write_rows,
)
from residual_ebm.files.storage import check_manifest, is_complete, write_manifest
from residual_ebm.models.decoding import UNTRUNCATED
from residual_ebm.models.device import use_recipe_threads
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.progress import Progress
from residual_ebm.randomness import derive_seed


@dataclass(frozen=True)
class Drawing:
    """What a stage wants drawn: of which prefixes, how many samples, and where they go."""

    purpose: str  # keys the randomness: negatives are not proposals
    sentence: str
    splits: Sequence[str]
    prefixes: Callable[[str], tuple[Blocks, np.ndarray]]  # blocks of a split, and those chosen
    num_samples: int
    sampling: SamplingConfig
    folder: Callable[[str, str], Path]  # of a language model and a split


def draw_missing(
    recipe: Recipe, run_dir: RunDirectory, drawing: Drawing, progress: Progress
) -> None:
    """Draw what is not there yet, for every language model that an energy corrects."""
    use_recipe_threads(recipe)
    for name in recipe.sampled_language_models:
        wanted = [split for split in drawing.splits if not is_complete(drawing.folder(name, split))]
        if not wanted:
            continue
        progress.stage(drawing.sentence.format(name=name))
        check_manifest(run_dir.blocks)
        language_model = LanguageModel.from_pretrained(
            run_dir.language_model(name), precision=recipe.precision, device=recipe.device
        )
        for split in wanted:
            blocks, block_P = drawing.prefixes(split)
            draw_samples(
                language_model,
                blocks,
                block_P,
                drawing.num_samples,
                block=recipe.block,
                sampling=drawing.sampling,
                folder=drawing.folder(name, split),
                seed=derive_seed(recipe.seed, drawing.purpose, name, split),
                progress=progress,
                label=f"{drawing.purpose}, {split}",
            )


def draw_samples(
    language_model: LanguageModel,
    blocks: Blocks,
    block_P: np.ndarray,
    num_samples: int,
    *,
    block: BlockConfig,
    sampling: SamplingConfig,
    folder: Path,
    seed: int,
    progress: Progress,
    label: str,
) -> None:
    """`num_samples` continuations of the prefix of each block named by `block_P`."""
    shards = plan_shards(len(block_P), num_samples, sampling)
    missing = [number for number in range(len(shards)) if not shard_path(folder, number).exists()]
    with progress.bar(label, len(shards), len(shards) - len(missing)) as bar:
        for number in missing:
            parts = [
                _draw_chunk(language_model, blocks, block_P, chunk, block, seed)
                for chunk in shards[number]
            ]
            write_rows(shard_path(folder, number), join_rows(parts))
            bar.advance()
    info = sample_manifest(block_P, num_samples, language_model.fingerprint, UNTRUNCATED.describe())
    write_manifest(folder, info)


def _draw_chunk(
    language_model: LanguageModel,
    blocks: Blocks,
    block_P: np.ndarray,
    chunk: Chunk,
    block: BlockConfig,
    seed: int,
) -> SampleRows:
    numbers = np.arange(chunk.first_prefix, chunk.first_prefix + chunk.num_prefixes)
    prefix_ids_GP = blocks.ids_BT[block_P[numbers], : block.prefix_length]
    decoded = language_model.sample_chunk(
        torch.from_numpy(prefix_ids_GP),
        prefix_numbers=[int(number) for number in numbers],
        first_sample=chunk.first_sample,
        num_samples=chunk.num_samples,
        num_tokens=block.num_new_tokens,
        seed=seed,
        # Untruncated: NCE needs the true noise density, and Z is a mean under P_LM itself.
        truncation=UNTRUNCATED,
        stop_at_end=block.continuation == "until_end",
    )
    samples = np.arange(chunk.first_sample, chunk.first_sample + chunk.num_samples)
    return SampleRows(
        np.repeat(numbers, chunk.num_samples),
        np.tile(samples, chunk.num_prefixes),
        decoded.ids_NC.cpu().numpy(),
        decoded.length_N.cpu().numpy(),
        decoded.log_prob_NC.double().sum(-1).cpu().numpy(),
    )
