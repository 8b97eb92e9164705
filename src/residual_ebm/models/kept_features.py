"""What a frozen P_LM computed for a set of blocks, kept in memory.

HeaT reads the same blocks at every epoch, and P_LM's states for them never change: computing them
once makes a training step cost what the head costs, not what P_LM costs.

Shapes: N blocks, T tokens of a block, C of a continuation, H hidden size of P_LM times the layers
read, B chosen blocks, R some blocks at a time.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from residual_ebm.files.states import REAL_SAMPLE, StateRows
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.language_model import LanguageModel, TokenFeatures, continuation_mask
from residual_ebm.models.layer_states import select_layers
from residual_ebm.progress import Progress

# The same everywhere: which way is taken changes last bits, and a run may go on elsewhere.
_MAX_BYTES = 6 * 2**30


class KeptFeatures:
    """Energies of HeaT for blocks chosen by number."""

    def __init__(self, energy: EnergyModel, ids_NT: Tensor, length_N: Tensor) -> None:
        self._energy = energy
        language_model = energy.language_model
        prefix_length = energy.info.prefix_length
        self._ids_NT = ids_NT
        self._mask_NC = continuation_mask(ids_NT, prefix_length, length_N)
        self._ids_NC = ids_NT[:, prefix_length:]
        shape = self._ids_NC.shape
        dtype = language_model.model.dtype
        width = (1 + len(energy.state_layers)) * language_model.hidden_size
        self._hidden_NCH = torch.empty(*shape, width, dtype=dtype)
        self._log_prob_NC = torch.empty(shape)
        self._entropy_NC = torch.empty(shape)

    def compute(self, batch_size: int, progress: Progress) -> None:
        """Run P_LM over the blocks."""
        num_blocks = len(self._ids_NT)
        with progress.bar("reading P_LM's states", num_blocks) as bar:
            for start in range(0, num_blocks, batch_size):
                ids_BT = self._ids_NT[start : start + batch_size]
                features = self._energy.language_model.features(
                    ids_BT, self._energy.info.prefix_length, self._energy.state_layers
                )
                self._keep(
                    torch.arange(start, start + len(ids_BT)),
                    features.hidden_BCH,
                    features.log_prob_BC,
                    features.entropy_BC,
                )
                bar.advance(len(ids_BT))

    def load(
        self, shards: Iterable[StateRows], layers: Sequence[int], blocks_per_prefix: int
    ) -> None:
        """Take what was kept of these layers when negatives were drawn; a prefix's blocks follow
        each other, the real one first."""
        missing = len(self._ids_NT)
        for rows in shards:
            block_R = rows.prefix_N * blocks_per_prefix + rows.sample_N - REAL_SAMPLE
            missing -= len(block_R)
            hidden_RCH = select_layers(rows.hidden_NCH, layers, self._energy.state_layers)
            self._keep(block_R, hidden_RCH, rows.log_prob_NC, rows.entropy_NC)
        assert missing == 0, f"states of {missing} blocks are missing"

    def _keep(
        self, block_R: Tensor, hidden_RCH: Tensor, log_prob_RC: Tensor, entropy_RC: Tensor
    ) -> None:
        self._hidden_NCH[block_R] = hidden_RCH.cpu()
        self._log_prob_NC[block_R] = log_prob_RC.cpu()
        self._entropy_NC[block_R] = entropy_RC.cpu()

    @staticmethod
    def fit(
        language_model: LanguageModel, num_blocks: int, num_tokens: int, num_layers: int = 0
    ) -> bool:
        """Whether so many blocks may be kept, with so many layers beside the last."""
        numbers = num_blocks * num_tokens * (1 + num_layers) * language_model.hidden_size
        return numbers * language_model.model.dtype.itemsize <= _MAX_BYTES

    def __call__(self, block_B: Tensor) -> Tensor:
        """Energies with their graph."""
        device = self._energy.language_model.device
        embed = self._energy.language_model.model.get_input_embeddings()
        with torch.no_grad():
            embedding_BCH = embed(self._ids_NC[block_B].to(device))
        features = TokenFeatures(
            self._hidden_NCH[block_B].to(device),
            embedding_BCH,
            self._log_prob_NC[block_B].to(device),
            self._entropy_NC[block_B].to(device),
        )
        return self._energy.of_features(features, self._mask_NC[block_B].to(device))
