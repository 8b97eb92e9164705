"""Blocks: T token ids, a prefix of p and a continuation of up to T - p (section 3; footnote 1).

`fixed`: documents are joined by end-of-text into one stream, cut every T tokens; a continuation may
cross the end of a document, as in the paper. `until_end`: blocks are cut inside a document; the
continuation stops at end-of-text, which belongs to it, or at T. What follows the end is padding and
is never read: `length` says where it starts.

Shapes: B blocks, T tokens of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from residual_ebm.config import BlockConfig
from residual_ebm.files.storage import read_table, write_table
from residual_ebm.randomness import generator


@dataclass(frozen=True)
class Blocks:
    """Token ids of a split, with the document in which each continuation starts."""

    ids_BT: np.ndarray  # int64, padded with end-of-text
    length_B: np.ndarray  # tokens of the block that are not padding
    document_B: np.ndarray
    true_log_prob_B: np.ndarray  # of the continuation under a known grammar; nan where unknown

    def __len__(self) -> int:
        return len(self.ids_BT)

    def select(self, index_S: np.ndarray) -> "Blocks":
        return Blocks(
            self.ids_BT[index_S],
            self.length_B[index_S],
            self.document_B[index_S],
            self.true_log_prob_B[index_S],
        )


def cut_blocks(documents: Sequence[Sequence[int]], block: BlockConfig, end_of_text: int) -> Blocks:
    """Cut the documents of one split; numbers in `document_B` are positions in `documents`."""
    if block.continuation == "fixed":
        windows, owners = _cut_stream(documents, block, end_of_text)
    else:
        windows, owners = _cut_documents(documents, block, end_of_text)
    ids_BT = np.full((len(windows), block.length), end_of_text, dtype=np.int64)
    for row, window in zip(ids_BT, windows, strict=True):
        row[: len(window)] = window
    return Blocks(
        ids_BT,
        np.array([len(window) for window in windows], dtype=np.int64),
        np.array(owners, dtype=np.int64),
        np.full(len(windows), np.nan),
    )


def _cut_stream(
    documents: Sequence[Sequence[int]], block: BlockConfig, end_of_text: int
) -> tuple[list[np.ndarray], list[int]]:
    pieces = [np.array([*document, end_of_text], dtype=np.int64) for document in documents]
    owner = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    stream = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
    starts = range(0, len(stream) - block.length + 1, block.length)
    windows = [stream[start : start + block.length] for start in starts]
    # The scored part decides whose block it is: bootstrap resamples documents by it.
    return windows, [int(owner[start + block.prefix_length]) for start in starts]


def _cut_documents(
    documents: Sequence[Sequence[int]], block: BlockConfig, end_of_text: int
) -> tuple[list[np.ndarray], list[int]]:
    windows, owners = [], []
    for number, document in enumerate(documents):
        ids = np.array([*document, end_of_text], dtype=np.int64)
        # Text may spell out end-of-text; samples never go on behind it, so no block does.
        for piece in np.split(ids, np.flatnonzero(ids == end_of_text) + 1):
            # A last piece no longer than the prefix has nothing to continue with.
            for start in range(0, len(piece) - block.prefix_length, block.length):
                windows.append(piece[start : start + block.length])
                owners.append(number)
    return windows, owners


def choose_blocks(num_blocks: int, count: int, seed: int, purpose: str) -> np.ndarray:
    """Up to `count` block numbers, drawn over the whole split, not its first documents; sorted."""
    order = generator(seed, "choose_blocks", purpose).permutation(num_blocks)
    return np.sort(order[:count])


def write_blocks(path: Path, blocks: Blocks) -> None:
    width = blocks.ids_BT.shape[1]
    flat = pa.array(blocks.ids_BT.astype(np.int32).reshape(-1))
    write_table(
        path,
        pa.table(
            {
                "ids": pa.FixedSizeListArray.from_arrays(flat, width),
                "length": blocks.length_B.astype(np.int32),
                "document": blocks.document_B.astype(np.int32),
                "true_log_prob": blocks.true_log_prob_B,
            }
        ),
    )


def read_blocks(path: Path) -> Blocks:
    table = read_table(path).combine_chunks()
    return Blocks(
        fixed_width_ids(table, "ids"),
        table["length"].to_numpy().astype(np.int64),
        table["document"].to_numpy().astype(np.int64),
        table["true_log_prob"].to_numpy().astype(np.float64),
    )


def fixed_width_ids(table: pa.Table, column: str) -> np.ndarray:
    """A column of equally long lists of token ids as one matrix."""
    width = table.schema.field(column).type.list_size
    chunks = [chunk.flatten().to_numpy() for chunk in table[column].chunks]
    flat = np.concatenate(chunks) if chunks else np.zeros(0)
    return flat.astype(np.int64).reshape(-1, width)


def write_documents(path: Path, documents: Sequence[Sequence[int]]) -> None:
    ids = pa.array([list(document) for document in documents], type=pa.list_(pa.int32()))
    write_table(path, pa.table({"ids": ids}))


def read_documents_ids(path: Path) -> list[np.ndarray]:
    column = read_table(path)["ids"]
    return [row.values.to_numpy().astype(np.int64) for row in column]
