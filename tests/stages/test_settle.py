"""`precision: auto` is settled once, and a run keeps what it began with."""

from pathlib import Path

import pytest

from residual_ebm.files.open_run import open_run
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages import settle
from residual_ebm.stages.settle import settle_recipe

AUTO = ["precision=auto", "energies.heat.training.precision=auto"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the machine is quick with; a test may change it."""
    quick = ["bfloat16"]
    monkeypatch.setattr(settle, "resolve_precision", lambda *_: quick[0])
    return quick


def test_auto_is_what_the_machine_is_quick_with(machine: list[str], tmp_path: Path) -> None:
    recipe = load_recipe("tiny", AUTO)
    settled = settle_recipe(recipe, tmp_path / "run")
    assert settled.precision == "bfloat16"
    assert settled.energies[2].training.precision == "bfloat16"
    assert settled.energies[0].training.precision == "float32"  # the recipe said so
    machine[0] = "float32"
    assert settle_recipe(recipe, tmp_path / "run").precision == "float32"


def test_a_run_keeps_its_precision_on_another_machine(machine: list[str], tmp_path: Path) -> None:
    recipe = load_recipe("tiny", AUTO)
    with open_run(tmp_path / "run", settle_recipe(recipe, tmp_path / "run")) as run_dir:
        (run_dir.path / "blocks").mkdir()
    machine[0] = "float32"
    again = settle_recipe(recipe, tmp_path / "run")
    assert again.precision == again.energies[2].training.precision == "bfloat16"
    with open_run(tmp_path / "run", again) as run_dir:
        assert run_dir.recipe() == again


def test_what_is_said_is_not_settled(machine: list[str], tmp_path: Path) -> None:
    del machine
    recipe = load_recipe("tiny", ["precision=float32"])
    assert settle_recipe(recipe, tmp_path / "run").precision == "float32"
