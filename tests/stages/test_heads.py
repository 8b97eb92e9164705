"""HeaT's log-weights, written while proposals are drawn, are those of scoring the files again."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from residual_ebm.errors import UserError
from residual_ebm.files.log_weights import read_log_weights
from residual_ebm.files.open_run import open_run
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages import evaluate


def test_drawn_scores_equal_scores_from_files(tiny_copy: Path) -> None:
    recipe = load_recipe(str(tiny_copy / "recipe.yaml"))
    folders = {
        split: tiny_copy / "log_weights" / "heat" / split for split in ("validation", "test")
    }
    drawn = {split: list(read_log_weights(folder)) for split, folder in folders.items()}
    shutil.rmtree(tiny_copy / "log_weights" / "heat")
    (tiny_copy / "results.json").unlink()
    with open_run(tiny_copy, recipe) as run_dir:
        evaluate.run(recipe, run_dir)
    for split, folder in folders.items():
        again = list(read_log_weights(folder))
        assert [prefix for prefix, _ in again] == [prefix for prefix, _ in drawn[split]]
        for (_, first_N), (_, second_N) in zip(drawn[split], again, strict=True):
            assert first_N.std() > 0
            np.testing.assert_allclose(first_N, second_N, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("energy", ["unit", "heat"])
def test_log_weights_of_an_energy_that_changed_are_refused(tiny_copy: Path, energy: str) -> None:
    """An energy that was deleted and trained again: its old log-weights say nothing of it."""
    recipe = load_recipe(str(tiny_copy / "recipe.yaml"))
    folder = tiny_copy / "energies" / energy
    with open_run(tiny_copy, recipe) as run_dir:
        language_model = LanguageModel.from_pretrained(run_dir.language_model("base"))
        changed = EnergyModel.from_pretrained(folder, language_model)
        with torch.no_grad():
            next(changed.network.parameters()).add_(0.1)
        shutil.rmtree(folder)
        changed.save_pretrained(folder)
        run_dir.results.unlink()
        with pytest.raises(UserError, match=f"log_weights/{energy}.* are of another energy"):
            evaluate.run(recipe, run_dir)
    assert not (tiny_copy / "results.json").exists()
