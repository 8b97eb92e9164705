"""A run directory: where everything of one run lives, owned by one process at a time."""

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from residual_ebm.config import Recipe
from residual_ebm.errors import UserError
from residual_ebm.files.storage import (
    disk_errors,
    read_json,
    remove_leftovers,
    write_bytes,
    write_json,
)
from residual_ebm.recipe_file import first_difference, load_recipe

RECIPE = "recipe.yaml"
ANALYSIS_VERSION = 3  # of what `analyze` writes; an older one is made anew
_HEADER = "# The recipe of this run, complete: `rebm run` with it makes the same run again.\n"
_TIMINGS = "timings.json"
_OF_A_NEW_RUN = (".lock", RECIPE, f".partial-{RECIPE}", _TIMINGS)


class RunDirectory:
    """Paths of a run, and the files that all stages share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks = path / "blocks"
        self.metrics = path / "metrics.jsonl"
        self.states = path / "states"
        self.per_step = path / "per_step"
        self.results = path / "results.json"
        self.analysis = path / "analysis.json"
        self.tensorboard = path / "tensorboard"

    def language_model(self, name: str) -> Path:
        return self.path / "language_models" / name

    def encoder(self, name: str) -> Path:
        return self.path / "encoders" / name

    def energy(self, name: str) -> Path:
        return self.path / "energies" / name

    def negatives(self, language_model: str, split: str) -> Path:
        return self.path / "negatives" / language_model / split

    def proposals(self, language_model: str, split: str) -> Path:
        return self.path / "proposals" / language_model / split

    def log_weights(self, energy: str, split: str) -> Path:
        return self.path / "log_weights" / energy / split

    def recipe(self) -> Recipe:
        """The recipe this run was made by."""
        path = self.path / RECIPE
        if not path.is_file():
            raise UserError(
                "run", str(self.path), "is not a run directory; make one with `rebm run`"
            )
        return load_recipe(str(path))

    def read_results(self) -> dict[str, Any]:
        if not self.results.exists():
            raise UserError(
                "run", str(self.path), "is not evaluated yet; finish it with `rebm run`"
            )
        results: dict[str, Any] = read_json(self.results, has="joint_models")
        return results

    def has_results(self) -> bool:
        """Not those of an older version, which lack what reports need: they are made anew."""
        return self.results.exists() and "versions" in self.read_results()

    def read_analysis(self) -> dict[str, Any] | None:
        """None where there is none, or one that this version would make otherwise."""
        if not self.analysis.exists():
            return None
        analysis: dict[str, Any] = read_json(self.analysis, has="energies")
        return analysis if analysis.get("version") == ANALYSIS_VERSION else None

    def forget_metrics_after(self, stage: str, model: str, step: int) -> None:
        """Drop lines that a killed run logged past its last checkpoint: they come again."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the last line of a killed run may be half written
            if (entry["stage"], entry["model"]) != (stage, model) or entry["step"] <= step:
                kept.append(line)
        write_bytes(self.metrics, "".join(f"{line}\n" for line in kept).encode())

    def log_metrics(self, stage: str, model: str, step: int, values: dict[str, float]) -> None:
        line = json.dumps({"stage": stage, "model": model, "step": step, **values})
        with disk_errors(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time a stage took to timings.json; results never depend on it."""
        start = time.monotonic()
        try:
            yield
        finally:
            timings = self.read_timings()
            timings[stage] = round(timings.get(stage, 0.0) + time.monotonic() - start, 3)
            write_json(self.path / _TIMINGS, timings)

    def read_timings(self) -> dict[str, float]:
        """Seconds that each stage took, over all the times it was run."""
        path = self.path / _TIMINGS
        timings: dict[str, float] = read_json(path) if path.exists() else {}
        return timings


def _begun(path: Path) -> bool:
    """Whether a folder holds more than a run that has made nothing yet."""
    return any(entry.name not in _OF_A_NEW_RUN for entry in path.iterdir())


@contextmanager
def open_run(path: Path, recipe: Recipe) -> Iterator[RunDirectory]:
    """Own the run directory of a recipe: create it, or go on with it if the recipe is the same."""
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
            difference = first_difference(run_dir.recipe(), recipe)
            if difference:
                raise UserError(
                    "--out",
                    str(path),
                    f"was made by another recipe ({difference}); name another --out",
                )
        elif not recipe_path.exists() or recipe_path.read_text("utf-8").startswith(_HEADER):
            # Also over the recipe of a run that failed before it made anything.
            write_bytes(recipe_path, (_HEADER + recipe.to_yaml()).encode())
        elif first_difference(run_dir.recipe(), recipe):
            raise UserError("--out", str(path), f"holds another {RECIPE}; name a new folder")
        remove_leftovers(path)
        yield run_dir
