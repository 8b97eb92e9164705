"""A run directory: where everything of one run lives."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from residual_ebm.config import Recipe
from residual_ebm.errors import UserError
from residual_ebm.files.source_commit import source_commit
from residual_ebm.files.storage import (
    delete_folder,
    disk_errors,
    read_json,
    write_bytes,
    write_json,
)
from residual_ebm.recipe_file import Difference, check_recipe, differences, load_recipe
from residual_ebm.sections import TRAINING_SUFFIX

RECIPE = "recipe.yaml"
ANALYSIS_VERSION = 6  # of what `analyze` writes; an older one is made anew
RECIPE_HEADER = "# The recipe of this run, complete: `rebm run` with it makes the same run again.\n"
TIMINGS = "timings.json"


def _may_read_other_layers(change: Difference) -> bool:
    """Whether a change may be of what HeaT reads of P_LM: a whole energy, or a head."""
    of_energies = change.place[0] == "energies"
    return of_energies and (len(change.place) <= 2 or "head" in change.place)


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
        self.growth = path / "growth.json"

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

    def grow(self, recipe: Recipe, changes: Sequence[Difference]) -> None:
        """Take on a changed recipe, and remember that. The table of before stays until a new one is
        made; the recipe itself comes last, so that a kill leaves a run of the old recipe or of the
        new."""
        entry = {
            "commit": source_commit(),
            "table_by": (self.read_results().get("commit") or "unknown")
            if self.results.exists()
            else None,
            "changes": [str(change) for change in changes],
        }
        earlier = self.read_growth()
        if entry not in earlier[-1:]:
            write_json(self.growth, [*earlier, entry])
        if any(_may_read_other_layers(change) for change in changes):
            delete_folder(self.states)  # drawn again, with those layers, they are the same
        self.analysis.unlink(missing_ok=True)
        self.write_recipe(recipe)

    def read_growth(self) -> list[dict[str, Any]]:
        """How the recipe changed since the run began, oldest first."""
        growth: list[dict[str, Any]] = read_json(self.growth) if self.growth.exists() else []
        return growth

    def write_recipe(self, recipe: Recipe) -> None:
        write_bytes(self.path / RECIPE, (RECIPE_HEADER + recipe.to_yaml()).encode())

    def read_results(self) -> dict[str, Any]:
        if not self.results.exists():
            raise UserError(
                "run", str(self.path), "is not evaluated yet; finish it with `rebm run`"
            )
        results: dict[str, Any] = read_json(self.results, has="joint_models")
        return results

    def has_results(self) -> bool:
        """Not those of an older version, which lack what reports need, nor those of the recipe
        before it grew: they are made anew."""
        if not self.results.exists():
            return False
        results = self.read_results()
        rows = results["joint_models"]
        if "growth" not in results or not all("resampled" in row["test"] for row in rows):
            return False
        try:
            made_by = check_recipe(results["resolved_recipe"])
        except UserError:  # a recipe that this version would not take
            return False
        return not differences(made_by, self.recipe())

    def check_results(self) -> None:
        self.read_results()  # says so where there are none
        if not self.has_results():
            raise UserError(
                "run",
                str(self.path),
                "its results are of an older version or recipe; `rebm run` makes them anew and"
                " trains nothing that is trained",
            )

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
            write_json(self.path / TIMINGS, timings)

    def read_timings(self) -> dict[str, float]:
        """Seconds that each stage took, over all the times it was run."""
        path = self.path / TIMINGS
        timings: dict[str, float] = read_json(path) if path.exists() else {}
        return timings


def resume_folder(result: Path) -> Path:
    """Beside the folder of the finished model; gone once that exists."""
    return result.with_name(f"{result.name}{TRAINING_SUFFIX}")
