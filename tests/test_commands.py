"""Where a run goes when nobody says."""

from residual_ebm.commands import _run_name
from residual_ebm.recipe_file import load_recipe


def test_a_changed_recipe_has_a_folder_of_its_own_whatever_the_order_of_changes() -> None:
    recipe = load_recipe("tiny")
    assert _run_name(recipe, []) == "tiny"
    one, other = "seed=1", "evaluation.batch_size=7"
    changed = _run_name(recipe, [one, other])
    assert changed == _run_name(recipe, [other, one])
    assert changed.startswith("tiny-")
    assert len({changed, _run_name(recipe, [one]), _run_name(recipe, [other])}) == 3
