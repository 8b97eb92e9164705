"""Before the first stage: every asset that a recipe names and the run still needs.

A download in the middle of a run would surprise, and a machine that loses its network would find
out hours later.
"""

from residual_ebm.assets.resolve import SCHEME, find_asset, get_asset, in_cache
from residual_ebm.config import Recipe
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.storage import is_complete
from residual_ebm.progress import QUIET, Progress

SENTENCE = "Fetching {summary}: the network is needed this once"


def fetch_assets(recipe: Recipe, run_dir: RunDirectory, progress: Progress = QUIET) -> None:
    named = [
        find_asset(source, field, "corpus" if field == "corpus.path" else "model")
        for field, source in needed_assets(recipe, run_dir).items()
    ]
    for asset in named:
        if not in_cache(asset):
            progress.stage(SENTENCE.format(summary=asset.summary))
        get_asset(asset.name, progress)


def needed_assets(recipe: Recipe, run_dir: RunDirectory) -> dict[str, str]:
    """The fields of the recipe that name an asset, of what the run has not made yet."""
    sources = [
        ("corpus.path", recipe.corpus.path, run_dir.blocks),
        ("tokenizer.source", recipe.tokenizer.source, run_dir.blocks),
    ]
    for model in recipe.language_models:
        folder = run_dir.language_model(model.name)
        sources.append((f"language_models.{model.name}.source", model.source, folder))
    for encoder in recipe.encoders:
        if encoder.tokenizer is not None:
            field = f"encoders.{encoder.name}.tokenizer.source"
            sources.append((field, encoder.tokenizer.source, run_dir.encoder(encoder.name)))
    for energy in recipe.energies:
        folder = run_dir.energy(energy.name)
        sources.append((f"energies.{energy.name}.source", energy.source or "", folder))
    return {
        field: source
        for field, source, folder in sources
        if source.startswith(SCHEME) and not is_complete(folder)
    }
