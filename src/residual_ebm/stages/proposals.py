"""Proposals: continuations of validation and test prefixes, drawn once from P_LM.

Every energy rescores the same ones, so the rows of the table are paired.
"""

import numpy as np

from residual_ebm.config import Recipe
from residual_ebm.files.blocks import Blocks, choose_blocks, read_blocks
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.storage import check_manifest, is_complete
from residual_ebm.models.device import use_recipe_threads
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.progress import QUIET, Progress
from residual_ebm.randomness import derive_seed
from residual_ebm.stages.sampling import draw_samples

SENTENCE = "Drawing proposals from {name}: what Z is estimated with and samples are chosen from"
SPLITS = ("validation", "test")


def evaluation_prefixes(
    recipe: Recipe, run_dir: RunDirectory, split: str
) -> tuple[Blocks, np.ndarray]:
    """The blocks of a split and the numbers of those evaluated: the same for every model."""
    config = recipe.proposals
    count = {
        "validation": config.num_validation_prefixes,
        "test": config.num_test_prefixes,
        "train": config.num_test_prefixes,
    }[split]
    blocks = read_blocks(run_dir.blocks / f"{split}.arrow")
    return blocks, choose_blocks(len(blocks), count, recipe.seed, f"evaluation-{split}")


def run(recipe: Recipe, run_dir: RunDirectory, progress: Progress = QUIET) -> None:
    use_recipe_threads(recipe)
    for name in recipe.sampled_language_models:
        wanted = [split for split in SPLITS if not is_complete(run_dir.proposals(name, split))]
        if not wanted:
            continue
        progress.stage(SENTENCE.format(name=name))
        check_manifest(run_dir.blocks)
        language_model = LanguageModel.from_pretrained(
            run_dir.language_model(name), precision=recipe.precision, device=recipe.device
        )
        for split in wanted:
            blocks, block_P = evaluation_prefixes(recipe, run_dir, split)
            draw_samples(
                language_model,
                blocks,
                block_P,
                recipe.proposals.num_samples,
                block=recipe.block,
                sampling=recipe.proposals,
                folder=run_dir.proposals(name, split),
                seed=derive_seed(recipe.seed, "proposals", name, split),
                progress=progress,
                label=f"proposals, {split}",
            )
