"""Proposals: continuations of validation and test prefixes, drawn once from P_LM.

Every energy rescores the same ones, so the rows of the table are paired.
"""

import functools
from pathlib import Path

import numpy as np

from residual_ebm.config import Recipe
from residual_ebm.files.blocks import Blocks, choose_blocks, read_blocks
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.storage import is_complete
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.progress import QUIET, Progress
from residual_ebm.stages.sampling import Drawing, draw_missing, note_missing_prefixes

SENTENCE = "Drawing proposals from {name}: what Z is estimated with and samples are chosen from"
SPLITS = ("validation", "test")
DEEP = "deep"  # a few of the test prefixes, with many more samples


def sampled_splits(recipe: Recipe) -> tuple[str, ...]:
    return SPLITS if recipe.proposals.deep is None else (*SPLITS, DEEP)


def samples_per_prefix(recipe: Recipe, split: str) -> int:
    deep = recipe.proposals.deep
    return deep.num_samples if split == DEEP and deep else recipe.proposals.num_samples


def evaluation_prefixes(
    recipe: Recipe, run_dir: RunDirectory, split: str, progress: Progress = QUIET
) -> tuple[Blocks, np.ndarray]:
    """The blocks of a split and the numbers of those evaluated: the same for every model."""
    config = recipe.proposals
    if split == DEEP:
        assert config.deep is not None
        blocks, block_P = evaluation_prefixes(recipe, run_dir, "test")
        number_P = some_prefixes(len(block_P), config.deep.num_prefixes, recipe, DEEP)
        return blocks, block_P[number_P]
    count = {
        "validation": config.num_validation_prefixes,
        "test": config.num_test_prefixes,
        "train": config.num_test_prefixes,
    }[split]
    blocks = read_blocks(run_dir.blocks / f"{split}.arrow")
    note_missing_prefixes(split, count, len(blocks), progress)
    return blocks, choose_blocks(len(blocks), count, recipe.seed, f"evaluation-{split}")


def some_prefixes(num_prefixes: int, count: int, recipe: Recipe, purpose: str) -> np.ndarray:
    """Numbers of a few of the evaluated prefixes. They are in the order of their documents, so the
    first ones would be of neighbours."""
    return choose_blocks(num_prefixes, count, recipe.seed, f"some-{purpose}")


def run(recipe: Recipe, run_dir: RunDirectory, progress: Progress = QUIET) -> None:
    drawing = Drawing(
        purpose="proposals",
        sentence=SENTENCE,
        splits=sampled_splits(recipe),
        prefixes=functools.partial(evaluation_prefixes, recipe, run_dir, progress=progress),
        num_samples=functools.partial(samples_per_prefix, recipe),
        sampling=recipe.proposals,
        folder=run_dir.proposals,
        heads=functools.partial(_heads, recipe, run_dir),
    )
    draw_missing(recipe, run_dir, drawing, progress)


def _heads(
    recipe: Recipe, run_dir: RunDirectory, language_model: LanguageModel, name: str, split: str
) -> dict[Path, EnergyModel]:
    """HeaT energies that are trained by now: scoring while drawing saves a second pass of P_LM."""
    return {
        run_dir.log_weights(config.name, split): EnergyModel.from_pretrained(
            run_dir.energy(config.name), language_model, precision=recipe.precision
        )
        for config in recipe.energies
        if config.kind == "heat"
        and recipe.language_model_of(config) == name
        and is_complete(run_dir.energy(config.name))
        and not is_complete(run_dir.log_weights(config.name, split))
    }
