"""A recipe may be like another one, with changes."""

from pathlib import Path

import pytest

from residual_ebm.errors import UserError
from residual_ebm.recipe_file import load_recipe


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_sections_and_changes_take_the_place_of_those_it_is_like(tmp_path: Path) -> None:
    mine = write(
        tmp_path / "mine.yaml",
        "name: mine\nlike: tiny\nblock: {prefix_length: 6, length: 10}\n"
        "changes:\n  energies.heat.training.steps: 7\n  seed: 5\n",
    )
    tiny, made = load_recipe("tiny"), load_recipe(mine, ["threads=2"])
    assert (made.name, made.seed, made.threads) == ("mine", 5, 2)
    assert made.block.length == 10
    assert [energy.training.steps for energy in made.energies] == [
        7 if energy.name == "heat" else energy.training.steps for energy in tiny.energies
    ]
    assert made.language_models == tiny.language_models


def test_a_file_beside_it_and_one_that_is_like_another(tmp_path: Path) -> None:
    write(tmp_path / "first.yaml", "name: first\nlike: tiny\nchanges: {seed: 5}\n")
    second = write(tmp_path / "second.yaml", "name: second\nlike: first.yaml\n")
    made = load_recipe(second)
    assert (made.name, made.seed) == ("second", 5)


@pytest.mark.parametrize(
    ("text", "field", "remedy"),
    [
        ("like: mine.yaml\n", "like", "is this recipe itself"),
        ("like: other.yaml\n", "like", "is this recipe itself"),
        ("like: tinny\n", "recipe", "did you mean tiny"),
        ("like: 3\n", "like", "name a recipe"),
        ("like: tiny\nchanges: 3\n", "changes", "key.path: value"),
        ("like: tiny\nchanges: {energies.hat.kind: bit}\n", "changes", "no entry 'hat'"),
        ("like: tiny\nchanges: {seed.x: 1}\n", "changes", "plain value"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, field: str, remedy: str) -> None:
    write(tmp_path / "other.yaml", "like: mine.yaml\n")
    with pytest.raises(UserError, match=remedy) as refused:
        load_recipe(write(tmp_path / "mine.yaml", text))
    assert refused.value.field == field
