"""Results of long runs that come with the package, for the captions of shorter ones.

Each file is what `rebm results RUN --json` printed for a run of the recipe of that name.
"""

import json
from importlib import resources
from typing import Any


def published_names() -> list[str]:
    folder = resources.files("residual_ebm") / "published"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir())


def read_published(name: str) -> dict[str, Any] | None:
    """The published results of a recipe; None when there are none."""
    file = resources.files("residual_ebm") / "published" / f"{name}.json"
    if not file.is_file():
        return None
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return results


def fine_tuning_curve(results: dict[str, Any]) -> list[tuple[int, float]]:
    """Training steps and test perplexity of every language model adapted from a pretrained one."""
    points = []
    for row in results["language_models"]:
        validations = row["training"]["validations"]
        if validations:
            points.append((int(validations[-1]["step"]), float(row["test"]["value"])))
    return sorted(points)
