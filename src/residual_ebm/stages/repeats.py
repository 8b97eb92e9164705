"""Where samples of P_LM repeat themselves, and what the joint model makes of it (appendix A.1).

Shapes: P prefixes, N rows (samples of all prefixes), T tokens of a block, C of a continuation, L of
a prefix.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from residual_ebm.config import PerStepConfig, Recipe
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.samples import pick_rows
from residual_ebm.models.joint import JointModel
from residual_ebm.models.next_token import next_tokens
from residual_ebm.progress import Progress
from residual_ebm.randomness import derive_seed, generator
from residual_ebm.stages.kept_entries import read_entry, write_entry
from residual_ebm.stages.proposals import evaluation_prefixes

_NUM_CANDIDATES = 128
_MOST_COMPLETIONS = 100  # of each candidate
_NUM_SHOWN = 10
_REPEATED = 3  # tokens
_SEARCHED = 16  # samples of a prefix


class Places(NamedTuple):
    """Of a text, from some place on."""

    repeated: list[int]  # that end three tokens which the text has said before
    new: list[int]  # that end three tokens which it has not


def find_repeats(ids_T: np.ndarray, start: int, is_word: Callable[[int], bool]) -> Places:
    """Places from `start` on that end three tokens of words. Line breaks and punctuation repeat in
    any text, and say nothing of a model."""
    seen: set[tuple[int, ...]] = set()
    found = Places([], [])
    for place in range(_REPEATED - 1, len(ids_T)):
        said = tuple(ids_T[place + 1 - _REPEATED : place + 1].tolist())
        if place >= start and all(map(is_word, said)):
            (found.repeated if said in seen else found.new).append(place)
        seen.add(said)
    return found


def analyse_repeats(
    recipe: Recipe,
    run_dir: RunDirectory,
    joint: JointModel,
    energy: str,
    config: PerStepConfig,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Contexts in which a sample of P_LM repeats itself, and as many in which it does not, chosen
    by seed, and both models' next tokens there. Every sampled token is one that P_LM favoured, so
    the joint model finds it less likely on average wherever it stands: only beside tokens that do
    not repeat does it show what becomes of those that do."""
    if not config.num_repeats:
        return []
    folder = run_dir.per_step / energy
    proposals = run_dir.proposals(recipe.corrected_by(energy), "test")
    blocks, block_P = evaluation_prefixes(recipe, run_dir, "test")
    num_searched = min(_SEARCHED, recipe.proposals.num_samples)
    prefix_N = np.repeat(np.arange(len(block_P)), num_searched)
    rows = pick_rows(proposals, prefix_N, np.tile(np.arange(num_searched), len(block_P)))
    start = recipe.block.prefix_length
    prefix_PL = blocks.ids_BT[block_P, :start]

    @functools.cache
    def is_word(token: int) -> bool:
        return any(map(str.isalnum, joint.decode(torch.tensor([token]))))

    repeated: list[tuple[int, int]] = []
    new: list[tuple[int, int]] = []
    for row, (ids_C, length) in enumerate(zip(rows.ids_NC, rows.length_N, strict=True)):
        ids_T = np.concatenate([prefix_PL[prefix_N[row]], ids_C[:length]])
        places = find_repeats(ids_T, start, is_word)
        repeated += [(row, place - start) for place in places.repeated]
        new += [(row, place - start) for place in places.new]
    draw = generator(recipe.seed, "repeats")
    count = min(config.num_repeats, len(repeated), len(new))
    contexts = [
        (is_repeat, among[number])
        for is_repeat, among in ((True, repeated), (False, new))
        for number in draw.permutation(len(among))[:count]
    ]
    num_samples = min(config.num_samples, _MOST_COMPLETIONS)
    entries = []
    with progress.bar("repeats", len(contexts)) as bar:
        for is_repeat, (row, place) in contexts:
            path = folder / f"repeat-{row:05d}-{place:03d}.json"
            entry = read_entry(path, joint, num_samples)
            if entry is None:
                made = _of_repeat(
                    joint,
                    torch.from_numpy(prefix_PL[prefix_N[row]]),
                    torch.from_numpy(rows.ids_NC[row, : place + 1]),
                    num_samples,
                    derive_seed(recipe.seed, "repeat", row, place),
                )
                entry = write_entry(path, joint, num_samples, {"is_repeat": is_repeat, **made})
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
    *_, sampled = continued_ids.tolist()
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
        "context": joint.decode(torch.cat([prefix_ids, continued_ids[:-1]])),
        "sampled": joint.decode(torch.tensor([sampled])),
        # Among the candidates; None where the sampled token is not one of them.
        **{model: chances.get(sampled) for model, chances in everything.items()},
        **{
            f"best_{model}": [
                {
                    "token": joint.decode(torch.tensor([token])),
                    "is_sampled": token == sampled,
                    "probability": probability,
                }
                for token, probability in chosen
            ]
            for model, chosen in best.items()
        },
    }
