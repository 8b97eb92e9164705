"""Samples on disk: continuations with their lm_log_prob, in checksummed Arrow shards.

Rows are ordered by (prefix, sample). A chunk is what is decoded together; a shard is a few chunks.
Both depend on the recipe alone, so a shard has the same bytes however often the run was stopped.

Shapes: N rows, C tokens of a continuation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from residual_ebm.config import SamplingConfig
from residual_ebm.errors import UserError
from residual_ebm.files.blocks import fixed_width_ids
from residual_ebm.files.storage import check_manifest, read_table, write_table


class Chunk(NamedTuple):
    """Samples first_sample ... first_sample + num_samples - 1 of a run of neighbouring prefixes."""

    first_prefix: int
    num_prefixes: int
    first_sample: int
    num_samples: int


@dataclass(frozen=True)
class SampleRows:
    """Rows of a shard; `prefix_N` numbers the chosen prefixes, not the blocks of the split."""

    prefix_N: np.ndarray
    sample_N: np.ndarray
    ids_NC: np.ndarray
    length_N: np.ndarray  # tokens of the continuation that are not padding
    lm_log_prob_N: np.ndarray

    def __len__(self) -> int:
        return len(self.prefix_N)

    def select(self, chosen: np.ndarray) -> "SampleRows":
        """Some rows, by number or by a mask."""
        return SampleRows(
            self.prefix_N[chosen],
            self.sample_N[chosen],
            self.ids_NC[chosen],
            self.length_N[chosen],
            self.lm_log_prob_N[chosen],
        )


def plan_shards(num_prefixes: int, num_samples: int, config: SamplingConfig) -> list[list[Chunk]]:
    """Cut (prefixes x samples) into chunks of at most chunk_size rows, and those into shards."""
    chunks = []
    prefixes_together = max(1, config.chunk_size // num_samples)
    for first_prefix in range(0, num_prefixes, prefixes_together):
        together = min(prefixes_together, num_prefixes - first_prefix)
        for first_sample in range(0, num_samples, config.chunk_size):
            count = min(config.chunk_size, num_samples - first_sample)
            chunks.append(Chunk(first_prefix, together, first_sample, count))
    size = config.chunks_per_shard
    return [chunks[start : start + size] for start in range(0, len(chunks), size)]


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.arrow"


def write_rows(path: Path, rows: SampleRows) -> None:
    flat = pa.array(rows.ids_NC.astype(np.int32).reshape(-1))
    write_table(
        path,
        pa.table(
            {
                "prefix": rows.prefix_N.astype(np.int32),
                "sample": rows.sample_N.astype(np.int32),
                "ids": pa.FixedSizeListArray.from_arrays(flat, rows.ids_NC.shape[1]),
                "length": rows.length_N.astype(np.int32),
                "lm_log_prob": rows.lm_log_prob_N.astype(np.float64),
            }
        ),
    )


def read_rows(path: Path) -> SampleRows:
    table = read_table(path)
    return SampleRows(
        table["prefix"].to_numpy().astype(np.int64),
        table["sample"].to_numpy().astype(np.int64),
        fixed_width_ids(table, "ids"),
        table["length"].to_numpy().astype(np.int64),
        table["lm_log_prob"].to_numpy(),
    )


def join_rows(parts: list[SampleRows]) -> SampleRows:
    return SampleRows(
        np.concatenate([part.prefix_N for part in parts]),
        np.concatenate([part.sample_N for part in parts]),
        np.concatenate([part.ids_NC for part in parts]),
        np.concatenate([part.length_N for part in parts]),
        np.concatenate([part.lm_log_prob_N for part in parts]),
    )


def pick_rows(folder: Path, prefix_K: np.ndarray, sample_K: np.ndarray) -> SampleRows:
    """The rows of some (prefix, sample) pairs, in their order, read shard by shard."""
    wanted_K = _keys(prefix_K, sample_K)
    parts = []
    for path in sorted(folder.glob("shard-*.arrow")):
        rows = read_rows(path)
        chosen = np.isin(_keys(rows.prefix_N, rows.sample_N), wanted_K)
        parts.append(rows.select(chosen))
    found = join_rows(parts)
    key_N = _keys(found.prefix_N, found.sample_N)
    order = np.argsort(key_N)
    place_K = np.searchsorted(key_N, wanted_K, sorter=order)
    return found.select(order[place_K])


def _keys(prefix_N: np.ndarray, sample_N: np.ndarray) -> np.ndarray:
    return (np.asarray(prefix_N, dtype=np.int64) << 32) | np.asarray(sample_N, dtype=np.int64)


@dataclass(frozen=True)
class SampleSet:
    """A complete folder of shards, checked against its manifest."""

    folder: Path
    block_P: np.ndarray  # the block of the split that each prefix was taken from
    samples_per_prefix: int
    language_model: str  # fingerprint of the P_LM that drew them
    shards: list[Path]

    def rows(self) -> Iterator[SampleRows]:
        """One shard after the other: the whole set may not fit in memory."""
        for path in self.shards:
            yield read_rows(path)


def sample_manifest(
    block_P: np.ndarray,
    samples_per_prefix: int,
    language_model: str,
    truncation: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return {
        "blocks": [int(block) for block in block_P],
        "samples_per_prefix": samples_per_prefix,
        "language_model": language_model,
        "truncation": dict(truncation) if truncation else None,
    }


def open_samples(folder: Path, language_model: str) -> SampleSet:
    """Open negatives or proposals; they must be whole, untruncated and from this P_LM."""
    manifest = check_manifest(folder)
    refuse_truncation(manifest["truncation"], str(folder))
    if manifest["language_model"] != language_model:
        raise UserError(
            "samples",
            str(folder),
            "were drawn from another language model; delete them and run again",
        )
    return SampleSet(
        folder,
        np.array(manifest["blocks"], dtype=np.int64),
        manifest["samples_per_prefix"],
        manifest["language_model"],
        [folder / name for name in sorted(manifest["files"])],
    )


def refuse_truncation(truncation: Mapping[str, Any] | None, origin: str) -> None:
    """Weights exp(-E) are right for draws from P_LM itself; top-k draws are from another model."""
    if truncation:
        how = ", ".join(f"{key}={value}" for key, value in truncation.items())
        raise UserError(
            "truncation",
            f"{how} ({origin})",
            "bounds and training need samples of P_LM itself; draw them without top_k and top_p",
        )
