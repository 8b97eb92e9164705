"""Results of long runs that come with the package, for the docs and for captions of shorter ones.

Each folder is named after the recipe that was run: `results.json` is what `rebm results RUN --json`
printed, `analysis.json` the file of that name in the run.
"""

import json
from importlib import resources
from typing import Any, NamedTuple


class Published(NamedTuple):
    results: dict[str, Any]
    analysis: dict[str, Any] | None


def published_names() -> list[str]:
    folder = resources.files("residual_ebm") / "published"
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())


def read_published(name: str) -> Published | None:
    """What is published of a recipe; None when nothing is."""
    results = _read(name, "results")
    return None if results is None else Published(results, _read(name, "analysis"))


def _read(name: str, part: str) -> dict[str, Any] | None:
    file = resources.files("residual_ebm") / "published" / name / f"{part}.json"
    if not file.is_file():
        return None
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def fine_tuning_curve(results: dict[str, Any]) -> list[tuple[int, float]]:
    """Training steps and test perplexity of every language model that was trained."""
    points = []
    for row in results["language_models"]:
        validations = row["training"]["validations"]
        if validations:
            points.append((int(validations[-1]["step"]), float(row["test"]["value"])))
    return sorted(points)
