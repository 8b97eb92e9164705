"""The house: a folder imports only from folders above it, and the command line starts fast."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import residual_ebm

PACKAGE = Path(residual_ebm.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400

# Top to bottom: a module may import its own layer and those above. `report` is a leaf.
LAYERS = (
    {"errors", "sections", "config", "recipe_file", "randomness", "progress", "stopping"},
    {"estimation"},
    {"files"},
    {"assets"},
    {"models"},
    {"stages"},
    {"bench"},
    {"report"},
    {"outputs", "commands", "model_commands", "cli", "command_help"},
)
# The package's own names are loaded on first use, from any layer; inside, only these are for all.
PACKAGE_NAMES = {"__version__"}


def layer_of(part: str) -> int:
    for number, names in enumerate(LAYERS):
        if part in names:
            return number
    raise AssertionError(f"{part} has no place among the layers; give it one here")


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """What a file takes from the package: the part below it (a folder, a module), and the line.

    Imports inside functions count too: they hide a dependency, they do not remove it.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package, _, rest = alias.name.partition(".")
                if package == "residual_ebm" and rest:
                    yield rest.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                folder = path.relative_to(PACKAGE).parts[: -node.level]
                module = ".".join(["residual_ebm", *folder, *filter(None, [module])])
            package, _, rest = module.partition(".")
            if package == "residual_ebm":
                names = [rest.partition(".")[0]] if rest else [alias.name for alias in node.names]
                yield from ((name, node.lineno) for name in names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "residual_ebm"
        ):
            yield node.attr, node.lineno


def wrong_imports(path: Path) -> list[str]:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for name, line in imported(path)
        if name not in PACKAGE_NAMES and layer_of(name) > layer_of(part)
    ]


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path != PACKAGE / "__init__.py"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_imports_point_upwards(path: Path) -> None:
    assert wrong_imports(path) == []


def test_report_is_a_leaf_that_only_the_commands_notice() -> None:
    users = [
        path.relative_to(PACKAGE).parts[0]
        for path in FILES
        if path.parent.name != "report" and "report" in [name for name, _ in imported(path)]
    ]
    assert set(users) <= {"commands.py", "model_commands.py", "cli.py"}


@pytest.mark.parametrize(
    "line",
    [
        "from residual_ebm.stages.evaluate import run",
        "import residual_ebm.stages.evaluate",
        "from residual_ebm import stages",
        "from ..stages import evaluate",
        "def later():\n    from residual_ebm.report.table import print_results",
        "import residual_ebm\nresidual_ebm.stages",
    ],
)
def test_an_import_downwards_is_seen_however_it_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "joint.py").write_text(line)
    assert len(wrong_imports(tmp_path / "models" / "joint.py")) == 1


def test_the_command_line_starts_without_torch_and_transformers() -> None:
    code = (
        "import sys, residual_ebm.cli as cli; code = cli.main(['recipes']);"
        "heavy = {'torch', 'transformers', 'datasets', 'scipy', 'pyarrow'} & set(sys.modules);"
        "print(sorted(heavy), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "tiny" in done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_is_one_idea_and_finished(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert "TODO" not in text
    assert ast.get_docstring(ast.parse(text)), "a file's first docstring says what it computes"
