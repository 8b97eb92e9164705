"""How far P_LM is from the text: by how much resampling gains on it is a lower bound on
KL(data || P_LM), for every n and every energy (`estimation/resampled.py`).

Shapes: P test prefixes, N proposals of a prefix.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from residual_ebm.config import Recipe
from residual_ebm.errors import UserError
from residual_ebm.estimation.resampled import resampled_log_partition
from residual_ebm.files.log_weights import RealContinuations
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.storage import check_manifest
from residual_ebm.models.loading import load_tokenizer
from residual_ebm.stages.evaluate import read_scored
from residual_ebm.stages.proposals import evaluation_prefixes


def gap_report(run_dir: RunDirectory, energy: str | None, num_passages: int) -> dict[str, Any]:
    """The bound of a finished run, and the test passages where the gap is largest."""
    recipe = run_dir.recipe()
    run_dir.check_results()
    results = run_dir.read_results()
    check_manifest(run_dir.blocks)
    rows = {row["energy"]: row for row in results["joint_models"] if not row["scaled"]}
    if not rows:
        raise UserError("energies", str(run_dir.path), "this run has none; add one to its recipe")
    energy = energy or str(results["best_energy"])
    if energy not in rows:
        raise UserError("energy", energy, f"not in this run; it has {', '.join(rows)}")
    row = rows[energy]
    real, log_weights = read_scored(run_dir, energy, "test")
    gap_P = passage_gaps(real, log_weights)
    return {
        "energy": energy,
        "language_model": row["language_model"],
        "gap": row["test"]["gap"],
        "interval": row["test"]["gap_interval"],
        "num_prefixes": len(gap_P),
        "num_samples": results["num_samples"],
        "passages": passages_of(recipe, run_dir, real, gap_P, by_gap(gap_P)[:num_passages]),
    }


def passage_gaps(real: RealContinuations, log_weights: Sequence[np.ndarray]) -> np.ndarray:
    """-E - log Z of each real continuation, itself counted among the proposals."""
    log_partition_P = [
        resampled_log_partition(values, float(log_weight))
        for values, log_weight in zip(log_weights, real.log_weight_P, strict=True)
    ]
    gap_P: np.ndarray = real.log_weight_P - np.array(log_partition_P)
    return gap_P


def by_gap(gap_P: np.ndarray) -> np.ndarray:
    """Numbers of the prefixes, the largest gap first."""
    return (-gap_P).argsort(kind="stable")


def passages_of(
    recipe: Recipe,
    run_dir: RunDirectory,
    real: RealContinuations,
    gap_P: np.ndarray,
    numbers: Sequence[int] | np.ndarray,
) -> list[dict[str, Any]]:
    """The texts of some test prefixes, with their gaps."""
    tokenizer = load_tokenizer(str(run_dir.blocks / "tokenizer"), "tokenizer")
    blocks, _ = evaluation_prefixes(recipe, run_dir, "test")
    start = recipe.block.prefix_length
    passages = []
    for number in numbers:
        block = int(real.block_P[number])
        ids = blocks.ids_BT[block]
        passages.append(
            {
                "block": block,
                "gap": float(gap_P[number]),
                "lm_log_prob": float(real.lm_log_prob_P[number]),
                "prefix": tokenizer.decode(ids[:start]),
                "continuation": tokenizer.decode(ids[start : blocks.length_B[block]]),
            }
        )
    return passages
