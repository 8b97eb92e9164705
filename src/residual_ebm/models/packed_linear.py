"""Products with weights that are laid out once, as the processor multiplies them.

In every product torch lays the weight out anew. Where many rows go through a network whose weights
stay as they are, it is done once before they come: in bfloat16 without matrix tiles the same
numbers, in a few per cent less time. The layouts are a second copy of the weights and are let go
behind the last row.

Shapes: R rows, I numbers that go in, O that come out.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_ebm.models.device import has_tiles
from residual_ebm.models.operators import operator
from residual_ebm.models.plain_causal import parts_of

# Rows: below, laying out a weight takes about as long as it saves.
FROM_ROWS = 2**14
# Weights: a second copy of more may be more than there is memory for.
UP_TO = 2**31
_logger = logging.getLogger(__name__)
# Weights and their layouts, by where a weight lies, its shape and strides; as long as it is kept
# here, no other weight can come to lie there. None outside.
_Packed = dict[tuple[int, ...], tuple[Tensor, Tensor]]
_packed: ContextVar[_Packed | None] = ContextVar("packed", default=None)


def can_pack(weight_OI: Tensor) -> bool:
    """Whether such weights can be laid out here and are quicker then."""
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.dtype == torch.bfloat16
        and not torch.is_grad_enabled()  # there is no backward pass
        and not has_tiles()
        and _works()
    )


def pack(weight_OI: Tensor) -> Tensor:
    """In the processor's layout, which no other operator reads."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous())
    return packed


def multiply(rows_RI: Tensor, packed_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """rows x weight^T + bias, (R, O)."""
    product_RO: Tensor = torch.ops.mkldnn._linear_pointwise(
        rows_RI, packed_OI, bias_O, "none", [], ""
    )
    return product_RO


@functools.cache
def _works() -> bool:
    """The operators are torch's, but not among those it promises to keep: tried once."""
    draw = torch.Generator().manual_seed(0)
    rows_RI, weight_OI = (torch.randn(count, 48, generator=draw).bfloat16() for count in (40, 32))
    expected_RO = (rows_RI @ weight_OI.T).float()
    try:
        outcome_RO = multiply(rows_RI, pack(weight_OI)).float()
    except (AttributeError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        _logger.warning("weights are not laid out beforehand here: %s", reason)
        return False
    return torch.allclose(outcome_RO, expected_RO, rtol=0.02, atol=0.1)


@contextmanager
def packed_layers(model: PreTrainedModel, num_rows: int) -> Iterator[None]:
    """Within, the linear layers of a model multiply in this way if so many rows will go through
    each that it pays; but for those of the vocabulary. Weights must not change."""
    last = [part.get_output_embeddings() for part in parts_of(model)]
    layers = [
        layer
        for layer in model.modules()
        # Not a subclass that multiplies in its own way, nor one that somebody has taken over.
        if type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and not any(layer is other for other in last)
    ]
    if not (
        num_rows >= FROM_ROWS
        and all(can_pack(layer.weight) for layer in layers)
        and sum(layer.weight.numel() for layer in layers) <= UP_TO
    ):
        yield
        return
    token = _packed.set({})
    try:
        for layer in layers:
            # All alike, and no function of their own: one compiled layer serves all.
            layer.__class__ = _PackedLinear
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear
        _packed.reset(token)


class _PackedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # another thread's: there is no backward pass
            return super().forward(input)
        return _operator(input, self.weight, self.bias)


def _linear(rows: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    packed = _packed.get()
    # Another thread may be within where this one is not; autocast would round rows first.
    if packed is None or rows.dtype != weight_OI.dtype:
        return nn.functional.linear(rows, weight_OI, bias_O)
    place = (weight_OI.data_ptr(), *weight_OI.shape, *weight_OI.stride())
    if place not in packed:
        packed[place] = weight_OI, pack(weight_OI)
    return multiply(rows, packed[place][1], bias_O)


def _shape_of_product(rows: Tensor, weight_OI: Tensor, _bias_O: Tensor | None) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], weight_OI.shape[0])


_operator = operator(
    "packed_linear(Tensor rows, Tensor weight, Tensor? bias) -> Tensor", _linear, _shape_of_product
)
