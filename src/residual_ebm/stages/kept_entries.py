"""Parts of an analysis that takes hours, a file each, so that a kill loses none of them."""

from pathlib import Path
from typing import Any

from residual_ebm.files.storage import read_json, write_json
from residual_ebm.models.joint import JointModel

_VERSION = 4  # raised when entries would come out otherwise


def _stamp(joint: JointModel, num_samples: int) -> dict[str, Any]:
    return {
        "energy_fingerprint": joint.energy_model.fingerprint,
        "version": _VERSION,
        "num_samples": num_samples,
    }


def read_entry(path: Path, joint: JointModel, num_samples: int) -> dict[str, Any] | None:
    """What was computed before, by the same energy, from as many samples and by a version that
    would do the same."""
    if not path.exists():
        return None
    entry: dict[str, Any] = read_json(path, has="energy_fingerprint")
    return entry if _stamp(joint, num_samples).items() <= entry.items() else None


def write_entry(
    path: Path, joint: JointModel, num_samples: int, found: dict[str, Any]
) -> dict[str, Any]:
    entry = {**_stamp(joint, num_samples), **found}
    write_json(path, entry)
    return entry
