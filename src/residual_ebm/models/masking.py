"""Which tokens a masked-language model must guess, and what it sees in their place.

Of the chosen tokens 80 % become the mask, 10 % a random token and 10 % stay as they are, so that
the encoder cannot rely on seeing a mask, which no block ever holds when energies are computed.

Shapes: B texts, L tokens of a text.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

IGNORED = -100  # what torch's cross-entropy passes over


class MaskedTokens(NamedTuple):
    ids_BL: Tensor
    target_BL: Tensor  # the hidden token, or IGNORED


def num_hidden(target_BL: Tensor) -> int:
    return int((target_BL != IGNORED).sum())


def mask_tokens(
    ids_BL: Tensor,
    mask_BL: Tensor,
    tokenizer: PreTrainedTokenizerFast,
    probability: float,
    draw: np.random.Generator,
) -> MaskedTokens:
    """Hide tokens; padding and special tokens are never guessed."""
    shape = tuple(ids_BL.shape)
    special = torch.tensor(sorted(tokenizer.all_special_ids))
    eligible_BL = (mask_BL > 0) & ~torch.isin(ids_BL, special)
    chosen_BL = torch.from_numpy(draw.random(shape) < probability) & eligible_BL
    # A batch without a single hidden token has no loss: hide the first that may be hidden.
    if not chosen_BL.any() and eligible_BL.any():
        chosen_BL.view(-1)[int(eligible_BL.view(-1).nonzero()[0, 0])] = True
    fate_BL = torch.from_numpy(draw.random(shape))
    random_BL = torch.from_numpy(draw.integers(0, len(tokenizer), shape))
    seen_BL = torch.where(chosen_BL & (fate_BL < 0.8), int(tokenizer.mask_token_id), ids_BL)
    seen_BL = torch.where(chosen_BL & (fate_BL >= 0.8) & (fate_BL < 0.9), random_BL, seen_BL)
    return MaskedTokens(seen_BL, torch.where(chosen_BL, ids_BL, IGNORED))
