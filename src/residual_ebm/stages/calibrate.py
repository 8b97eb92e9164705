"""Does the published interval hold the truth as often as it says? (Where the truth can be summed.)

For a recipe with `evaluation.calibration`, whose vocabulary and continuations are so few that all
of them can be scored. Energies scaled up stand for energies that are too sure of themselves.

Shapes: K = V^C continuations of a prefix, T tokens of a block.
"""

import itertools
from dataclasses import asdict
from typing import Any

import torch

from residual_ebm.config import CalibrationConfig, Recipe
from residual_ebm.errors import UserError
from residual_ebm.estimation.coverage import ExactPrefix, coverage, true_perplexity
from residual_ebm.estimation.importance import log_weight
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.models.joint import JointModel
from residual_ebm.progress import Progress
from residual_ebm.randomness import derive_seed
from residual_ebm.stages.proposals import evaluation_prefixes

_MOST_CONTINUATIONS = 2**18
_BLOCKS_AT_ONCE = 4096


def calibrate(
    recipe: Recipe,
    run_dir: RunDirectory,
    energy: str,
    config: CalibrationConfig,
    progress: Progress,
) -> dict[str, Any]:
    prefixes = _exact_prefixes(recipe, run_dir, energy, progress)
    rows = []
    settings = list(itertools.product(config.scales, config.num_samples))
    with progress.bar("estimates", len(settings)) as bar:
        for scale, num_samples in settings:
            scaled = [prefix.scaled(scale) for prefix in prefixes]
            found = coverage(
                scaled,
                num_samples,
                num_documents=config.num_documents,
                num_replicates=config.num_replicates,
                num_resamples=config.bootstrap_resamples,
                seed=derive_seed(recipe.seed, "calibration"),  # the same documents for all
            )
            rows.append({"scale": scale, "truth": true_perplexity(scaled), **asdict(found)})
            bar.advance()
    return {
        "energy": energy,
        "num_prefixes": len(prefixes),
        "num_documents": config.num_documents,
        "num_continuations": len(prefixes[0].log_weight_K),
        "rows": rows,
    }


def _exact_prefixes(
    recipe: Recipe, run_dir: RunDirectory, energy: str, progress: Progress
) -> list[ExactPrefix]:
    joint = JointModel.from_pretrained(run_dir.path, energy)
    vocabulary, horizon = joint.language_model.vocabulary_size, joint.block.num_new_tokens
    if joint.block.continuation != "fixed" or vocabulary**horizon > _MOST_CONTINUATIONS:
        raise UserError(
            "evaluation.calibration",
            f"{vocabulary}^{horizon} continuations ({joint.block.continuation})",
            f"at most {_MOST_CONTINUATIONS} fixed ones can be summed; shorten block.length",
        )
    start = joint.block.prefix_length
    every_KC = torch.cartesian_prod(*[torch.arange(vocabulary)] * horizon).view(-1, horizon)
    place_C = vocabulary ** torch.arange(horizon - 1, -1, -1)
    blocks, block_P = evaluation_prefixes(recipe, run_dir, "test")
    part = blocks.select(block_P)
    prefixes = []
    with progress.bar("every continuation", len(part)) as bar:
        for ids, document, true_log_prob in zip(
            part.ids_BT, part.document_B, part.true_log_prob_B, strict=True
        ):
            ids_T = torch.from_numpy(ids)
            ids_KT = torch.cat([ids_T[:start].expand(len(every_KC), -1), every_KC], dim=1)
            log_prob_K = torch.cat(
                [
                    joint.language_model.log_prob(some_BT, start).double().sum(-1).cpu()
                    for some_BT in ids_KT.split(_BLOCKS_AT_ONCE)
                ]
            )
            energy_K = joint.energy_model.energy(ids_KT, batch_size=_BLOCKS_AT_ONCE)
            log_weight_K = log_weight(energy_K).cpu()
            real = int((ids_T[start:] * place_C).sum())
            prefixes.append(
                ExactPrefix(
                    int(document),
                    horizon,
                    float(log_prob_K[real]),
                    float(log_weight_K[real]),
                    log_prob_K.numpy(),
                    log_weight_K.numpy(),
                    float(true_log_prob),
                )
            )
            bar.advance()
    return prefixes
