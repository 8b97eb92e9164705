"""Recipes as files: found by name or path, overridden by `key.path=value`, checked, compared.

A recipe that says `like: NAME` is that other one with `changes` (key.path: value) and with the
sections it has itself.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from residual_ebm.config import Recipe
from residual_ebm.errors import UserError

_RECIPES = resources.files("residual_ebm") / "recipes"
_SUFFIXES = (".yaml", ".yml")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as text; everybody who writes a learning rate means the number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, origin: str) -> Any:
    try:
        return _without_aliases(yaml.load(text, Loader=_Loader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be read"
        raise UserError("recipe", origin, f"not valid YAML{where} ({problem}); mend it") from None


def _without_aliases(node: Any) -> Any:
    """A section written once and used twice (&name, *name) becomes two that change apart."""
    if isinstance(node, dict):
        return {key: _without_aliases(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_aliases(value) for value in node]
    return node


def recipe_names() -> list[str]:
    return sorted(entry.name[:-5] for entry in _RECIPES.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(name_or_file: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by name or from a file, with `key.path=value` overrides, checked."""
    tree = _tree_of(name_or_file)
    for override in overrides:
        apply_override(tree, override)
    return check_recipe(tree)


def _tree_of(name_or_file: str, liked_by: Sequence[str] = ()) -> dict[str, Any]:
    tree = parse_yaml(_text_of(name_or_file), name_or_file)
    if not isinstance(tree, dict):
        raise UserError("recipe", name_or_file, "not a mapping of keys to values")
    if "like" not in tree:
        return tree
    other, changes = tree.pop("like"), tree.pop("changes", None) or {}
    if not isinstance(other, str):
        raise UserError("like", other, "name a recipe or a .yaml file")
    if not isinstance(changes, dict):
        raise UserError("changes", changes, "write them as key.path: value")
    if Path(other).suffix in _SUFFIXES:  # beside the recipe that names it
        other = str(Path(name_or_file).parent / other)
    if other in (*liked_by, name_or_file):
        raise UserError("like", other, "is this recipe itself; name another")
    tree = {**_tree_of(other, (*liked_by, name_or_file)), **tree}
    for path, value in changes.items():
        _set(tree, str(path), value, "changes")
    return tree


def _text_of(name_or_file: str) -> str:
    path = Path(name_or_file)
    names = recipe_names()
    if path.suffix in _SUFFIXES or _is_file(path):
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise UserError(
                "recipe", name_or_file, f"cannot be read ({reason}); check the path"
            ) from None
    if name_or_file in names:
        return (_RECIPES / f"{name_or_file}.yaml").read_text("utf-8")
    close = difflib.get_close_matches(name_or_file, names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UserError(
        "recipe",
        name_or_file,
        f"unknown recipe; {hint}there are {', '.join(names)}, or give a .yaml file",
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long to be a path at all
        return False


def check_recipe(tree: dict[str, Any]) -> Recipe:
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = list(first["loc"])
        context = first.get("ctx", {})
        if context.get("at"):
            place.append(context["at"])
        value = context.get("value")
        if value is None:
            value = _value_at(tree, place)
        remedy = first["msg"][:1].lower() + first["msg"][1:]
        if first["type"] == "missing":
            remedy = "required; add it to the recipe"
        elif first["type"] == "model_type":
            remedy = "is a section with keys of its own; set one of those"
        raise UserError(_named_place(tree, place) or "recipe", value, remedy) from None


def _named_place(tree: Any, place: Sequence[str | int]) -> str:
    """Items of a list by their name, as a person would write it."""
    keys = []
    for key in place:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            tree = None
        name = tree.get("name") if isinstance(key, int) and isinstance(tree, dict) else None
        keys.append(name if isinstance(name, str) else str(key))
    return ".".join(keys)


def _value_at(tree: Any, place: Sequence[str | int]) -> Any:
    for key in place:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return "(missing)"
    # A whole section would drown the message.
    return "{...}" if isinstance(tree, dict | list) else tree


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `key.path=value` in the tree; items of a list are named by `name` or by number."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UserError("--set", override, "write it as key.path=value")
    _set(tree, path, parse_yaml(text, f"--set {override}"), "--set")


def _set(tree: dict[str, Any], path: str, value: Any, field: str) -> None:
    """`field` is what a refusal names."""
    *parents, last = path.split(".")
    node: Any = tree
    for key in parents:
        node = _child(node, key, path, field)
    if isinstance(node, list):
        node[_list_index(node, last, path, field)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise UserError(
            field, f"{path}={value}", "the path runs through a plain value; check its dots"
        )


def _child(node: Any, key: str, path: str, field: str) -> Any:
    if isinstance(node, list):
        return node[_list_index(node, key, path, field)]
    if not isinstance(node, dict):
        raise UserError(field, path, f"nothing below {key!r}; check the dots of the path")
    if node.get(key) is None:
        node[key] = {}
    return node[key]


def _list_index(items: list[Any], key: str, path: str, field: str) -> int:
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if key in names:
        return names.index(key)
    if key.isdigit() and int(key) < len(items):
        return int(key)
    there = ", ".join(str(name) for name in names)
    raise UserError(field, path, f"no entry {key!r} in that list; it has {there}")


class Difference(NamedTuple):
    """A key at which two recipes differ, and both values; None where a recipe lacks it."""

    place: tuple[str, ...]
    old: Any
    new: Any

    def __str__(self) -> str:
        shown = [
            "..." if isinstance(side, dict | list) else repr(side) for side in (self.old, self.new)
        ]
        key = ".".join(self.place)
        if shown == ["None", "..."]:
            return f"{key} was added"
        if shown == ["...", "None"]:
            return f"{key} was left out"
        return f"{key} was {shown[0]}, now {shown[1]}"


def differences(old: Recipe, new: Recipe) -> list[Difference]:
    """All keys at which two recipes differ; entries of lists are told by their names.

    What a recipe says of itself decides nothing: a run goes on when only the description changed.
    """
    one, other = (side.model_dump(mode="json", exclude={"description"}) for side in (old, new))
    return list(_differences(one, other, ()))


def _differences(old: Any, new: Any, place: tuple[str, ...]) -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key), new.get(key), (*place, key))
    elif _has_names(old) and _has_names(new):
        one, other = ({entry["name"]: entry for entry in side} for side in (old, new))
        if [name for name in one if name in other] != [name for name in other if name in one]:
            yield Difference(place, ", ".join(one), ", ".join(other))
        yield from _differences(one, other, place)
    elif old != new:
        yield Difference(place, old, new)


def _has_names(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, dict) and "name" in item for item in value
    )
