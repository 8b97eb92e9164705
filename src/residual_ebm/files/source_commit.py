"""Which commit of the source made a result."""

import subprocess
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


def source_commit(folder: Path = _PACKAGE) -> str | None:
    """The commit of the working copy that a package runs from, with "+" where files differ from it;
    None for an installed package, whose version says it all."""
    # An environment inside somebody else's repository is not a working copy of ours.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
    return commit and commit + ("" if changed == "" else "+")


def short_commit(commit: str) -> str:
    """For people, with the mark of a working copy that differed from it."""
    return f"{commit[:10]}+" if commit.endswith("+") else commit[:10]


def _git(folder: Path, *arguments: str) -> str | None:
    # Without its lock: somebody may be committing.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None  # no git here
    return done.stdout.strip() if done.returncode == 0 else None
