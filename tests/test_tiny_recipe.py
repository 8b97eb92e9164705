"""The recipe `tiny`, whole: the joint models lie between the truth and the language model."""

from pathlib import Path

from residual_ebm.files.open_run import open_run
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages.pipeline import run_all


def test_joint_intervals_lie_between_the_floor_and_the_base(tmp_path: Path) -> None:
    recipe = load_recipe("tiny")
    with open_run(tmp_path / "tiny", recipe) as run_dir:
        results = run_all(recipe, run_dir)
    (base,) = results["language_models"]
    plain = [row for row in results["joint_models"] if not row["scaled"]]
    assert [row["kind"] for row in plain] == ["unit", "bit", "heat"]
    for split in ("validation", "test"):
        for row in plain:
            estimate = row[split]
            assert results["floor"][split]["value"] < estimate["lower"], (row["name"], split)
            assert estimate["lower"] <= estimate["upper"] < base[split]["value"]
            assert estimate["difference_from_base"]["high"] < 0
    for row in plain:
        published = row["test"]["published"]
        assert results["floor"]["test"]["value"] < published["low"]
        assert published["high"] < base["test"]["value"]
    assert len(results["examples"]) == 3
