"""What a finished run shows beside its table: the analyses of section 4.3, from files alone.

For every energy: bounds against the number of samples (Figure 2 left), unique n-grams of real text,
base and joint samples (Figure 2 right), densities of log-probs (Figure 3), and the energy as a
detector. Joint samples are resampled from the first half of a prefix's proposals and Z comes from
the second half, so a sample does not count in the Z that normalises it.

Shapes: P prefixes, N proposals of a prefix, D draws for each, C tokens of a continuation.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from residual_ebm.config import Recipe
from residual_ebm.estimation.bootstrap import Interval, bootstrap_mean, perplexity
from residual_ebm.estimation.density import log_prob_densities
from residual_ebm.estimation.detection import auc, calibration, rank_among, roc
from residual_ebm.estimation.importance import energy_of, resample
from residual_ebm.estimation.nce import nce_accuracy
from residual_ebm.estimation.partition import log_partition_bounds
from residual_ebm.estimation.perplexity import bounds_at_count, joint_log_prob
from residual_ebm.estimation.repetition import count_ngrams, unique_among, unique_within
from residual_ebm.estimation.reweighting import mass_curve, split_gains
from residual_ebm.files.log_weights import RealContinuations
from residual_ebm.files.run_directory import ANALYSIS_VERSION, RunDirectory
from residual_ebm.files.samples import SampleRows, pick_rows
from residual_ebm.files.source_commit import source_commit
from residual_ebm.files.storage import write_json
from residual_ebm.models.loading import load_tokenizer
from residual_ebm.progress import QUIET, Progress
from residual_ebm.randomness import derive_seed, uniform
from residual_ebm.stages.calibrate import calibrate
from residual_ebm.stages.evaluate import (
    log_partitions_at,
    plain_numbers,
    prefixes_of,
    read_scored,
    resampling,
)
from residual_ebm.stages.gap import by_gap, passage_gaps, passages_of
from residual_ebm.stages.proposals import DEEP, evaluation_prefixes
from residual_ebm.stages.step_analysis import analyse_steps

SENTENCE = "Analysing: number of samples, repetition, densities, the energy as a detector"
_NGRAM_ORDERS = (2, 3, 4)
_DETECTED_SAMPLES = 200  # proposals of a prefix that the detector is tried on
_PASSAGES = 3
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_MASS_POINTS = 41  # of the curve of who gets the joint model's mass
_CURVE_POINTS = 51  # of a ROC curve, as it is kept, along each axis


def run(recipe: Recipe, run_dir: RunDirectory, progress: Progress = QUIET) -> None:
    if run_dir.has_results() and run_dir.read_analysis() is not None:
        return
    run_dir.check_results()
    progress.stage(SENTENCE)
    analysis: dict[str, Any] = {
        "version": ANALYSIS_VERSION,
        "recipe": recipe.name,
        "commit": source_commit(),
        "seed": recipe.seed,
        "split": "test",
        "num_prefixes": len(evaluation_prefixes(recipe, run_dir, "test")[1]),
        "num_samples": recipe.proposals.num_samples,
        "num_draws": num_draws(recipe),
        "num_resampled_from": recipe.proposals.num_samples // 2,
        "num_detected": min(_DETECTED_SAMPLES, recipe.proposals.num_samples),
        "energies": {
            entry.name: _of_energy(recipe, run_dir, entry.name) for entry in recipe.corrections
        },
    }
    best = run_dir.read_results()["best_energy"]
    if recipe.evaluation.per_step is not None and best is not None:
        analysis["per_step"] = analyse_steps(
            recipe, run_dir, best, recipe.evaluation.per_step, progress
        )
    if recipe.evaluation.calibration is not None and best is not None:
        analysis["calibration"] = calibrate(
            recipe, run_dir, best, recipe.evaluation.calibration, progress
        )
    write_json(run_dir.analysis, plain_numbers(analysis))


def num_draws(recipe: Recipe) -> int:
    """Samples of each model for a prefix; base samples are taken from half of the proposals."""
    return min(recipe.evaluation.num_draws, recipe.proposals.num_samples // 2)


@dataclass(frozen=True)
class _Drawn:
    """D samples of the base LM and of the joint model for each of P prefixes, prefix by prefix."""

    base: SampleRows
    joint: SampleRows
    joint_log_weight_PD: np.ndarray
    log_partition_P: np.ndarray  # from proposals that were not resampled


def _of_energy(recipe: Recipe, run_dir: RunDirectory, energy: str) -> dict[str, Any]:
    real, log_weights = read_scored(run_dir, energy, "test")
    drawn = _draw(recipe, run_dir, energy, real, log_weights)
    return {
        "language_model": recipe.corrected_by(energy),
        "bounds": _bounds_by_samples(real, log_weights),
        "deep": _deep(recipe, run_dir, energy),
        "repetition": _repetition(recipe, run_dir, real, drawn),
        "density": _densities(recipe, real, drawn),
        "detector": _detector(real, log_weights),
        "weights": _weights(recipe, real, log_weights),
        "passages": _passages(recipe, run_dir, real, log_weights, drawn),
    }


def _passages(
    recipe: Recipe,
    run_dir: RunDirectory,
    real: RealContinuations,
    log_weights: list[np.ndarray],
    drawn: _Drawn,
) -> dict[str, Any]:
    """Where the energy finds most that the LM misses, and where the joint model does worst; with
    what each model wrote there, the first draw of each."""
    gap_P = passage_gaps(real, log_weights)
    order_P = by_gap(gap_P)
    count = min(_PASSAGES, len(order_P))
    numbers = {"largest_gap": order_P[:count], "smallest_gap": order_P[::-1][:count]}
    tokenizer = load_tokenizer(str(run_dir.blocks / "tokenizer"), "tokenizer")
    found: dict[str, Any] = {}
    for which, chosen in numbers.items():
        found[which] = passages_of(recipe, run_dir, real, gap_P, chosen)
        for passage, prefix in zip(found[which], chosen.tolist(), strict=True):
            for model, sets in (("base", _sets(drawn.base)), ("joint", _sets(drawn.joint))):
                passage[model] = tokenizer.decode(sets[0][prefix])
    return found


def _draw(
    recipe: Recipe,
    run_dir: RunDirectory,
    energy: str,
    real: RealContinuations,
    log_weights: list[np.ndarray],
) -> _Drawn:
    count = num_draws(recipe)
    seed = derive_seed(recipe.seed, "analysis", energy)
    chosen, chosen_log_weight, log_partition = [], [], []
    for prefix, log_weight_N in enumerate(log_weights):
        half = len(log_weight_N) // 2
        draw_D = torch.from_numpy(uniform(seed, prefix, 0, 0, count))
        index_D = resample(torch.from_numpy(log_weight_N[:half]), draw_D).numpy()
        chosen.append(index_D)
        chosen_log_weight.append(log_weight_N[index_D])
        log_partition.append(float(log_partition_bounds(log_weight_N[half:]).lower))
    prefix_K = np.repeat(np.arange(len(real.block_P)), count)
    proposals = run_dir.proposals(recipe.corrected_by(energy), "test")
    return _Drawn(
        pick_rows(proposals, prefix_K, np.tile(np.arange(count), len(real.block_P))),
        pick_rows(proposals, prefix_K, np.concatenate(chosen)),
        np.stack(chosen_log_weight),
        np.array(log_partition),
    )


def _bounds_by_samples(
    real: RealContinuations, log_weights: list[np.ndarray]
) -> list[dict[str, float]]:
    """Perplexity from 8, 16, 32 ... samples a prefix, up to all there are."""
    total = len(log_weights[0])
    counts = [2**power for power in range(3, total.bit_length()) if 2**power < total]
    rows = []
    for count in [*counts, total]:
        log_partitions = log_partitions_at(real, log_weights, count)
        estimates = joint_log_prob(real.lm_log_prob_P, real.log_weight_P, log_partitions)
        rows.append(asdict(bounds_at_count(prefixes_of(real), estimates, count)))
    return rows


def _deep(recipe: Recipe, run_dir: RunDirectory, energy: str) -> dict[str, Any] | None:
    """The same of the few prefixes that have many more samples."""
    if recipe.proposals.deep is None:
        return None
    real, log_weights = read_scored(run_dir, energy, DEEP)
    return {
        "num_prefixes": len(log_weights),
        "base": perplexity(real.lm_log_prob_P, real.num_tokens_P),
        "bounds": _bounds_by_samples(real, log_weights),
    }


def _weights(
    recipe: Recipe, real: RealContinuations, log_weights: list[np.ndarray]
) -> dict[str, Any]:
    """How samples of P_LM are re-weighted: are a few promoted, or the worst demoted? Gains are in
    nats a passage, `quantiles` of log(w / Z)."""
    gains = split_gains(log_weights, real.log_weight_P)
    curve = mass_curve(log_weights, _MASS_POINTS)
    normalised_M = np.concatenate(
        [values - np.logaddexp.reduce(values) + np.log(len(values)) for values in log_weights]
    )
    return {
        "gains": {
            "both": gains.both_P.mean(),
            "demoting": gains.demoting_P.mean(),
            "promoting": gains.promoting_P.mean(),
            "demoting_minus_promoting": bootstrap_mean(
                gains.demoting_P - gains.promoting_P, real.document_P, **resampling(recipe)
            ),
        },
        "curve": {"share": curve.share_K, "mass": curve.mass_K},
        "quantiles": [
            {"share": share, "log_weight": value}
            for share, value in zip(_QUANTILES, np.quantile(normalised_M, _QUANTILES), strict=True)
        ],
    }


def _repetition(
    recipe: Recipe, run_dir: RunDirectory, real: RealContinuations, drawn: _Drawn
) -> list[dict[str, Any]]:
    """Unique n-grams of sets with one passage a prefix, at equal numbers of n-grams; of samples,
    mean and spread over sets. Differences are of the shares within passages, paired by prefix."""
    blocks, block_P = evaluation_prefixes(recipe, run_dir, "test")
    part = blocks.select(block_P)
    start = recipe.block.prefix_length
    passages = [ids[start:end] for ids, end in zip(part.ids_BT, part.length_B, strict=True)]
    sets = {"real": [passages], "base": _sets(drawn.base), "joint": _sets(drawn.joint)}
    rows = []
    for order in _NGRAM_ORDERS:
        most = min(count_ngrams(one, order) for found in sets.values() for one in found)
        if most == 0:
            continue
        row: dict[str, Any] = {"order": order}
        within_P = {}
        for name, found in sets.items():
            within_DP = np.ma.masked_invalid([unique_within(one, order) for one in found])
            within_P[name] = within_DP.mean(axis=0)
            among_D = np.array([unique_among(one, order, most) for one in found])
            for kind, share_D in (("among", among_D), ("within", within_DP.mean(axis=1).data)):
                row.setdefault(name, {})[kind] = share_D.mean()
                row[name][f"{kind}_spread"] = share_D.std(ddof=1) if len(share_D) > 1 else None
        row["differences"] = {
            f"{one}-{other}": _mean_interval(recipe, within_P[one] - within_P[other], real)
            for one, other in (("joint", "base"), ("real", "joint"))
        }
        rows.append(row)
    return rows


def _mean_interval(recipe: Recipe, value_P: np.ma.MaskedArray, real: RealContinuations) -> Interval:
    there_P = ~np.ma.getmaskarray(value_P)
    if not there_P.any():
        return Interval(float("nan"), float("nan"))
    return bootstrap_mean(value_P.data[there_P], real.document_P[there_P], **resampling(recipe))


def _sets(rows: SampleRows) -> list[list[np.ndarray]]:
    """The d-th draws of all prefixes, for every d."""
    num_prefixes = int(rows.prefix_N.max()) + 1
    count = len(rows) // num_prefixes
    passages = [ids[:end] for ids, end in zip(rows.ids_NC, rows.length_N, strict=True)]
    return [passages[first::count] for first in range(count)]


def _densities(recipe: Recipe, real: RealContinuations, drawn: _Drawn) -> dict[str, Any]:
    """Under the base LM its own samples, under the joint model its own, each beside real text."""
    shape = drawn.joint_log_weight_PD.shape
    joint_PD = drawn.joint.lm_log_prob_N.reshape(shape) + drawn.joint_log_weight_PD
    normalised_PD = joint_PD - drawn.log_partition_P[:, None]
    real_joint_P = real.lm_log_prob_P + real.log_weight_P - drawn.log_partition_P
    base_PD = drawn.base.lm_log_prob_N.reshape(shape)
    pairs = {"base": (real.lm_log_prob_P, base_PD), "joint": (real_joint_P, normalised_PD)}
    return {
        name: log_prob_densities(real_P, sample_PD, real.document_P, **resampling(recipe))
        for name, (real_P, sample_PD) in pairs.items()
    }


def _detector(real: RealContinuations, log_weights: list[np.ndarray]) -> dict[str, Any]:
    real_P = energy_of(real.log_weight_P).numpy()
    sample_energies = [energy_of(values).numpy() for values in log_weights]
    sample_M = np.concatenate([values[:_DETECTED_SAMPLES] for values in sample_energies])
    curve = roc(real_P, sample_M)
    grid = np.linspace(0, 1, _CURVE_POINTS)
    axes = (curve.false_positive_K, curve.true_positive_K)
    kept = np.unique(np.concatenate([np.searchsorted(axis_K, grid) for axis_K in axes]))
    return {
        "accuracy": float(nce_accuracy(real_P, sample_M)),
        "auc": auc(real_P, sample_M),
        "calibration": calibration(real_P, sample_M),
        "roc": {
            "false_positive": curve.false_positive_K[kept],
            "true_positive": curve.true_positive_K[kept],
        },
        # The share of a prefix's proposals that look more real than the real continuation.
        "ranks": [
            rank_among(float(one), values)
            for one, values in zip(real_P, sample_energies, strict=True)
        ],
    }
