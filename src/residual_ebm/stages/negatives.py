"""Negatives: continuations of training and validation prefixes, drawn once from P_LM.

With an `energy` split the prefixes come from documents the language model never saw: its residual
on text it has memorised is not its residual on new text (trap 6).
"""

from residual_ebm.config import Recipe
from residual_ebm.files.blocks import choose_blocks, read_blocks
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.storage import check_manifest, is_complete
from residual_ebm.models.device import use_recipe_threads
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.progress import QUIET, Progress
from residual_ebm.randomness import derive_seed
from residual_ebm.stages.sampling import draw_samples

SENTENCE = "Drawing negatives from {name}: what the energy learns to tell from real text"


def source_split(recipe: Recipe, split: str) -> str:
    """The split of documents that training or validation prefixes of energies come from."""
    return "energy" if split == "train" and recipe.corpus.split.energy > 0 else split


def run(recipe: Recipe, run_dir: RunDirectory, progress: Progress = QUIET) -> None:
    use_recipe_threads(recipe)
    config = recipe.negatives
    counts = {"train": config.num_prefixes, "validation": config.num_validation_prefixes}
    for name in recipe.sampled_language_models:
        wanted = [split for split in counts if not is_complete(run_dir.negatives(name, split))]
        if not wanted:
            continue
        progress.stage(SENTENCE.format(name=name))
        check_manifest(run_dir.blocks)
        language_model = LanguageModel.from_pretrained(
            run_dir.language_model(name), precision=recipe.precision, device=recipe.device
        )
        for split in wanted:
            blocks = read_blocks(run_dir.blocks / f"{source_split(recipe, split)}.arrow")
            if len(blocks) < counts[split]:
                progress.note(f"{split}: {counts[split]} prefixes wanted, {len(blocks)} there are")
            draw_samples(
                language_model,
                blocks,
                choose_blocks(len(blocks), counts[split], recipe.seed, f"negatives-{split}"),
                config.samples_per_prefix,
                block=recipe.block,
                sampling=config,
                folder=run_dir.negatives(name, split),
                seed=derive_seed(recipe.seed, "negatives", name, split),
                progress=progress,
                label=f"negatives, {split}",
            )
