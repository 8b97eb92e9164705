"""Examples of a run: for a few test prefixes, what each model would have said.

Prefixes are chosen by seed, never by hand.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from residual_ebm.config import Recipe
from residual_ebm.estimation.importance import effective_sample_size, resample
from residual_ebm.files.log_weights import REAL, read_log_weights, read_real
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.samples import pick_rows
from residual_ebm.models.loading import load_tokenizer
from residual_ebm.randomness import derive_seed, generator, uniform
from residual_ebm.stages.proposals import evaluation_prefixes


def choose_examples(recipe: Recipe, run_dir: RunDirectory, energy: str) -> list[dict[str, Any]]:
    """Prefix, base sample, joint sample, sample of the highest energy and the real text."""
    proposals = run_dir.proposals(recipe.corrected_by(energy), "test")
    tokenizer = load_tokenizer(str(run_dir.blocks / "tokenizer"), "tokenizer")
    blocks, block_P = evaluation_prefixes(recipe, run_dir, "test")
    folder = run_dir.log_weights(energy, "test")
    real = read_real(folder / REAL)
    count = min(recipe.evaluation.num_examples, len(block_P))
    chosen = generator(recipe.seed, "examples").permutation(len(block_P))[:count].tolist()
    log_weights = {
        prefix: values for prefix, values in read_log_weights(folder) if prefix in chosen
    }
    wanted = {prefix: _pick(recipe, prefix, log_weights[prefix]) for prefix in chosen}
    texts = _continuations(proposals, wanted, tokenizer)

    examples = []
    for prefix in chosen:
        ids = blocks.ids_BT[block_P[prefix]]
        start, end = recipe.block.prefix_length, blocks.length_B[block_P[prefix]]
        log_weight_N = torch.from_numpy(log_weights[prefix])
        samples = {
            role: {"text": texts[prefix, sample], "energy": float(-log_weight_N[sample])}
            for role, sample in wanted[prefix].items()
        }
        examples.append(
            {
                "block": int(block_P[prefix]),
                "prefix": tokenizer.decode(ids[:start]),
                **samples,
                "real": {
                    "text": tokenizer.decode(ids[start:end]),
                    "energy": float(-real.log_weight_P[prefix]),
                },
                "effective_sample_size": float(effective_sample_size(log_weight_N)),
            }
        )
    return examples


def _pick(recipe: Recipe, prefix: int, log_weight_N: np.ndarray) -> dict[str, int]:
    draw = uniform(derive_seed(recipe.seed, "example_draw"), prefix, 0, 0, 1)
    joint = resample(torch.from_numpy(log_weight_N), torch.from_numpy(draw))
    return {"base": 0, "joint": int(joint[0]), "highest_energy": int(log_weight_N.argmin())}


def _continuations(
    proposals: Path, wanted: dict[int, dict[str, int]], tokenizer: PreTrainedTokenizerFast
) -> dict[tuple[int, int], str]:
    """Texts of the wanted (prefix, sample) pairs."""
    pairs = [(prefix, sample) for prefix, roles in wanted.items() for sample in roles.values()]
    rows = pick_rows(proposals, *np.array(pairs, dtype=np.int64).reshape(-1, 2).T)
    return {
        pair: str(tokenizer.decode(ids_C[:length]))
        for pair, ids_C, length in zip(pairs, rows.ids_NC, rows.length_N, strict=True)
    }
