"""What a recipe leaves to the machine is settled when a run begins, and stays so.

A run begun in bfloat16 on one machine goes on in bfloat16 on another: its samples and its scores
must speak of one P_LM.
"""

from pathlib import Path
from typing import Any

from residual_ebm.config import Recipe
from residual_ebm.files.run_directory import RECIPE, RunDirectory
from residual_ebm.models.device import resolve_precision
from residual_ebm.recipe_file import check_recipe


def settle_recipe(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with every `precision: auto` replaced: by what the run has, else by what is quick
    on this machine."""
    earlier: Any = {}
    if (folder / RECIPE).is_file():
        earlier = RunDirectory(folder).recipe().model_dump(mode="json")
    quick = resolve_precision("auto", recipe.device)
    return check_recipe(_settled(recipe.model_dump(mode="json"), earlier, quick))


def _unless_auto(earlier: Any, quick: str) -> Any:
    return quick if earlier in (None, "auto") else earlier


def _namesake(item: Any, earlier: Any) -> Any:
    """The earlier entry of the same name; a run may have grown between two entries."""
    name = item.get("name") if isinstance(item, dict) else None
    entries = earlier if isinstance(earlier, list) else []
    return next((old for old in entries if name is not None and old["name"] == name), None)


def _settled(tree: Any, earlier: Any, quick: str) -> Any:
    if isinstance(tree, dict):
        before = earlier if isinstance(earlier, dict) else {}
        return {
            key: _unless_auto(before.get(key), quick)
            if (key, value) == ("precision", "auto")
            else _settled(value, before.get(key), quick)
            for key, value in tree.items()
        }
    if isinstance(tree, list):
        return [_settled(item, _namesake(item, earlier), quick) for item in tree]
    return tree
