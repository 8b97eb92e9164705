"""HeaT's log-weights, written while proposals are drawn, are those of scoring the files again."""

import shutil
from pathlib import Path

import numpy as np

from residual_ebm.files.log_weights import read_log_weights
from residual_ebm.files.run_directory import open_run
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
