"""What an energy learns from: real blocks, and the stored negatives of their prefixes.

Shapes: P prefixes, S stored negatives of each, B prefixes of a batch, K negatives of each,
J = 1 + K blocks of a prefix, the positive first, T tokens of a block, C of a continuation.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from residual_ebm.config import BlockConfig, Recipe
from residual_ebm.files.blocks import Blocks, read_blocks
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.samples import SampleSet, join_rows, open_samples
from residual_ebm.files.storage import is_complete
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.stages.negatives import source_split


@dataclass(frozen=True)
class Contrast:
    """Real blocks and the stored negatives of their prefixes."""

    positives: Blocks
    negative_ids_PSC: np.ndarray
    negative_length_PS: np.ndarray
    prefix_length: int
    states: Path | None = None  # where P_LM's states of all these blocks are, if they were kept

    def __len__(self) -> int:
        return len(self.positives)

    @property
    def num_stored(self) -> int:
        return int(self.negative_ids_PSC.shape[1])

    def batch(self, prefix_B: np.ndarray, sample_BK: np.ndarray) -> tuple[Tensor, Tensor]:
        """Each real block, then the chosen stored negatives of its prefix: (B x J, T) ids and
        lengths."""
        rows_B1 = prefix_B[:, None]
        real = self.positives.select(prefix_B)
        num_blocks = 1 + sample_BK.shape[1]
        ids_BJT = np.repeat(real.ids_BT[:, None], num_blocks, axis=1)
        ids_BJT[:, 1:, self.prefix_length :] = self.negative_ids_PSC[rows_B1, sample_BK]
        length_BK = self.prefix_length + self.negative_length_PS[rows_B1, sample_BK]
        length_BJ = np.concatenate([real.length_B[:, None], length_BK], axis=1)
        return (
            torch.from_numpy(ids_BJT.reshape(-1, ids_BJT.shape[2])),
            torch.from_numpy(length_BJ.reshape(-1)),
        )

    def every_block(self) -> tuple[Tensor, Tensor]:
        """Ids and lengths of all blocks, prefix by prefix, the real one first."""
        every_P = np.arange(len(self))
        return self.batch(every_P, np.tile(np.arange(self.num_stored), (len(self), 1)))


def read_contrast(
    blocks: Blocks, samples: SampleSet, block: BlockConfig, states: Path | None = None
) -> Contrast:
    """Put every stored negative beside the real block of its prefix."""
    rows = join_rows(list(samples.rows()))
    shape = (len(samples.block_P), samples.samples_per_prefix)
    ids_PSC = np.empty((*shape, block.num_new_tokens), dtype=np.int64)
    length_PS = np.empty(shape, dtype=np.int64)
    ids_PSC[rows.prefix_N, rows.sample_N] = rows.ids_NC
    length_PS[rows.prefix_N, rows.sample_N] = rows.length_N
    real = blocks.select(samples.block_P)
    return Contrast(real, ids_PSC, length_PS, block.prefix_length, states)


def contrast_of(
    recipe: Recipe, run_dir: RunDirectory, name: str, split: str, language_model: LanguageModel
) -> Contrast:
    """The training or validation blocks of a language model's energies."""
    blocks = read_blocks(run_dir.blocks / f"{source_split(run_dir, split)}.arrow")
    samples = open_samples(run_dir.negatives(name, split), language_model.fingerprint)
    states = run_dir.states / name / split
    return read_contrast(blocks, samples, recipe.block, states if is_complete(states) else None)
