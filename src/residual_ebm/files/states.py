"""States of P_LM on disk: what HeaT reads of real blocks and of their negatives.

They are as large as thousands of tokens are times the hidden size, and are deleted once every HeaT
is trained.

Shapes: N rows, C tokens of a continuation, H hidden size of P_LM times the layers kept.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file, save
from torch import Tensor

from residual_ebm.errors import UserError
from residual_ebm.files.storage import check_manifest, write_bytes

REAL_SAMPLE = -1  # stands where the number of a sample would: the block's own continuation


class StateRows(NamedTuple):
    """Rows of a chunk, ordered by (prefix, sample)."""

    prefix_N: Tensor
    sample_N: Tensor
    hidden_NCH: Tensor
    log_prob_NC: Tensor
    entropy_NC: Tensor


class WantedStates(NamedTuple):
    """Where states are to be kept, and of which layers beside the last."""

    folder: Path
    layers: list[int]

    def path(self, shard: Path, chunk: int) -> Path:
        """Of the states of a chunk in a shard of samples: a whole shard of them may be large."""
        return self.folder / f"{shard.stem}-{chunk:03d}.safetensors"


def write_states(path: Path, rows: StateRows) -> None:
    columns = {name: values.contiguous() for name, values in rows._asdict().items()}
    write_bytes(path, save(columns))


class StateSet(NamedTuple):
    """A folder of chunks, checked against its manifest, and the layers whose states it has beside
    those of the last."""

    paths: list[Path]
    layers: list[int]

    def rows(self) -> Iterator[StateRows]:
        for path in self.paths:
            yield StateRows(**load_file(path))


def open_states(folder: Path, language_model: str) -> StateSet:
    """The states of the language model with this fingerprint."""
    manifest = check_manifest(folder)
    if manifest["language_model"] != language_model:
        raise UserError(
            "states", str(folder), "are of another language model; delete them and run again"
        )
    return StateSet([folder / name for name in sorted(manifest["files"])], manifest["layers"])
