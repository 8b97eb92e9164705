"""Cross-entropy over a vocabulary without the whole table of logits.

Logits of a batch over 50,000 tokens are half a gigabyte in float32, and their gradient is as much
again. Here a few rows at a time go through the last layer, their loss and gradients are taken at
once, and the logits are forgotten.

Shapes: R rows (tokens to predict), H hidden size, V vocabulary.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_ebm.models.ralm import RalmForCausalLM

_LOGITS_AT_ONCE = 2**24


def next_token_loss(model: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """Mean cross-entropy of every token after the first."""
    target_R = ids_BT[:, 1:].flatten()
    last = model.get_output_embeddings()
    if not (isinstance(last, nn.Linear) and last.bias is None and _plain_logits(model)):
        logits_BTV = model(ids_BT, use_cache=False).logits[:, :-1]
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), target_R)
    hidden_BTH = model.get_decoder()(ids_BT, use_cache=False).last_hidden_state
    loss: Tensor = _LinearCrossEntropy.apply(
        hidden_BTH[:, :-1].flatten(0, 1),
        last.weight,
        target_R,
        _product_type(hidden_BTH),
        torch.is_grad_enabled(),  # which a leaf's needs_input_grad does not tell
    )
    return loss


_known: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def _plain_logits(model: PreTrainedModel) -> bool:
    """Whether logits are what leaves the last layer: some models scale or cap them. Tried once."""
    if model not in _known:
        left: list[Tensor] = []
        last = model.get_output_embeddings()
        handle = last.register_forward_hook(lambda _module, _inputs, output: left.append(output))
        # Several tokens: that of padding has an embedding of zeros, whose logits no scale changes.
        ids_1T = torch.arange(min(8, last.weight.shape[0]), device=model.device)[None]
        try:
            with torch.no_grad():
                logits = model(ids_1T, use_cache=False).logits
        finally:
            handle.remove()
        # Of a RALM, the last layer is one of two, though its logits may be all there is at first.
        plain = not isinstance(model, RalmForCausalLM)
        _known[model] = plain and len(left) == 1 and torch.equal(logits.float(), left[0].float())
    return _known[model]


def _product_type(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        target_R: Tensor,
        dtype: torch.dtype,
        needs_gradient: bool,
    ) -> Tensor:
        hidden, weight = hidden_RH.to(dtype), weight_VH.to(dtype)
        num_rows = len(hidden)
        if needs_gradient:
            hidden_gradient = torch.empty_like(hidden)
            weight_gradient = torch.zeros_like(weight_VH)
        total = hidden.new_zeros((), dtype=torch.float64)
        for start in range(0, num_rows, max(1, _LOGITS_AT_ONCE // len(weight))):
            rows = slice(start, start + max(1, _LOGITS_AT_ONCE // len(weight)))
            score = (hidden[rows] @ weight.T).float()
            score -= score.amax(-1, keepdim=True)
            target = target_R[rows, None]
            picked = score.gather(1, target)
            mass = score.exp_()
            sums = mass.sum(-1, keepdim=True)
            total += (sums.log() - picked).sum(dtype=torch.float64)
            if needs_gradient:
                mass /= sums * num_rows
                mass.scatter_add_(1, target, torch.full_like(picked, -1 / num_rows))
                slope = mass.to(dtype)
                hidden_gradient[rows] = slope @ weight
                weight_gradient += slope.T @ hidden[rows]
        if needs_gradient:
            ctx.save_for_backward(hidden_gradient.to(hidden_RH.dtype), weight_gradient)
        return (total / num_rows).float()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient * outputs[0], weight_gradient * outputs[0], None, None, None
