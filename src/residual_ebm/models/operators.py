"""Operators of our own, which a compiled layer calls and does not look inside.

They are defined by hand: `torch.library.custom_op` would look after each call for a tenth of a
millisecond.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("residual_ebm", "FRAGMENT")


def operator(
    schema: str, function: Callable[..., Tensor], shape: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """What calls `function` by the name in its schema; `shape` makes an empty tensor like what it
    gives."""
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    name = schema.partition("(")[0]
    _library.impl(name, function, "CompositeExplicitAutograd")
    defined: Any = getattr(torch.ops.residual_ebm, name).default
    torch.library.register_fake(defined, shape, lib=_library)
    return defined
