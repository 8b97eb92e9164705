"""What evaluation chooses, and that flags have a say in it."""

from pathlib import Path
from typing import Any

import pytest

from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.models.energy import EnergyModel
from residual_ebm.stages import evaluate


def row(energy: str, upper: float, *flags: str) -> dict[str, Any]:
    return {"energy": energy, "validation": {"upper": upper, "flags": list(flags)}}


def test_the_best_energy_is_the_lowest_whose_estimate_is_sound() -> None:
    heavy, sound, better = row("heavy", 1.0, "heavy weights: ..."), row("a", 3.0), row("b", 2.0)
    assert evaluate._best([heavy, sound, better]) == "b"
    assert evaluate._best([heavy, row("other", 1.5, "wide: ...")]) == "heavy"
    assert evaluate._best([]) is None


def test_flagged_weights_are_not_scaled_up(
    tiny_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDirectory(tiny_copy)
    recipe = run_dir.recipe()

    def scales() -> list[float]:
        return [row["scale"] for row in run_dir.read_results()["joint_models"] if row["scaled"]]

    for found, is_scaled_up in (([], True), (["wide: of every row"], False)):
        run_dir.results.unlink()
        monkeypatch.setattr(evaluate, "flags", lambda *_, found=found: list(found))
        evaluate.run(recipe, run_dir)
        assert (max(scales(), default=0.0) > 1) == is_scaled_up


@pytest.mark.parametrize(("fitted", "is_shown"), [(1.004, False), (0.996, False), (1.006, True)])
def test_an_energy_scaled_by_one_is_no_second_row(
    tiny_copy: Path, monkeypatch: pytest.MonkeyPatch, fitted: float, is_shown: bool
) -> None:
    run_dir = RunDirectory(tiny_copy)
    run_dir.results.unlink()
    monkeypatch.setattr(evaluate, "_fit_scale", lambda *_: fitted)
    evaluate.run(run_dir.recipe(), run_dir)
    rows = run_dir.read_results()["joint_models"]
    assert [row["scaled"] for row in rows] == ([False, True] if is_shown else [False]) * 3
    assert not any("x1.00" in row["name"] for row in rows)


def test_a_network_is_told_how_much_there_is_to_read_in_all(
    tiny_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an interrupted run has most of it already: it must round as it did."""
    run_dir = RunDirectory(tiny_copy)
    recipe = run_dir.recipe()
    run_dir.results.unlink()
    folder = run_dir.log_weights("bit", "test")
    (folder / "manifest.json").unlink()
    sorted(folder.glob("shard-*.arrow"))[-1].unlink()
    told: list[int] = []
    energy = EnergyModel.energy

    def watched(model: EnergyModel, *blocks: Any, **options: Any) -> Any:
        told.append(options["out_of"])
        return energy(model, *blocks, **options)

    monkeypatch.setattr(EnergyModel, "energy", watched)
    evaluate.run(recipe, run_dir)
    proposals = recipe.proposals
    assert told == [proposals.num_test_prefixes * proposals.num_samples] * 2  # a shard, real text
