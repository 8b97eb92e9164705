"""The commit that is written beside results is that of our own working copy, or none."""

import subprocess
from pathlib import Path

import pytest

from residual_ebm.files.source_commit import short_commit, source_commit


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a repository with one commit."""
    folder = tmp_path / "src" / "residual_ebm"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    return folder


def test_a_working_copy_has_its_commit(package: Path) -> None:
    assert source_commit(package) == git(package, "rev-parse", "HEAD")


def test_changes_are_told(package: Path) -> None:
    (package / "new.py").write_text("")  # not part of it yet
    assert source_commit(package) == git(package, "rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed = True")
    assert source_commit(package) == git(package, "rev-parse", "HEAD") + "+"


def test_an_environment_inside_another_repository_has_none(package: Path) -> None:
    installed = package.parent / ".venv" / "residual_ebm"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert source_commit(installed) is None


def test_no_git_no_commit(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(package))
    assert source_commit(package) is None


def test_a_short_commit_keeps_the_mark_of_changes() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert short_commit(commit) == "0123456789"
    assert short_commit(f"{commit}+") == "0123456789+"
