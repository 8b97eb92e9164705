"""What a frozen P_LM computed for a set of blocks, kept in memory.

HeaT reads the same blocks at every epoch, and P_LM's states for them never change: computing them
once makes a training step cost what the head costs, not what P_LM costs.

Shapes: N blocks, T tokens of a block, C of a continuation, H hidden size of P_LM, B chosen blocks.
"""

import torch
from torch import Tensor

from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.language_model import LanguageModel, TokenFeatures, continuation_mask
from residual_ebm.progress import Progress

# The same everywhere: which way is taken changes last bits, and a run may go on elsewhere.
_MAX_BYTES = 6 * 2**30


class KeptFeatures:
    """Energies of HeaT for blocks chosen by number."""

    def __init__(
        self,
        energy: EnergyModel,
        ids_NT: Tensor,
        length_N: Tensor,
        *,
        batch_size: int,
        progress: Progress,
    ) -> None:
        self._energy = energy
        language_model = energy.language_model
        prefix_length = energy.info.prefix_length
        self._mask_NC = continuation_mask(ids_NT, prefix_length, length_N)
        self._ids_NC = ids_NT[:, prefix_length:]
        shape = self._ids_NC.shape
        dtype = language_model.model.dtype
        self._hidden_NCH = torch.empty(*shape, language_model.hidden_size, dtype=dtype)
        self._log_prob_NC = torch.empty(shape)
        self._entropy_NC = torch.empty(shape)
        with progress.bar("reading P_LM's states", len(ids_NT)) as bar:
            for start in range(0, len(ids_NT), batch_size):
                rows = slice(start, start + batch_size)
                features = language_model.features(ids_NT[rows], prefix_length)
                self._hidden_NCH[rows] = features.hidden_BCH.cpu()
                self._log_prob_NC[rows] = features.log_prob_BC.cpu()
                self._entropy_NC[rows] = features.entropy_BC.cpu()
                bar.advance(len(ids_NT[rows]))

    @staticmethod
    def fit(language_model: LanguageModel, num_blocks: int, num_tokens: int) -> bool:
        """Whether so many blocks may be kept."""
        numbers = num_blocks * num_tokens * language_model.hidden_size
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
