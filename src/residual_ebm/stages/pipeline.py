"""Every stage of a recipe in order, skipping what is already done."""

from collections.abc import Callable
from typing import Any

from residual_ebm.config import Recipe
from residual_ebm.files.run_directory import RunDirectory, resume_folder
from residual_ebm.files.storage import is_complete, read_json
from residual_ebm.progress import QUIET, Progress
from residual_ebm.stages import (
    analyze,
    evaluate,
    negatives,
    prepare,
    proposals,
    train_encoder,
    train_energy,
    train_lm,
)
from residual_ebm.stages.fetch_assets import fetch_assets

Stage = Callable[[Recipe, RunDirectory, Progress], None]

STAGES: dict[str, Stage] = {
    "prepare": prepare.run,
    "train-lm": train_lm.run,
    "train-encoder": train_encoder.run,
    "negatives": negatives.run,
    "train-energy": train_energy.run,
    "proposals": proposals.run,
    "evaluate": evaluate.run,
    "analyze": analyze.run,
}


def run_all(recipe: Recipe, run_dir: RunDirectory, progress: Progress = QUIET) -> dict[str, Any]:
    """Run what is missing and return the results."""
    fetch_assets(recipe, run_dir, progress)
    for name, stage in STAGES.items():
        with run_dir.timed(name):
            stage(recipe, run_dir, progress)
        if name == "prepare":
            train_encoder.check_tokenizers(recipe, run_dir)
            train_energy.check_pretrained(recipe, run_dir)
    results: dict[str, Any] = read_json(run_dir.results)
    return results


def progress_of(recipe: Recipe, run_dir: RunDirectory) -> list[dict[str, str]]:
    """Each thing the recipe makes, and whether it is done, begun or missing."""
    folders = [("blocks", run_dir.blocks)]
    for model in recipe.language_models:
        folders.append((f"language model {model.name}", run_dir.language_model(model.name)))
    for encoder in recipe.encoders:
        folders.append((f"encoder {encoder.name}", run_dir.encoder(encoder.name)))
    for name in recipe.sampled_language_models:
        for split in negatives.SPLITS:
            folders.append((f"negatives of {name}, {split}", run_dir.negatives(name, split)))
    for energy in recipe.corrections:
        folders.append((f"energy {energy.name}", run_dir.energy(energy.name)))
    for name in recipe.sampled_language_models:
        for split in proposals.sampled_splits(recipe):
            folders.append((f"proposals of {name}, {split}", run_dir.proposals(name, split)))
    for energy in recipe.corrections:
        for split in proposals.sampled_splits(recipe):
            folders.append(
                (f"log-weights of {energy.name}, {split}", run_dir.log_weights(energy.name, split))
            )
    states = []
    for what, folder in folders:
        begun = folder.exists() or resume_folder(folder).exists()
        state = "done" if is_complete(folder) else "begun" if begun else "missing"
        states.append({"what": what, "state": state})
    has_results = run_dir.has_results()
    has_analysis = has_results and run_dir.read_analysis() is not None
    made = {"results": has_results, "analysis": has_analysis}
    for what, done in made.items():
        states.append({"what": what, "state": "done" if done else "missing"})
    return states
