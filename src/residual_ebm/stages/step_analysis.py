"""The joint model token by token on test prefixes (Figure 1; appendix A.1): what each position
gains, and the last one checked by enumeration.

One file a prefix, so that hours of it survive a kill.

Shapes: P prefixes, C positions of the continuation, T tokens of a block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from residual_ebm.config import PerStepConfig, Recipe
from residual_ebm.estimation.bootstrap import bootstrap_mean
from residual_ebm.estimation.importance import pareto_k_threshold
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.models.joint import JointModel
from residual_ebm.models.per_step import exact_last_link, step_chain
from residual_ebm.progress import Progress
from residual_ebm.randomness import derive_seed
from residual_ebm.stages.evaluate import resampling
from residual_ebm.stages.kept_entries import read_entry, write_entry
from residual_ebm.stages.proposals import evaluation_prefixes, some_prefixes
from residual_ebm.stages.repeats import analyse_repeats

_ENDS = 10  # positions at either end of a continuation


class _Made(NamedTuple):
    entries: list[dict[str, Any]]  # one a prefix
    document_P: np.ndarray


def analyse_steps(
    recipe: Recipe, run_dir: RunDirectory, energy: str, config: PerStepConfig, progress: Progress
) -> dict[str, Any]:
    """Of some test prefixes, chosen by seed."""
    joint = JointModel.from_pretrained(run_dir.path, energy)
    folder = run_dir.per_step / energy
    blocks, block_P = evaluation_prefixes(recipe, run_dir, "test")

    def made(what: str, count: int, make: Callable[[torch.Tensor, int], dict[str, Any]]) -> _Made:
        """Of some prefixes, what was not made before."""
        chosen = some_prefixes(len(block_P), count, recipe, what)
        entries = []
        with progress.bar(what, len(chosen)) as bar:
            for number in chosen.tolist():
                path = folder / f"{what}-{number:05d}.json"
                entry = read_entry(path, joint, config.num_samples)
                if entry is None:
                    block = int(block_P[number])
                    ids_T = torch.from_numpy(blocks.ids_BT[block, : blocks.length_B[block]])
                    seed = derive_seed(recipe.seed, what, number)
                    entry = write_entry(path, joint, config.num_samples, make(ids_T, seed))
                entries.append(entry)
                bar.advance()
        return _Made(entries, blocks.document_B[block_P[chosen]])

    chains = made(
        "per-step",
        config.num_prefixes,
        lambda ids_T, seed: _of_block(joint, ids_T, config.num_samples, seed),
    )
    checked = made(
        "last-step",
        config.num_enumerated,
        lambda ids_T, seed: _checked(joint, ids_T, config.num_samples, seed),
    )
    return {
        "energy": energy,
        "num_prefixes": len(chains.entries),
        "num_samples": config.num_samples,
        "positions": _positions(chains, resampling(recipe)),
        "trend": _trend(chains, resampling(recipe)),
        "diagnostics": _diagnostics(chains.entries),
        "last_step": _last_step(checked.entries),
        "repeats": analyse_repeats(recipe, run_dir, joint, energy, config, progress),
    }


def _of_block(
    joint: JointModel, ids_T: torch.Tensor, num_samples: int, seed: int
) -> dict[str, Any]:
    chain = step_chain(joint, ids_T, num_samples, seed=seed)
    lower_C, upper_C = chain.log_prob_bounds()
    heavy_C = chain.pareto_k_C > pareto_k_threshold(num_samples)
    return {
        "lm_log_prob": chain.lm_log_prob_C.tolist(),
        "lower": lower_C.tolist(),
        "upper": upper_C.tolist(),
        "effective_sample_size": chain.effective_sample_size_C.tolist(),
        "past_pareto_k": heavy_C.tolist(),
    }


def _checked(joint: JointModel, ids_T: torch.Tensor, num_samples: int, seed: int) -> dict[str, Any]:
    """The last step of a block that fills the horizon, estimated and enumerated."""
    if len(ids_T) < joint.block.length:
        return {"exact": None}
    chain = step_chain(joint, ids_T, num_samples, seed=seed, num_steps=1)
    bounds = [float(bound_C[0]) for bound_C in chain.log_prob_bounds()]
    low, high = (float(bound_C[0]) for bound_C in chain.published())
    return {
        "exact": chain.last_step_from(exact_last_link(joint, ids_T)),
        "estimate": sum(bounds) / 2,
        "low": low,
        "high": high,
        "lm_log_prob": float(chain.lm_log_prob_C[0]),
    }


def _diagnostics(prefixes: list[dict[str, Any]]) -> dict[str, float]:
    """Of all estimated links of all chains."""
    effective = [value for entry in prefixes for value in entry["effective_sample_size"]]
    heavy = [value for entry in prefixes for value in entry["past_pareto_k"]]
    return {
        "effective_sample_size": float(np.mean(effective)),
        "least_effective_sample_size": float(np.min(effective)),
        "share_past_pareto_k": float(np.mean(heavy)),
    }


def _positions(chains: _Made, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Perplexity at each position under P_LM and, between bounds, under the joint model; the gain
    in nats of log-prob with its interval over documents, from the lower bound's to the upper's."""
    rows = []
    prefixes, document_P = chains
    for position in range(max(len(entry["lower"]) for entry in prefixes)):
        there = [len(entry["lower"]) > position for entry in prefixes]
        reaching = [entry for entry, is_there in zip(prefixes, there, strict=True) if is_there]
        means = {
            key: float(np.mean([entry[key][position] for entry in reaching]))
            for key in ("lm_log_prob", "lower", "upper")
        }
        intervals = [
            bootstrap_mean(
                [entry[side][position] - entry["lm_log_prob"][position] for entry in reaching],
                document_P[there],
                **options,
            )
            for side in ("lower", "upper")
        ]
        rows.append(
            {
                "position": position + 1,
                "num_prefixes": len(reaching),
                "base": float(np.exp(-means["lm_log_prob"])),
                "lower": float(np.exp(-means["upper"])),  # perplexities, so the other way round
                "upper": float(np.exp(-means["lower"])),
                "gain": (means["lower"] + means["upper"]) / 2 - means["lm_log_prob"],
                "gain_interval": {"low": intervals[0].low, "high": intervals[1].high},
            }
        )
    return rows


def _trend(chains: _Made, options: dict[str, Any]) -> dict[str, Any] | None:
    """Does the gain shrink from left to right? Mean gain of the first positions minus that of the
    last ones, in nats a token, of continuations that have both."""
    long = [len(entry["lower"]) >= 2 * _ENDS for entry in chains.entries]
    if not any(long):
        return None
    differences = []
    for entry in (one for one, is_long in zip(chains.entries, long, strict=True) if is_long):
        gain_C = (np.array(entry["lower"]) + np.array(entry["upper"])) / 2
        gain_C -= np.array(entry["lm_log_prob"])
        differences.append(float(gain_C[:_ENDS].mean() - gain_C[-_ENDS:].mean()))
    return {
        "num_positions": _ENDS,
        "num_prefixes": len(differences),
        "difference": float(np.mean(differences)),
        "interval": bootstrap_mean(differences, chains.document_P[long], **options),
    }


def _last_step(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The estimate at the last position beside the exact value."""
    whole = [entry for entry in entries if entry["exact"] is not None]
    if not whole:
        return None
    exact, estimate, low, high, base = (
        np.array([entry[key] for entry in whole])
        for key in ("exact", "estimate", "low", "high", "lm_log_prob")
    )
    error = estimate - exact
    return {
        "num_prefixes": len(whole),
        "inside": int(((low <= exact) & (exact <= high)).sum()),
        "mean_error": float(error.mean()),
        "standard_error": float(error.std(ddof=1) / np.sqrt(len(error)))
        if len(error) > 1
        else None,
        "median_width": float(np.median(high - low)),
        "exact_perplexity": float(np.exp(-exact.mean())),
        "estimated_perplexity": float(np.exp(-estimate.mean())),
        "base_perplexity": float(np.exp(-base.mean())),
    }
