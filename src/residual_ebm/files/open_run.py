"""Owning a run directory: one process at a time begins it, goes on with it, or lets it grow.

A run may grow as long as nothing in it would have come out otherwise: another row of the table, a
deeper evaluation, a training that has not begun. Whatever is there stays, so that rows of before
and after are on the same blocks, negatives and proposals.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from residual_ebm.config import Recipe
from residual_ebm.errors import UserError
from residual_ebm.files.run_directory import (
    RECIPE,
    RECIPE_HEADER,
    TIMINGS,
    RunDirectory,
    resume_folder,
)
from residual_ebm.files.storage import disk_errors, remove_leftovers
from residual_ebm.progress import QUIET, Progress
from residual_ebm.recipe_file import Difference, differences
from residual_ebm.sections import TRAINING_SUFFIX

_OF_A_NEW_RUN = (".lock", RECIPE, f".partial-{RECIPE}", TIMINGS)


def _begun(path: Path) -> bool:
    """Whether a folder holds more than a run that has made nothing yet."""
    return any(entry.name not in _OF_A_NEW_RUN for entry in path.iterdir())


@contextmanager
def open_run(
    path: Path, recipe: Recipe, *, grow: bool = False, progress: Progress = QUIET
) -> Iterator[RunDirectory]:
    """Own the run directory of a recipe: create it, or go on with it if the recipe is the same;
    with `grow` also if it is another one that leaves everything there as it is."""
    with disk_errors(path):
        for part in (path, *path.parents):
            if part.exists() and not part.is_dir():
                raise UserError("--out", str(path), f"{part} is a file; name a folder")
        recipe_path = path / RECIPE
        if path.exists() and _begun(path) and not recipe_path.exists():
            raise UserError("--out", str(path), "holds other files; name an empty or new folder")
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("w")
    with lock:
        try:
            # The kernel lets go of this lock when the process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                "--out", str(path), "another process works here; wait for it or name another --out"
            ) from None
        run_dir = RunDirectory(path)
        if _begun(path):
            _take_on(run_dir, recipe, grow, progress)
        elif not recipe_path.exists() or recipe_path.read_text("utf-8").startswith(RECIPE_HEADER):
            # Also over the recipe of a run that failed before it made anything.
            run_dir.write_recipe(recipe)
        elif differences(run_dir.recipe(), recipe):
            raise UserError("--out", str(path), f"holds another {RECIPE}; name a new folder")
        remove_leftovers(path)
        yield run_dir


def _take_on(run_dir: RunDirectory, recipe: Recipe, grow: bool, progress: Progress) -> None:
    """Go on with a run of a changed recipe, or refuse to."""
    old = run_dir.recipe()
    changes = differences(old, recipe)
    if not changes:
        return
    for change in changes:
        made = _made_from(change, old, recipe, run_dir)
        if made is not None:
            shown = f"was made by another recipe ({change})"
            if made.name != RECIPE:
                shown += f", {made.relative_to(run_dir.path)} too"
            begun = made.name.endswith(TRAINING_SUFFIX)
            given_up = ", or delete that folder to give that training up" if begun else ""
            raise UserError("--out", str(run_dir.path), f"{shown}; name another --out{given_up}")
    if not grow:
        remedy = "name another --out, or add --grow to keep what is there and make the rest"
        if run_dir.growth.exists():
            remedy += f"; `rebm run {run_dir.path / RECIPE} --out {run_dir.path}` goes on as it is"
        raise UserError(
            "--out", str(run_dir.path), f"was made by another recipe ({changes[0]}); {remedy}"
        )
    for change in changes:
        progress.note(f"the run grows: {change}")
    run_dir.grow(recipe, changes)


def _made_from(change: Difference, old: Recipe, new: Recipe, run_dir: RunDirectory) -> Path | None:
    """Something that is there and would have come out otherwise."""
    section, *rest = change.place
    folders = {
        "language_models": run_dir.language_model,
        "encoders": run_dir.encoder,
        "energies": run_dir.energy,
        "sums": run_dir.energy,
    }
    if section in folders:
        # The first language model is the one that energies correct by default.
        if old.language_models[0].name != new.language_models[0].name:
            return run_dir.blocks
        if not rest:  # another order, of the rows alone
            return None
        result = folders[section](rest[0])
        concerned = [result, resume_folder(result)]
        if section == "energies":
            concerned += _drawn_otherwise(old, new, run_dir)
    elif change.place[:2] == ("proposals", "deep"):
        concerned = list(run_dir.path.glob("proposals/*/deep"))
    elif section in ("negatives", "proposals"):
        concerned = [run_dir.path / section]
    elif section == "evaluation":  # the table is made anew, log-weights and energies are not
        names = ("energies", "log_weights") if rest == ["batch_size"] else ()
        concerned = [run_dir.path / name for name in names]
    else:
        concerned = [] if section == "reference" else [run_dir.path / RECIPE]
    return next((path for path in concerned if path.exists()), None)


def _drawn_otherwise(old: Recipe, new: Recipe, run_dir: RunDirectory) -> list[Path]:
    """Where a HeaT learns from negatives, real blocks are read beside them: another batch, and so
    other last bits of what is drawn."""
    heads = [
        {recipe.language_model_of(one) for one in recipe.energies if one.kind == "heat"}
        for recipe in (old, new)
    ]
    return [run_dir.negatives(name, "train") for name in sorted(heads[0] ^ heads[1])]
