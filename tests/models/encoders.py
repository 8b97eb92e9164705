"""Small encoders of several families, with random weights that look at every token.

Shapes: B blocks, L tokens, H hidden size.
"""

from typing import Any

import torch
import toys
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
}
# What is peculiar to each, if anything.
TAKEN: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "distilbert": {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 96},
    "electra": {"embedding_size": 64},
    "albert": {"embedding_size": 32},
    "xlm-roberta": {},
    "eurobert": {},
}
LEFT: dict[str, dict[str, Any]] = {
    "mpnet": {},  # scores that depend on how far apart tokens are
    "convbert": {},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 4},  # half see a window
}
LENGTHS = (23, 1, 16, 30)


def encoder(model_type: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    sizes = {**_SIZES, **(TAKEN | LEFT)[model_type], **changes}
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **sizes), dtype=torch.float32)
    return toys.scale_up(model, 5.0).to(dtype)


def batch(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids_BL = torch.randint(2, 50, (len(lengths), max(lengths)), generator=draw)
    mask_BL = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return ids_BL.where(mask_BL, 1), mask_BL


@torch.inference_mode()
def states(model: PreTrainedModel, ids_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
    output = model(input_ids=ids_BL, attention_mask=None if mask_BL is None else mask_BL.long())
    hidden_BLH: Tensor = output.last_hidden_state.float()
    return hidden_BLH if mask_BL is None else hidden_BLH[mask_BL]


def error(outcome: Tensor, expected: Tensor) -> float:
    return float((outcome - expected).norm() / expected.norm())
