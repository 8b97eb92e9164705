"""Samples that begin alike are one row of the network until they part.

What a network computes for a token depends on the tokens before it and on nothing else, so samples
of a prefix that have the same tokens so far have the same states and the same next distribution.
These are computed once: 512 samples of a real prefix, drawn by SmolLM2-135M, had 50 to 240 first
tokens and 300 to 390 first pairs; of the ten likeliest tokens alone 10 and 70 to 90.

Shapes: G prefixes, S samples of each, N = G x S, U rows of the network: as many for each prefix.
"""

import torch
from torch import Tensor

# Of a prefix's samples, the share of different beginnings from which on each has a row of its own:
# what is saved above it is hardly more than what handing out the logits costs.
_PARTED_FROM = 0.9


class Beginnings:
    """Which row of the network each sample has, `row_N`; at first that of its prefix."""

    def __init__(self, num_prefixes: int, samples_per_prefix: int, device: torch.device) -> None:
        self._samples_per_prefix = samples_per_prefix
        self._prefix_G = torch.arange(num_prefixes, device=device)
        self._rows_per_prefix = 1
        self._count = num_prefixes  # of different beginnings so far
        self.row_N = self._prefix_G.repeat_interleave(samples_per_prefix)

    def go_on(self, token_N: Tensor) -> tuple[Tensor, Tensor | None]:
        """The newest token of each row from now on, (U,), and the row until now that it follows;
        None where none has parted, so that rows stay what they were."""
        if self._rows_per_prefix == self._samples_per_prefix:
            return token_N, None
        beginning_2B, number_N = torch.stack([self.row_N, token_N]).unique(
            dim=1, return_inverse=True
        )
        before_B, token_B = beginning_2B
        nobody_parts = len(before_B) == self._count
        self._count = len(before_B)
        prefix_B = before_B // self._rows_per_prefix  # sorted: those of a prefix are neighbours
        count_G = prefix_B.bincount(minlength=len(self._prefix_G))
        most = int(count_G.max())
        if most > _PARTED_FROM * self._samples_per_prefix:
            before_N = self.row_N
            self._rows_per_prefix = self._samples_per_prefix
            self.row_N = torch.arange(len(token_N), device=token_N.device)
            return token_N, before_N
        # As many rows for each prefix: one with fewer beginnings has rows nobody reads.
        before_U = (self._prefix_G * self._rows_per_prefix).repeat_interleave(most)
        token_U = token_N[:: self._samples_per_prefix].repeat_interleave(most)
        place_B = torch.arange(len(prefix_B), device=token_N.device)
        first_G = count_G.cumsum(0) - count_G
        row_B = prefix_B * most + place_B - first_G[prefix_B]
        before_U[row_B], token_U[row_B] = before_B, token_B
        self._rows_per_prefix = most
        self.row_N = row_B[number_N]
        return token_U, None if nobody_parts else before_U
