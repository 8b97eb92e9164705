"""An encoder's attention by our kernel: every token to all of its row, padding aside.

Its rows are padded at their ends, so a mask says no more than how long each row is, and that is
what the kernel takes: padding costs nothing in attention. A model is tried once before it is read
in this way, and keeps its own attention where the trial fails: where scores are more than
products, or a layer sees a window only.

Shapes: B blocks, L tokens, H hidden size, D head size.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    sdpa_mask,
)

from residual_ebm.models.at_rest import REFUSALS, at_rest
from residual_ebm.models.attention_interface import attention_named, scale_of_plain_scores
from residual_ebm.models.operators import operator
from residual_ebm.models.packed_attention import attend_both_ways, can_attend
from residual_ebm.models.plain_causal import parts_of

_NAME, _ONLY = "residual_ebm_both_ways", "residual_ebm_both_ways_only"
# A trial: the lengths of its rows, of which neither is their number.
_LENGTHS = (9, 4, 7)
# Of the difference that other tokens make, what may be rounding of half precision.
_ROUNDING = 0.25
_tried: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def attends_by_kernel(model: PreTrainedModel) -> bool:
    """Whether the kernel is there, takes this model's heads and gives what its own attention
    does."""
    if model not in _tried:
        _tried[model] = _works(model)
    return _tried[model]


def kernel_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Within, the model's tokens attend both ways by the kernel, without gradients."""
    return attention_named(model, _NAME)


def _lengths_or_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **named: Any,
) -> Tensor | None:
    """How long each row is, (B,), where that is all there is to say."""
    if mask_function is bidirectional_mask_function and q_length == kv_length:
        if attention_mask is None:
            return torch.full((batch_size,), kv_length)
        length_B = attention_mask.sum(-1)
        if torch.equal(attention_mask, torch.arange(kv_length) < length_B[:, None]):
            return length_B
    named |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **named,
    )
    return mask


def _attend_by_lengths(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    scale = scale_of_plain_scores(query, scaling, named)
    if attention_mask is None or attention_mask.ndim != 1:
        raise ValueError("no lengths: who sees whom is not known")
    return _operator(query, key, value, attention_mask, scale), None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Holes in a row are left to torch."""
    by_lengths = attention_mask is None or attention_mask.ndim == 1
    attend = _attend_by_lengths if by_lengths else sdpa_attention_forward
    outcome: tuple[Tensor, None] = attend(module, query, key, value, attention_mask, **named)
    return outcome


def _by_kernel(
    query_NHLD: Tensor, key_NKLD: Tensor, value_NKLD: Tensor, length_N: Tensor, scale: float
) -> Tensor:
    if not can_attend(query_NHLD):
        raise ValueError("heads that the kernel does not take")
    return attend_both_ways(query_NHLD, key_NKLD, value_NKLD, length_N, scale)


def _shape_of_attended(query: Tensor, *_rest: Any) -> Tensor:
    num_rows, num_heads, length, size = query.shape
    return query.new_empty(num_rows, length, num_heads, size)


@torch.inference_mode()
def _works(model: PreTrainedModel) -> bool:
    """Whether every token's state is what it is by the model's own attention, but for rounding."""
    if not all(getattr(part, "_supports_attention_backend", False) for part in parts_of(model)):
        return False
    draw = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    length_B = torch.tensor(_LENGTHS)
    shape = (2, len(_LENGTHS), max(_LENGTHS))
    ids_BL, other_BL = torch.randint(vocabulary, shape, generator=draw)
    mask_BL = torch.arange(shape[2]) < length_B[:, None]

    def states(ids_BL: Tensor) -> Tensor:
        outcome = model(input_ids=ids_BL, attention_mask=mask_BL.long())
        return outcome.last_hidden_state[mask_BL].float()

    with at_rest(model), torch.autocast("cpu", enabled=False):
        try:
            with attention_named(model, _ONLY):
                outcome = states(ids_BL)
        except REFUSALS:
            return False
        expected, elsewhere = states(ids_BL), states(other_BL)
    return bool((outcome - expected).norm() <= _ROUNDING * (elsewhere - expected).norm())


_operator = operator(
    "attend_both_ways(Tensor query, Tensor key, Tensor value, Tensor length, float scale)"
    " -> Tensor",
    _by_kernel,
    _shape_of_attended,
)
for _name, _attention in ((_NAME, _attend), (_ONLY, _attend_by_lengths)):
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, _lengths_or_mask)
