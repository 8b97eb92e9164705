"""States of P_LM on disk: what HeaT reads of real blocks and of their negatives.

They are as large as thousands of tokens are times the hidden size, and are deleted once every HeaT
is trained.

Shapes: N rows, C tokens of a continuation, H hidden size of P_LM.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from residual_ebm.errors import UserError
from residual_ebm.files.storage import check_manifest, write_bytes

REAL = -1  # stands where the number of a sample would: the block's own continuation


class StateRows(NamedTuple):
    """Rows of a shard, ordered by (prefix, sample)."""

    prefix_N: Tensor
    sample_N: Tensor
    hidden_NCH: Tensor
    log_prob_NC: Tensor
    entropy_NC: Tensor


class WantedStates(NamedTuple):
    """Where states are to be kept, and of which layers beside the last."""

    folder: Path
    layers: list[int]

    def path(self, shard: Path) -> Path:
        """Of the states of a shard of samples."""
        return self.folder / f"{shard.stem}.safetensors"


def write_states(path: Path, parts: Sequence[StateRows]) -> None:
    joined = (torch.cat(column).cpu().contiguous() for column in zip(*parts, strict=True))
    write_bytes(path, save(dict(zip(StateRows._fields, joined, strict=True))))


class StateSet(NamedTuple):
    """A folder of shards, checked against its manifest, and the layers whose states it has beside
    those of the last."""

    shards: list[Path]
    layers: list[int]

    def rows(self) -> Iterator[StateRows]:
        for path in self.shards:
            yield StateRows(**load_file(path))


def open_states(folder: Path, language_model: str) -> StateSet:
    """The states of the language model with this fingerprint."""
    manifest = check_manifest(folder)
    if manifest["language_model"] != language_model:
        raise UserError(
            "states", str(folder), "are of another language model; delete them and run again"
        )
    return StateSet([folder / name for name in sorted(manifest["files"])], manifest["layers"])
