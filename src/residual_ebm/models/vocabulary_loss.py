"""Cross-entropy over a vocabulary without the whole table of logits.

Logits of a batch over 50,000 tokens are half a gigabyte in float32, and their gradient is as much
again. Here a few rows at a time go through the last layer, their loss and gradients are taken at
once, and the logits are forgotten.

Shapes: R rows (tokens to predict), H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_ebm.models.compiled import FROM_ROWS, compiled_instead_of
from residual_ebm.models.last_layer import ends_in_a_plain_layer, factors_of
from residual_ebm.models.masking import IGNORED
from residual_ebm.models.ralm import RalmForCausalLM

_LOGITS_AT_ONCE = 2**25


def next_token_loss(model: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """Mean cross-entropy of every token after the first."""
    target_R = ids_BT[:, 1:].flatten()
    parts = factors_of(model)
    if not all(map(ends_in_a_plain_layer, parts)):
        logits_BTV = model(ids_BT, use_cache=False).logits[:, :-1]
        return _cross_entropy(logits_BTV.flatten(0, 1), target_R)
    *fixed, (hidden_RH, weight_VH) = (_last_product(part, ids_BT) for part in parts)
    if isinstance(model, RalmForCausalLM):
        hidden_RH = model.config.residual_scale * hidden_RH
    loss: Tensor = _LinearCrossEntropy.apply(
        hidden_RH,
        weight_VH,
        fixed[0] if fixed else None,
        target_R,
        _product_type(hidden_RH),
        torch.is_grad_enabled(),  # which a leaf's needs_input_grad does not tell
    )
    return loss


def _last_product(model: PreTrainedModel, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The two factors of the logits: states of every token but the last, weights of the layer."""
    hidden_BTH = model.get_decoder()(ids_BT, use_cache=False).last_hidden_state
    return hidden_BTH[:, :-1].flatten(0, 1), model.get_output_embeddings().weight


def masked_token_loss(
    model: PreTrainedModel, ids_BL: Tensor, mask_BL: Tensor, target_BL: Tensor
) -> Tensor:
    """Mean cross-entropy of the hidden tokens, 0 without any; the vocabulary layer is given no
    others."""
    device = model.device
    place_R = (target_BL != IGNORED).flatten().nonzero()[:, 0].to(device)

    def only_hidden(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return inputs[0].flatten(0, -2).index_select(0, place_R), *inputs[1:]

    handle = model.get_output_embeddings().register_forward_pre_hook(only_hidden)
    try:
        logits_RV = model(input_ids=ids_BL.to(device), attention_mask=mask_BL.to(device)).logits
    finally:
        handle.remove()
    if logits_RV.ndim > 2:  # a layer that is not called, only its weights used, has seen all tokens
        logits_RV = logits_RV.flatten(0, 1).index_select(0, place_R)
    target_R = target_BL.to(device).flatten()[place_R]
    return _cross_entropy(logits_RV, target_R)


def _product_type(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _loss_and_slope_plain(
    logits_RV: Tensor, target_R: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row, and the gradient of its `share` in the logits."""
    score_RV = logits_RV.float() - logits_RV.amax(-1, keepdim=True)
    picked_R1 = score_RV.gather(1, target_R[:, None])
    mass_RV = score_RV.exp_()
    sum_R1 = mass_RV.sum(-1, keepdim=True)
    loss_R = (sum_R1.log() - picked_R1)[:, 0]
    mass_RV *= share / sum_R1
    mass_RV.scatter_add_(1, target_R[:, None], (-share).expand_as(picked_R1))
    return loss_R, mass_RV.to(logits_RV.dtype)


@compiled_instead_of(_loss_and_slope_plain, from_numbers=2**22)
def _loss_and_slope(logits_RV: Tensor, target_R: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The same without a float32 copy of the logits."""
    score_RV = logits_RV.float() - logits_RV.amax(-1, keepdim=True)
    sum_R1 = score_RV.exp().sum(-1, keepdim=True)
    loss_R = sum_R1[:, 0].log() - score_RV.gather(1, target_R[:, None])[:, 0]
    token_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    is_target_RV = token_V == target_R[:, None]
    slope_RV = score_RV.exp() * (share / sum_R1) - torch.where(is_target_RV, share, 0.0)
    return loss_R, slope_RV.to(logits_RV.dtype)


def _some_rows(num_rows: int, vocabulary: int) -> Iterator[slice]:
    """Not too many, for memory, and not too few for the compiled loop."""
    at_once = max(FROM_ROWS, _LOGITS_AT_ONCE // vocabulary)
    return (slice(start, start + at_once) for start in range(0, num_rows, at_once))


def _loss_alone(logits_RV: Tensor, target_R: Tensor) -> Tensor:
    """The sum over rows, in float64."""
    loss_R = nn.functional.cross_entropy(logits_RV.float(), target_R, reduction="none")
    return loss_R.sum(dtype=torch.float64)


def _cross_entropy(logits_RV: Tensor, target_R: Tensor) -> Tensor:
    """The mean over rows, 0 without any, of logits that a model has computed itself."""
    loss: Tensor = _CrossEntropy.apply(logits_RV, target_R, torch.is_grad_enabled())
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Its gradient is computed with it, in the type of the logits."""

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, target_R: Tensor, needs_gradient: bool) -> Tensor:
        num_rows, vocabulary = logits_RV.shape
        total = logits_RV.new_zeros((), dtype=torch.float64)
        slope_RV = torch.empty_like(logits_RV) if needs_gradient else None
        share = logits_RV.new_tensor(1 / max(1, num_rows), dtype=torch.float32)
        for rows in _some_rows(num_rows, vocabulary):
            logits = logits_RV[rows]
            if slope_RV is None:
                total += _loss_alone(logits, target_R[rows])
                continue
            loss_R, slope_RV[rows] = _loss_and_slope(logits, target_R[rows], share)
            total += loss_R.sum(dtype=torch.float64)
        if slope_RV is not None:
            ctx.save_for_backward(slope_RV)
        return (total / max(1, num_rows)).float()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor, None, None]:
        (slope_RV,) = ctx.saved_tensors
        return slope_RV * outputs[0], None, None  # one number: the slope keeps its type


class _LinearCrossEntropy(torch.autograd.Function):
    """Of logits hidden x weight; `fixed` is another such pair, whose product is added and which
    learns nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        fixed: tuple[Tensor, Tensor] | None,
        target_R: Tensor,
        dtype: torch.dtype,
        needs_gradient: bool,
    ) -> Tensor:
        hidden, weight = hidden_RH.to(dtype), weight_VH.to(dtype)
        factors = [hidden, weight]
        if fixed is not None:  # side by side, their products are added before they are rounded
            pairs = zip(factors, fixed, strict=True)
            factors = [torch.cat([own, other.to(dtype)], dim=1) for own, other in pairs]
        num_rows = len(hidden)
        if needs_gradient:
            hidden_gradient = torch.empty_like(hidden)
            weight_gradient = torch.zeros_like(weight_VH)
        total = hidden.new_zeros((), dtype=torch.float64)
        share = hidden.new_tensor(1 / num_rows, dtype=torch.float32)
        for rows in _some_rows(num_rows, len(weight)):
            logits = factors[0][rows] @ factors[1].T
            if not needs_gradient:
                total += _loss_alone(logits, target_R[rows])
                continue
            loss_R, slope = _loss_and_slope(logits, target_R[rows], share)
            total += loss_R.sum(dtype=torch.float64)
            hidden_gradient[rows] = slope @ weight
            weight_gradient += slope.T @ hidden[rows]
        if needs_gradient:
            ctx.save_for_backward(hidden_gradient.to(hidden_RH.dtype), weight_gradient)
        return (total / num_rows).float()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient * outputs[0], weight_gradient * outputs[0], None, None, None, None
