"""Many blocks through an encoder with a tokenizer of its own.

Blocks of similar length share a batch, so that little is padded; the next blocks are decoded and
encoded in a second thread while the network works on these.

Shapes: B blocks, T tokens of the language model.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from residual_ebm.models.energy_inputs import FULL_REGISTERS, TextBridge, TextInputs

_BATCHES_AT_ONCE = 8  # blocks of so many batches are encoded together and sorted by length
_TOKENS_AT_ONCE = 4096  # on a CPU: what a layer hands to the next stays in the processor's cache


def rows_at_once(batch_size: int, length: int, device: torch.device) -> int:
    """How many blocks of so many tokens go through a network together, at most `batch_size`."""
    if device.type != "cpu":
        return batch_size
    return max(1, min(batch_size, _TOKENS_AT_ONCE // length))


def encoder_batches(
    bridge: TextBridge,
    ids_BT: Tensor,
    length_B: Tensor | None,
    batch_size: int,
    device: torch.device,
    lengths_of: int = FULL_REGISTERS,
) -> Iterator[tuple[Tensor, TextInputs]]:
    """Which blocks, and what the encoder reads of them, padded to a multiple of `lengths_of`."""
    # By the language model's own tokens: how many the encoder makes of them is not known yet.
    size = _BATCHES_AT_ONCE * rows_at_once(batch_size, ids_BT.shape[1], device)
    pieces = [slice(start, start + size) for start in range(0, len(ids_BT), size)]

    def encode(piece: slice) -> list[list[int]]:
        return bridge.encode(ids_BT[piece], None if length_B is None else length_B[piece])

    with ThreadPoolExecutor(max_workers=1) as thread:
        coming = thread.submit(encode, pieces[0])
        for number, piece in enumerate(pieces):
            encoded = coming.result()
            if number + 1 < len(pieces):
                coming = thread.submit(encode, pieces[number + 1])
            order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]))
            longest = len(encoded[order[-1]])
            at_once = rows_at_once(batch_size, longest, device)
            for start in range(0, len(order), at_once):
                rows = order[start : start + at_once]
                inputs = bridge.pad([encoded[row] for row in rows], lengths_of)
                yield piece.start + torch.tensor(rows), inputs
