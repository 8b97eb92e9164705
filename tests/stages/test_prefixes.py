"""How many prefixes are used, and that it is told when a split has fewer than were asked for."""

from pathlib import Path

import pytest

from residual_ebm.files.open_run import open_run
from residual_ebm.progress import Progress
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages import prepare
from residual_ebm.stages.negatives import training_prefixes
from residual_ebm.stages.proposals import evaluation_prefixes


class Notes(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize(
    ("choose", "field", "split"),
    [
        (training_prefixes, "negatives.num_prefixes", "train"),
        (training_prefixes, "negatives.num_validation_prefixes", "validation"),
        (evaluation_prefixes, "proposals.num_validation_prefixes", "validation"),
        (evaluation_prefixes, "proposals.num_test_prefixes", "test"),
    ],
)
def test_fewer_prefixes_than_asked_for_are_told(
    tmp_path: Path, choose: object, field: str, split: str
) -> None:
    assert callable(choose)
    recipe = load_recipe("tiny", ["corpus.num_generated=60", f"{field}=5000"])
    with open_run(tmp_path / "run", recipe) as run_dir:
        prepare.run(recipe, run_dir)
        progress = Notes()
        blocks, block_P = choose(recipe, run_dir, split, progress=progress)
    assert sorted(block_P) == list(range(len(blocks)))
    assert progress.notes == [f"{split}: 5000 prefixes wanted, {len(blocks)} there are"]
