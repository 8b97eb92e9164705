"""A causal language model whose tokens look both ways: an encoder that starts with what it knows.

transformers leaves the causal mask out where a configuration says `is_causal: false`, and saves it
with the model. Fused attention has a switch of its own besides, which must say the same: a batch
without padding has no mask at all, and would be read left to right.
"""

import torch
from transformers import PreTrainedModel


def make_bidirectional(model: PreTrainedModel) -> bool:
    """Take a model's causal mask away; False where the model does not let it go."""
    model.config.is_causal = False
    heed_direction(model)
    return _looks_ahead(model)


def is_bidirectional(model: PreTrainedModel) -> bool:
    """Whether a causal model's mask was taken away."""
    return getattr(model.config, "is_causal", True) is False


def heed_direction(model: PreTrainedModel) -> None:
    """After loading: attention's own switches follow the configuration."""
    if is_bidirectional(model):
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False


@torch.inference_mode()
def _looks_ahead(model: PreTrainedModel) -> bool:
    """Whether the first token's state depends on the last token, padding in the batch or not."""
    ids_BL = torch.tensor([[0, 1, 2], [0, 1, 3]], device=model.device)
    backbone = model.base_model
    for mask_BL in (torch.ones_like(ids_BL), None):
        states_BLH = backbone(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
        if torch.equal(states_BLH[0, 0], states_BLH[1, 0]):
            return False
    return True
