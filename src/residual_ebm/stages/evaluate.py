"""The table: perplexity of every language model and every joint model on the same prefixes.

Language models are exact; joint models get an interval with diagnostics (section 3.2). Nothing is
fitted on the test split: the energy scale of the second row of each energy, the weights of sums and
the choice of the best energy are made on validation.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar

import residual_ebm
from residual_ebm.config import SCRATCH, EnergyConfig, Recipe, SumConfig
from residual_ebm.errors import UserError
from residual_ebm.estimation.bootstrap import perplexity
from residual_ebm.estimation.comparison import Comparison, ModelLogProbs, compare_models
from residual_ebm.estimation.flags import flags
from residual_ebm.estimation.partition import log_partition_bounds
from residual_ebm.estimation.perplexity import (
    LogPartition,
    Prefixes,
    PrefixSummary,
    base_perplexity,
    joint_log_prob,
    joint_perplexity,
    log_partition_at,
    summarise_prefix,
)
from residual_ebm.files.log_weights import REAL, RealContinuations, read_log_weights, read_real
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.source_commit import source_commit
from residual_ebm.files.storage import check_manifest, read_json, write_json
from residual_ebm.files.versions import versions
from residual_ebm.models.device import use_recipe_threads
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.energy_sum import EnergySum, load_energy
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.progress import QUIET, Progress
from residual_ebm.randomness import derive_seed
from residual_ebm.stages.examples import choose_examples
from residual_ebm.stages.proposals import SPLITS, evaluation_prefixes, sampled_splits
from residual_ebm.stages.score_proposals import real_log_prob, score_proposals
from residual_ebm.stages.sum_energies import add_log_weights

SENTENCE = "Evaluating: perplexity of every model on the same prefixes"
_LARGEST_SCALE = 4.0


def run(recipe: Recipe, run_dir: RunDirectory, progress: Progress = QUIET) -> None:
    if run_dir.has_results():
        return
    use_recipe_threads(recipe)
    progress.stage(SENTENCE)
    check_manifest(run_dir.blocks)
    language_models, exact = [], []
    for model in recipe.language_models:
        row, log_prob_P = _language_model_row(recipe, model.name, run_dir)
        language_models.append(row)
        exact.append(ModelLogProbs(model.name, log_prob_P, log_prob_P))
    parameters = {row["name"]: row["parameters"] for row in language_models}
    rows: list[dict[str, Any]] = []
    for config in recipe.corrections:
        rows.extend(_energy_rows(recipe, config, run_dir, parameters, progress))
    plain = [row for row in rows if not row["scaled"]]
    best = _best(plain)
    results = {
        "recipe": recipe.name,
        "reference": recipe.reference,
        "corpus": recipe.corpus.path,
        "version": residual_ebm.__version__,
        "commit": source_commit(),
        "versions": versions(),
        "seed": recipe.seed,
        "continuation": recipe.block.continuation,
        "prefix_length": recipe.block.prefix_length,
        "block_length": recipe.block.length,
        "num_samples": recipe.proposals.num_samples,
        "num_prefixes": {
            split: len(evaluation_prefixes(recipe, run_dir, split)[1])
            for split in sampled_splits(recipe)
        },
        "pretrained": _pretrained(recipe),
        "language_models": language_models,
        "encoders": [
            {"name": name, "training": read_json(run_dir.encoder(name) / "training.json")}
            for name in (encoder.name for encoder in recipe.encoders)
        ],
        "floor": {split: _floor(recipe, run_dir, split) for split in SPLITS},
        "joint_models": rows,
        "comparisons": _comparisons(recipe, run_dir, exact, plain),
        "best_energy": best,
        "examples": choose_examples(recipe, run_dir, best) if best else [],
        "resolved_recipe": recipe.model_dump(mode="json"),
        "growth": run_dir.read_growth(),
    }
    run_dir.analysis.unlink(missing_ok=True)  # of results that are made anew
    write_json(run_dir.results, plain_numbers(results))


def _best(rows: Sequence[dict[str, Any]]) -> str | None:
    """The energy with the lowest upper perplexity on validation, among those without flags there
    if there are any: too few samples flatter, and the heaviest weights most."""
    sound = [row for row in rows if not row["validation"]["flags"]]
    chosen = min(sound or rows, key=lambda row: row["validation"]["upper"], default=None)
    return None if chosen is None else str(chosen["energy"])


def _pretrained(recipe: Recipe) -> list[str]:
    """Models that were trained elsewhere, perhaps on the evaluated text itself."""
    sources = [model.source for model in recipe.language_models if model.source != SCRATCH]
    sources += [str(energy.source) for energy in recipe.energies if energy.is_pretrained]
    return list(dict.fromkeys(sources))


def resampling(recipe: Recipe) -> dict[str, Any]:
    return {
        "num_resamples": recipe.evaluation.bootstrap_resamples,
        "seed": derive_seed(recipe.seed, "evaluation"),
    }


def _comparisons(
    recipe: Recipe,
    run_dir: RunDirectory,
    exact: Sequence[ModelLogProbs],
    joint_rows: Sequence[dict[str, Any]],
) -> list[Comparison]:
    """Every row of the test split with every row above it; scaled energies apart."""
    models = list(exact)
    for row in joint_rows:
        real, log_weights = read_scored(run_dir, row["energy"], "test")
        log_partitions = log_partitions_at(real, log_weights, len(log_weights[0]))
        estimates = joint_log_prob(real.lm_log_prob_P, real.log_weight_P, log_partitions)
        models.append(ModelLogProbs(row["name"], *estimates))
    blocks, block_P = evaluation_prefixes(recipe, run_dir, "test")
    part = blocks.select(block_P)
    num_tokens_P = part.length_B - recipe.block.prefix_length
    return compare_models(models, num_tokens_P, part.document_B, **resampling(recipe))


def _language_model_row(
    recipe: Recipe, name: str, run_dir: RunDirectory
) -> tuple[dict[str, Any], np.ndarray]:
    """The row, and the log-probs of the test prefixes' continuations."""
    language_model = LanguageModel.from_pretrained(
        run_dir.language_model(name), precision=recipe.precision, device=recipe.device
    )
    row: dict[str, Any] = {"name": name, "parameters": language_model.num_parameters}
    log_prob_P = {}
    # Train beside test: the gap between them is what the LM has memorised.
    for split in ("train", *SPLITS):
        blocks, block_P = evaluation_prefixes(recipe, run_dir, split)
        part = blocks.select(block_P)
        prefixes = Prefixes(
            real_log_prob(
                language_model, part, recipe.block.prefix_length, recipe.evaluation.batch_size
            ),
            part.length_B - recipe.block.prefix_length,
            part.document_B,
        )
        row[split] = asdict(base_perplexity(prefixes, **resampling(recipe)))
        log_prob_P[split] = prefixes.lm_log_prob_P
    row["training"] = read_json(run_dir.language_model(name) / "training.json")
    return row, log_prob_P["test"]


def _floor(recipe: Recipe, run_dir: RunDirectory, split: str) -> dict[str, Any] | None:
    """The perplexity of the true distribution, where the corpus is a grammar."""
    blocks, block_P = evaluation_prefixes(recipe, run_dir, split)
    part = blocks.select(block_P)
    if np.isnan(part.true_log_prob_B).any():
        return None
    prefixes = Prefixes(
        part.true_log_prob_B, part.length_B - recipe.block.prefix_length, part.document_B
    )
    return asdict(base_perplexity(prefixes, **resampling(recipe)))


def _energy_rows(
    recipe: Recipe,
    config: EnergyConfig | SumConfig,
    run_dir: RunDirectory,
    parameters: dict[str, int],
    progress: Progress,
) -> list[dict[str, Any]]:
    name = recipe.corrected_by(config.name)
    language_model = LanguageModel.from_pretrained(
        run_dir.language_model(name), precision=recipe.precision, device=recipe.device
    )
    energy = load_energy(run_dir.energy(config.name), language_model, precision=recipe.precision)
    splits = sampled_splits(recipe)
    for split in splits:
        if isinstance(config, SumConfig):
            assert isinstance(energy, EnergySum)
            add_log_weights(config, run_dir, split, energy)
        else:
            assert isinstance(energy, EnergyModel)
            score_proposals(recipe, config, run_dir, split, language_model, energy, progress)
    scales = {False: 1.0}
    if recipe.evaluation.fit_energy_scale:
        as_trained = _joint_row(recipe, run_dir, config.name, "validation", 1.0)
        # Scaling up flagged weights would lower the estimate by flattering it further.
        largest = 1.0 if as_trained["flags"] else _LARGEST_SCALE
        fitted = _fit_scale(*read_scored(run_dir, config.name, "validation"), largest)
        if round(fitted, 2) != 1:  # as named: the same row again would say nothing
            scales[True] = fitted
    training = read_json(run_dir.energy(config.name) / "training.json")
    return [
        {
            "name": f"joint {config.name}" + (f" x{scale:.2f}" if scaled else ""),
            "energy": config.name,
            "kind": energy.info.kind,
            "language_model": name,
            "scale": scale,
            "scaled": scaled,
            "parameters": parameters[name] + energy.num_parameters,
            "energy_parameters": energy.num_parameters,
            "training": training,
            **{split: _joint_row(recipe, run_dir, config.name, split, scale) for split in splits},
        }
        for scaled, scale in scales.items()
    ]


def read_scored(
    run_dir: RunDirectory, energy: str, split: str
) -> tuple[RealContinuations, list[np.ndarray]]:
    """Real continuations and the proposals' log-weights, prefix by prefix."""
    folder = run_dir.log_weights(energy, split)
    check_manifest(folder)
    log_weights = [log_weight_N for _, log_weight_N in read_log_weights(folder)]
    return read_real(folder / REAL), log_weights


def prefixes_of(real: RealContinuations) -> Prefixes:
    return Prefixes(real.lm_log_prob_P, real.num_tokens_P, real.document_P)


def log_partitions_at(
    real: RealContinuations, log_weights: Sequence[np.ndarray], num_samples: int
) -> list[LogPartition]:
    return [
        log_partition_at(log_weight_N, float(log_weight), num_samples)
        for log_weight_N, log_weight in zip(log_weights, real.log_weight_P, strict=True)
    ]


def _summarise(
    real: RealContinuations, log_weights: Sequence[np.ndarray], scale: float
) -> list[PrefixSummary]:
    """Scaling the energy by alpha scales every log-weight, so nothing has to be scored again."""
    return [
        summarise_prefix(torch.from_numpy(scale * log_weight_N), scale * float(log_weight))
        for log_weight_N, log_weight in zip(log_weights, real.log_weight_P, strict=True)
    ]


def _joint_row(
    recipe: Recipe, run_dir: RunDirectory, energy: str, split: str, scale: float
) -> dict[str, Any]:
    real, log_weights = read_scored(run_dir, energy, split)
    summaries = _summarise(real, log_weights, scale)
    joint = joint_perplexity(prefixes_of(real), summaries, **resampling(recipe))
    base = perplexity(real.lm_log_prob_P, real.num_tokens_P)
    found = flags(joint, base)
    if scale > 0.99 * _LARGEST_SCALE:
        found.append(f"scale at its limit of {_LARGEST_SCALE:g}: the energy is far from trained")
    return {**asdict(joint), "flags": found}


def _fit_scale(real: RealContinuations, log_weights: Sequence[np.ndarray], largest: float) -> float:
    """The scale of the energy with the lowest upper perplexity on validation."""

    def upper_perplexity(scale: float) -> float:
        upper_P = [float(log_partition_bounds(scale * values).upper) for values in log_weights]
        log_prob_P = real.lm_log_prob_P + scale * real.log_weight_P - upper_P
        return perplexity(log_prob_P, real.num_tokens_P)

    found = minimize_scalar(
        upper_perplexity, bounds=(0.0, largest), method="bounded", options={"xatol": 1e-3}
    )
    return round(float(found.x), 3)


def plain_numbers(value: Any) -> Any:
    """What JSON can hold: no NaN, no infinity, no NumPy types, named tuples as objects."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain_numbers(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain_numbers(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return plain_numbers(value._asdict())
    if isinstance(value, np.ndarray):
        return plain_numbers(value.tolist())
    if isinstance(value, list | tuple):
        return [plain_numbers(item) for item in value]
    if isinstance(value, np.generic):
        return plain_numbers(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise UserError("results", type(value).__name__, "cannot be written as JSON")
