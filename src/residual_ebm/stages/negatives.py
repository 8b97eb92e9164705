"""Negatives: continuations of training and validation prefixes, drawn once from P_LM.

With an `energy` split the prefixes come from documents the language model never saw: its residual
on text it has memorised is not its residual on new text.
"""

import functools

import numpy as np

from residual_ebm.config import EnergyConfig, HeadConfig, Recipe
from residual_ebm.files.blocks import Blocks, choose_blocks, read_blocks
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.states import WantedStates
from residual_ebm.files.storage import is_complete
from residual_ebm.models.kept_features import KeptFeatures
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.models.layer_states import union_of
from residual_ebm.progress import QUIET, Progress
from residual_ebm.stages.sampling import Drawing, draw_missing, note_missing_prefixes

SENTENCE = "Drawing negatives from {name}: what the energy learns to tell from real text"
SPLITS = ("train", "validation")


def source_split(run_dir: RunDirectory, split: str) -> str:
    """The split of documents that training or validation prefixes of energies come from."""
    has_energy = (run_dir.blocks / "energy.arrow").exists()
    return "energy" if split == "train" and has_energy else split


def run(recipe: Recipe, run_dir: RunDirectory, progress: Progress = QUIET) -> None:
    drawing = Drawing(
        purpose="negatives",
        sentence=SENTENCE,
        splits=SPLITS,
        prefixes=functools.partial(training_prefixes, recipe, run_dir, progress=progress),
        num_samples=lambda _split: recipe.negatives.samples_per_prefix,
        sampling=recipe.negatives,
        folder=run_dir.negatives,
        states=functools.partial(_states, recipe, run_dir),
        lacks_states=functools.partial(_lacks_states, recipe, run_dir),
    )
    draw_missing(recipe, run_dir, drawing, progress)


def training_prefixes(
    recipe: Recipe, run_dir: RunDirectory, split: str, progress: Progress = QUIET
) -> tuple[Blocks, np.ndarray]:
    """The blocks that energies learn from or are validated on, and the numbers of those chosen."""
    config = recipe.negatives
    count = {"train": config.num_prefixes, "validation": config.num_validation_prefixes}[split]
    blocks = read_blocks(run_dir.blocks / f"{source_split(run_dir, split)}.arrow")
    note_missing_prefixes(split, count, len(blocks), progress)
    return blocks, choose_blocks(len(blocks), count, recipe.seed, f"negatives-{split}")


def _states(
    recipe: Recipe,
    run_dir: RunDirectory,
    language_model: LanguageModel,
    name: str,
    split: str,
    num_prefixes: int,
) -> WantedStates | None:
    """HeaT learns from P_LM's states: keeping them as negatives are drawn saves reading every
    block once more. The real blocks are read beside their negatives, in one batch: states of the
    two classes must not differ in how they were rounded."""
    heads = [config.head or HeadConfig() for config in _heads_on(recipe, name)]
    layers = union_of([head.layers for head in heads])
    num_blocks = num_prefixes * (1 + recipe.negatives.samples_per_prefix)
    num_tokens = recipe.block.num_new_tokens
    # Samples of a prefix in several batches would not all be beside the real block.
    if not heads or recipe.negatives.samples_per_prefix > recipe.negatives.chunk_size:
        return None
    if not KeptFeatures.fit(language_model, num_blocks, num_tokens, len(layers)):
        return None
    return WantedStates(run_dir.states / name / split, layers)


def _lacks_states(recipe: Recipe, run_dir: RunDirectory, name: str, split: str) -> bool:
    """Whether a HeaT is to be trained, again perhaps, on states that are not there: they come back,
    and the same, with the same negatives."""
    untrained = [
        config for config in _heads_on(recipe, name) if not is_complete(run_dir.energy(config.name))
    ]
    return bool(untrained) and not is_complete(run_dir.states / name / split)


def _heads_on(recipe: Recipe, language_model: str) -> list[EnergyConfig]:
    """The HeaT energies that read this language model's states."""
    return [
        config
        for config in recipe.energies
        if config.kind == "heat" and recipe.language_model_of(config) == language_model
    ]
