"""What the documents say must be so."""

import itertools
import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from residual_ebm.cli import build_parser
from residual_ebm.command_help import command_help
from residual_ebm.commands import next_commands
from residual_ebm.recipe_file import load_recipe, recipe_names
from residual_ebm.report.published import fine_tuning_curve, published_names, read_published

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "residual_ebm"


def between(text: str, start: str, end: str) -> str:
    return text.split(f"<!-- {start} -->")[1].split(f"<!-- {end} -->")[0]


def test_command_help_is_fresh() -> None:
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == command_help(), (
        "run `make docs`"
    )


def test_the_small_table_cuts_every_training_down(tmp_path: Path) -> None:
    """A row that the recipe gains must not make it as long as the whole table."""
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    lines = itertools.takewhile(
        lambda line: not line or line.startswith("    "),
        text[text.index("    name: small-table") :].splitlines(),
    )
    path = tmp_path / "small-table.yaml"
    path.write_text("\n".join(line[4:] for line in lines), encoding="utf-8")
    recipe = load_recipe(str(path))
    trainings = [
        *(entry.training for entry in recipe.language_models),
        *(entry.training for entry in recipe.encoders),
        *(entry.training for entry in recipe.energies),
    ]
    assert max(training.steps for training in trainings if training) <= 40


@pytest.mark.parametrize(
    ("name", "balm", "joint"),
    [
        ("table1-wiki", "balm", ("joint unit", "joint bit")),
        ("table1-wiki", "balm-slow", ("joint unit", "joint bit")),
        ("table1-wiki", "balm-wide", ("joint unit", "joint bit")),
        ("table1-wiki", "balm-30m", ("joint heat-bit-star",)),
        ("table1-wiki-deep", "balm", ("joint unit", "joint bit")),
    ],
)
def test_balm_is_as_large_as_what_it_is_compared_with(
    name: str, balm: str, joint: Sequence[str]
) -> None:
    published = read_published(name)
    assert published is not None
    rows = [*published.results["language_models"], *published.results["joint_models"]]
    parameters = {row["name"]: row["parameters"] for row in rows}
    for other in joint:
        assert parameters[balm] == pytest.approx(parameters[other], rel=0.03)


def test_the_tree_has_a_line_for_every_file() -> None:
    tree = between((ROOT / "README.md").read_text(encoding="utf-8"), "tree", "end of tree")
    listed, folder = set(), ""
    for line in tree.splitlines():
        entry = re.match(r"^( +)(\S+)(?: +(.*))?$", line)
        if entry is None:
            continue
        indent, name, words = len(entry[1]), entry[2], entry[3]
        if name.endswith("/"):
            folder = name
        else:
            listed.add(f"{folder}{name}" if indent == 4 else name)
            assert words, f"{name} has no description"
    there = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".c", ".yaml") and path.name != "__init__.py"
    }
    assert listed == there


def test_commands_of_the_readme_are_understood() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    \.venv/bin/rebm (.*?)(?:  +#.*)?$", readme, flags=re.MULTILINE)
    assert len(commands) >= 4
    parser = build_parser()
    for command in commands:
        assert parser.parse_args(shlex.split(command)).call


def test_the_readme_shows_thenext_commands_that_are_printed(
    tiny_run: Path, rebm: Callable[..., tuple[int, str, str]]
) -> None:
    _, shown, _ = rebm("results", tiny_run)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    printed = shown.partition("What to try next:\n")[2].replace(str(tiny_run), "runs/quickstart")
    for line in printed.splitlines():
        said = line.strip().replace("run tiny", "run quickstart")
        assert f"    .venv/bin/{said}\n" in readme
    assert printed.count("\n") == 4


def test_every_next_command_is_understood(tiny_run: Path) -> None:
    """Of a text with a split of its own as well, which no folder can take the place of."""
    results = json.loads((tiny_run / "results.json").read_text())
    parser = build_parser()
    for recipe, named in (("wikitext2", "quickstart"), ("sotu", "sotu"), ("mine", "quickstart")):
        commands = [line for line, _ in next_commands({**results, "recipe": recipe}, "runs/a")]
        assert len(commands) == 4
        for command in commands:
            assert parser.parse_args(shlex.split(command)).call
        assert commands[-1].startswith(f"run {named} ")


def test_published_results_are_of_the_recipe_they_are_named_after() -> None:
    """And long enough to be quoted: the caption of the quickstart's table is made of them."""
    named = {load_recipe(name).reference for name in recipe_names()} - {None}
    assert named <= set(published_names())
    for name in published_names():
        published, recipe = read_published(name), load_recipe(name)
        assert published is not None
        results = published.results
        assert (results["recipe"], results["corpus"]) == (name, recipe.corpus.path)
        assert results["num_samples"] == recipe.proposals.num_samples
        assert results["num_prefixes"]["test"] == recipe.proposals.num_test_prefixes
        steps = [model.training.steps for model in recipe.language_models if model.training]
        assert [step for step, _ in fine_tuning_curve(results)] == sorted(steps)


def test_the_readme_shows_a_row_for_every_model_of_quickstart() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = between(readme, "table of rebm run quickstart", "end of table")
    recipe = load_recipe("quickstart")
    rows = [line.strip() for line in table.splitlines()]
    for model in recipe.language_models:
        assert any(row.startswith(f"{model.name} ") for row in rows)
    for energy in recipe.energies:
        shown = [row for row in rows if re.match(rf"joint {energy.name} +[\d.]+ M ", row)]
        assert 1 <= len(shown) <= 2, "as trained, and scaled where that makes a difference"


def test_the_readme_lists_every_recipe() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w-]+)` \|", readme, flags=re.MULTILINE)
    assert sorted(listed) == recipe_names()
