"""The joint model token by token on test prefixes (Figure 1; appendix A.1): what each position
gains, the last one checked by enumeration, and what becomes of tokens that repeat.

One file a prefix, so that hours of it survive a kill.

Shapes: P prefixes, C positions of the continuation, T tokens of a block.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from residual_ebm.config import PerStepConfig, Recipe
from residual_ebm.estimation.bootstrap import bootstrap_mean
from residual_ebm.estimation.importance import pareto_k_threshold
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.samples import pick_rows
from residual_ebm.files.storage import read_json, write_json
from residual_ebm.models.joint import JointModel
from residual_ebm.models.next_token import next_tokens
from residual_ebm.models.per_step import exact_last_link, step_chain
from residual_ebm.progress import Progress
from residual_ebm.randomness import derive_seed, generator
from residual_ebm.stages.evaluate import resampling
from residual_ebm.stages.proposals import evaluation_prefixes, some_prefixes

_NUM_CANDIDATES = 128
_MOST_COMPLETIONS = 100  # of each candidate
_NUM_SHOWN = 10
_REPEATED = 3  # tokens


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
                entry = _read(path, joint.energy_model.fingerprint)
                if entry is None:
                    block = int(block_P[number])
                    ids_T = torch.from_numpy(blocks.ids_BT[block, : blocks.length_B[block]])
                    seed = derive_seed(recipe.seed, what, number)
                    fingerprint = joint.energy_model.fingerprint
                    entry = {"energy_fingerprint": fingerprint, **make(ids_T, seed)}
                    write_json(path, entry)
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
        "diagnostics": _diagnostics(chains.entries),
        "last_step": _last_step(checked.entries),
        "repeats": _repeats(recipe, run_dir, joint, energy, config, folder, progress),
    }


def _read(path: Path, fingerprint: str) -> dict[str, Any] | None:
    """What was computed before, by the same energy."""
    if not path.exists():
        return None
    entry: dict[str, Any] = read_json(path, has="energy_fingerprint")
    return entry if entry["energy_fingerprint"] == fingerprint else None


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


def find_repeats(ids_T: np.ndarray, start: int) -> list[int]:
    """Places from `start` on that end three tokens which the text has said before."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for place in range(_REPEATED - 1, len(ids_T)):
        said = tuple(ids_T[place + 1 - _REPEATED : place + 1].tolist())
        if said in seen and place >= start:
            found.append(place)
        seen.add(said)
    return found


def _repeats(
    recipe: Recipe,
    run_dir: RunDirectory,
    joint: JointModel,
    energy: str,
    config: PerStepConfig,
    folder: Path,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Contexts in which a sample of P_LM repeats itself, chosen by seed, and both models' next
    tokens there."""
    if not config.num_repeats:
        return []
    proposals = run_dir.proposals(recipe.corrected_by(energy), "test")
    blocks, block_P = evaluation_prefixes(recipe, run_dir, "test")
    prefix_K = np.arange(len(block_P))
    rows = pick_rows(proposals, prefix_K, np.zeros_like(prefix_K))
    start = recipe.block.prefix_length
    prefix_PL = blocks.ids_BT[block_P, :start]
    contexts = [
        (prefix, place - start)
        for prefix, (ids_C, length) in enumerate(zip(rows.ids_NC, rows.length_N, strict=True))
        for place in find_repeats(np.concatenate([prefix_PL[prefix], ids_C[:length]]), start)
    ]
    order = generator(recipe.seed, "repeats").permutation(len(contexts))[: config.num_repeats]
    entries = []
    with progress.bar("repeats", len(order)) as bar:
        for prefix, place in (contexts[number] for number in order):
            path = folder / f"repeat-{prefix:05d}-{place:03d}.json"
            entry = _read(path, joint.energy_model.fingerprint)
            if entry is None:
                entry = _of_repeat(
                    joint,
                    torch.from_numpy(prefix_PL[prefix]),
                    torch.from_numpy(rows.ids_NC[prefix, : place + 1]),
                    min(config.num_samples, _MOST_COMPLETIONS),
                    derive_seed(recipe.seed, "repeat", prefix, place),
                )
                write_json(path, entry)
            entries.append(entry)
            bar.advance()
    return entries


def _of_repeat(
    joint: JointModel,
    prefix_ids: torch.Tensor,
    continued_ids: torch.Tensor,
    num_samples: int,
    seed: int,
) -> dict[str, Any]:
    *_, repeated = continued_ids.tolist()
    found = next_tokens(
        joint,
        prefix_ids,
        continued_ids[:-1],
        num_candidates=_NUM_CANDIDATES,
        num_samples=num_samples,
        seed=seed,
    )
    best = {
        "base": found.best_of_lm(_NUM_SHOWN),
        "joint": found.best_of_joint(_NUM_SHOWN),
    }
    everything = {
        "base": dict(found.best_of_lm(_NUM_CANDIDATES)),
        "joint": dict(found.best_of_joint(_NUM_CANDIDATES)),
    }
    return {
        "energy_fingerprint": joint.energy_model.fingerprint,
        "num_samples": num_samples,
        "context": joint.decode(torch.cat([prefix_ids, continued_ids[:-1]])),
        "repeated": joint.decode(torch.tensor([repeated])),
        # Among the candidates; None where the sampled token is not one of them.
        **{model: chances.get(repeated) for model, chances in everything.items()},
        **{
            f"best_{model}": [
                {
                    "token": joint.decode(torch.tensor([token])),
                    "is_repeated": token == repeated,
                    "probability": probability,
                }
                for token, probability in chosen
            ]
            for model, chosen in best.items()
        },
    }
