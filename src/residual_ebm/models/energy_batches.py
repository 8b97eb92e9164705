"""Many blocks through an encoder with a tokenizer of its own.

Blocks of similar length share a batch, so that little is padded; the next blocks are decoded and
encoded in a second thread while the network works on these.

Shapes: B blocks, T tokens of the language model.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from residual_ebm.models.energy_inputs import TextBridge, TextInputs

_BATCHES_AT_ONCE = 16  # blocks of so many batches are encoded together and sorted by length


def encoder_batches(
    bridge: TextBridge, ids_BT: Tensor, length_B: Tensor | None, batch_size: int
) -> Iterator[tuple[Tensor, TextInputs]]:
    """Which blocks, and what the encoder reads of them."""
    size = _BATCHES_AT_ONCE * batch_size
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
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                inputs = bridge.pad([encoded[row] for row in rows])
                yield piece.start + torch.tensor(rows), inputs
