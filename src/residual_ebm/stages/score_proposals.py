"""Log-weights of every proposal and of every real continuation, under one energy."""

from typing import Any

import numpy as np
import torch

from residual_ebm.config import EnergyConfig, Recipe
from residual_ebm.estimation.importance import log_weight
from residual_ebm.files.blocks import Blocks
from residual_ebm.files.log_weights import (
    REAL,
    RealContinuations,
    claim_log_weights,
    write_log_weights,
    write_real,
)
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.samples import SampleRows, open_samples, read_rows
from residual_ebm.files.storage import is_complete, write_manifest
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.progress import Progress
from residual_ebm.stages.proposals import evaluation_prefixes


def real_log_prob(
    language_model: LanguageModel, blocks: Blocks, prefix_length: int, batch_size: int
) -> np.ndarray:
    """lm_log_prob of each block's real continuation, in the type that sampled the proposals."""
    parts = []
    for start in range(0, len(blocks), batch_size):
        part = blocks.select(np.arange(start, min(start + batch_size, len(blocks))))
        log_prob_BC = language_model.log_prob(
            torch.from_numpy(part.ids_BT), prefix_length, torch.from_numpy(part.length_B)
        )
        parts.append(log_prob_BC.double().sum(-1).cpu().numpy())
    return np.concatenate(parts)


def score_proposals(
    recipe: Recipe,
    config: EnergyConfig,
    run_dir: RunDirectory,
    split: str,
    language_model: LanguageModel,
    energy: EnergyModel,
    progress: Progress,
) -> None:
    """Fill log_weights/ENERGY/SPLIT, one file for each shard of proposals."""
    folder = run_dir.log_weights(config.name, split)
    claim_log_weights(folder, energy.fingerprint)
    if is_complete(folder):
        return
    name = recipe.language_model_of(config)
    proposals = open_samples(run_dir.proposals(name, split), language_model.fingerprint)
    blocks, block_P = evaluation_prefixes(recipe, run_dir, split)
    real = blocks.select(block_P)
    batch_size = recipe.evaluation.batch_size
    # Not how many are left: an interrupted run goes on as it began.
    num_blocks = len(real) * proposals.samples_per_prefix
    scored: dict[str, Any] = {"batch_size": batch_size, "out_of": num_blocks}
    missing = [path for path in proposals.shards if not (folder / path.name).exists()]
    done = len(proposals.shards) - len(missing)
    with progress.bar(f"{config.name}, {split}", len(proposals.shards), done) as bar:
        for path in missing:
            rows = read_rows(path)
            ids_NT, length_N = _blocks_of(rows, real, recipe.block.prefix_length)
            energy_N = energy.energy(ids_NT, length_N, **scored).cpu()
            write_log_weights(folder / path.name, rows.prefix_N, log_weight(energy_N).numpy())
            bar.advance()
    ids_PT, length_P = torch.from_numpy(real.ids_BT), torch.from_numpy(real.length_B)
    energy_P = energy.energy(ids_PT, length_P, **scored).cpu()
    write_real(
        folder / REAL,
        RealContinuations(
            block_P,
            real.document_B,
            real.length_B - recipe.block.prefix_length,
            real_log_prob(language_model, real, recipe.block.prefix_length, batch_size),
            log_weight(energy_P).numpy(),
        ),
    )
    write_manifest(folder, {"energy": config.name, "num_samples": proposals.samples_per_prefix})


def _blocks_of(
    rows: SampleRows, real: Blocks, prefix_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    prefix_NP = real.ids_BT[rows.prefix_N, :prefix_length]
    ids_NT = np.concatenate([prefix_NP, rows.ids_NC], axis=1)
    return torch.from_numpy(ids_NT), torch.from_numpy(prefix_length + rows.length_N)
