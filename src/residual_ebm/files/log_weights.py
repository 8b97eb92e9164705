"""Log-weights on disk: of every proposal, and of the real continuation of every prefix.

Shapes: P prefixes, N proposals of a prefix.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from residual_ebm.errors import UserError
from residual_ebm.files.storage import read_json, read_table, write_json, write_table

REAL = "real.arrow"
_OWNER = "owner.json"


@dataclass(frozen=True)
class RealContinuations:
    """What is known of the evaluated prefixes themselves."""

    block_P: np.ndarray
    document_P: np.ndarray
    num_tokens_P: np.ndarray
    lm_log_prob_P: np.ndarray
    log_weight_P: np.ndarray


def claim_log_weights(folder: Path, energy: str) -> None:
    """Log-weights in this folder are of the energy with this fingerprint, and of no other."""
    owner = folder / _OWNER
    if not owner.exists() and not any(folder.glob("*.arrow")):
        write_json(owner, {"energy": energy})
    if not owner.exists() or read_json(owner, has="energy")["energy"] != energy:
        raise UserError(
            "log_weights", str(folder), "are of another energy, or of an older version; delete them"
        )


def write_real(path: Path, real: RealContinuations) -> None:
    write_table(
        path,
        pa.table(
            {
                "block": real.block_P.astype(np.int32),
                "document": real.document_P.astype(np.int32),
                "num_tokens": real.num_tokens_P.astype(np.int32),
                "lm_log_prob": real.lm_log_prob_P,
                "log_weight": real.log_weight_P,
            }
        ),
    )


def read_real(path: Path) -> RealContinuations:
    table = read_table(path)
    return RealContinuations(
        table["block"].to_numpy().astype(np.int64),
        table["document"].to_numpy().astype(np.int64),
        table["num_tokens"].to_numpy().astype(np.int64),
        table["lm_log_prob"].to_numpy(),
        table["log_weight"].to_numpy(),
    )


def write_log_weights(path: Path, prefix_N: np.ndarray, log_weight_N: np.ndarray) -> None:
    write_table(path, pa.table({"prefix": prefix_N.astype(np.int32), "log_weight": log_weight_N}))


def read_shard(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The prefix and the log-weight of each proposal."""
    table = read_table(path)
    return table["prefix"].to_numpy(), table["log_weight"].to_numpy()


def read_log_weights(folder: Path) -> Iterator[tuple[int, np.ndarray]]:
    """Prefix by prefix, in order; a prefix may run over several shards."""
    current, parts = None, []
    for path in sorted(folder.glob("shard-*.arrow")):
        prefix_N, log_weight_N = read_shard(path)
        starts = np.flatnonzero(np.diff(prefix_N, prepend=prefix_N[0] - 1))
        for start, end in zip(starts, [*starts[1:], len(prefix_N)], strict=True):
            if current is not None and prefix_N[start] != current:
                yield current, np.concatenate(parts)
                parts = []
            current = int(prefix_N[start])
            parts.append(log_weight_N[start:end])
    if current is not None:
        yield current, np.concatenate(parts)
