"""Sums of energies: weights fitted on the validation negatives, log-weights from those there are.

Shapes: P prefixes, J blocks of a prefix (the real one first), M energies, N proposals.
"""

import numpy as np
import torch

from residual_ebm.config import Recipe, SumConfig
from residual_ebm.estimation.importance import energy_of, log_weight
from residual_ebm.estimation.nce import nce_accuracy, nce_loss
from residual_ebm.estimation.weighted_sum import WeightedSum, fit_weighted_sum
from residual_ebm.files.log_weights import (
    REAL,
    RealContinuations,
    claim_log_weights,
    read_real,
    read_shard,
    write_log_weights,
    write_real,
)
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.storage import check_manifest, is_complete, write_manifest
from residual_ebm.models.energy import EnergyModel, energy_info
from residual_ebm.models.energy_sum import EnergySum
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.progress import Progress
from residual_ebm.stages.contrast import Contrast, contrast_of

SENTENCE = "Adding energies up: {members} as {name}"


def make_sum(recipe: Recipe, config: SumConfig, run_dir: RunDirectory, progress: Progress) -> None:
    """Fit the weights of a sum of trained energies, and save it beside them."""
    progress.stage(SENTENCE.format(members=" and ".join(config.members), name=config.name))
    check_manifest(run_dir.blocks)
    name = recipe.corrected_by(config.name)
    language_model = LanguageModel.from_pretrained(
        run_dir.language_model(name), precision=recipe.precision, device=recipe.device
    )
    members = [
        EnergyModel.from_pretrained(
            run_dir.energy(member), language_model, precision=recipe.precision
        )
        for member in config.members
    ]
    contrast = contrast_of(recipe, run_dir, name, "validation", language_model)
    energy_PJM = np.stack(
        [_energies(member, contrast, recipe.evaluation.batch_size, progress) for member in members],
        axis=-1,
    )
    positive_PM, negative_NM = energy_PJM[:, 0], energy_PJM[:, 1:].reshape(-1, len(members))
    weights = fit_weighted_sum(positive_PM, negative_NM)
    info = energy_info(recipe, config.name, "sum", language_model)
    made = EnergySum(info, members, weights)
    made.save_pretrained(run_dir.energy(config.name), _summary(weights, positive_PM, negative_NM))


def _energies(
    member: EnergyModel, contrast: Contrast, batch_size: int, progress: Progress
) -> np.ndarray:
    ids_BT, length_B = contrast.every_block()
    energy_B = member.energy(ids_BT, length_B, batch_size=batch_size, progress=progress)
    energies: np.ndarray = energy_B.double().cpu().numpy()
    return energies.reshape(len(contrast), -1)


def _summary(
    weights: WeightedSum, positive_PM: np.ndarray, negative_NM: np.ndarray
) -> dict[str, object]:
    """As of a training; the few weights were fitted on the very blocks of its one validation."""
    positive_P, negative_N = weights(positive_PM), weights(negative_NM)
    validation = {
        "step": 0,
        "loss": nce_loss(positive_P, negative_N).item(),
        "accuracy": nce_accuracy(positive_P, negative_N).item(),
    }
    return {"validations": [validation], "weights": weights.weight_M.tolist()}


def add_log_weights(
    config: SumConfig, run_dir: RunDirectory, split: str, energy: EnergySum
) -> None:
    """Fill log_weights/SUM/SPLIT from those of the members: nothing is scored again."""
    folder = run_dir.log_weights(config.name, split)
    claim_log_weights(folder, energy.fingerprint)
    if is_complete(folder):
        return
    sources = [run_dir.log_weights(name, split) for name in config.members]
    manifests = [check_manifest(source) for source in sources]
    for path in sorted(sources[0].glob("shard-*.arrow")):
        shards = [read_shard(source / path.name) for source in sources]
        assert all(np.array_equal(prefix_N, shards[0][0]) for prefix_N, _ in shards)
        log_weight_NM = np.stack([log_weight_N for _, log_weight_N in shards], axis=1)
        write_log_weights(folder / path.name, shards[0][0], _added(energy, log_weight_NM))
    reals = [read_real(source / REAL) for source in sources]
    log_weight_PM = np.stack([real.log_weight_P for real in reals], axis=1)
    first = reals[0]
    write_real(
        folder / REAL,
        RealContinuations(
            first.block_P,
            first.document_P,
            first.num_tokens_P,
            first.lm_log_prob_P,
            _added(energy, log_weight_PM),
        ),
    )
    count = manifests[0]["num_samples"]
    write_manifest(folder, {"energy": config.name, "num_samples": count})


def _added(energy: EnergySum, log_weight_NM: np.ndarray) -> np.ndarray:
    energy_NM = energy_of(torch.from_numpy(log_weight_NM))
    added_N: np.ndarray = log_weight(energy.of_members(energy_NM)).numpy()
    return added_N
