"""Attention of ours in models of others: the door that transformers leaves open for it.

A model asks for attention by the name in its configuration and hands over queries, keys, values, a
mask of whatever form that attention has made, and a scale. What else it hands over may change the
scores; attention that knows nothing of it must refuse.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from residual_ebm.models.plain_causal import configs_of

# What models hand to attention that makes its scores others than products of queries and keys.
_CHANGES_SCORES = ("softcap", "s_aux", "position_bias")


@contextmanager
def attention_named(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within, the model and those inside it ask for this attention."""
    before = [(config, config._attn_implementation) for config in configs_of(model)]
    for config, _ in before:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def scale_of_plain_scores(query: Tensor, scaling: float | None, named: dict[str, Any]) -> float:
    """What products of queries and keys are multiplied by; refuses what would change them else."""
    for name in _CHANGES_SCORES:
        if named.get(name) is not None:
            raise ValueError(f"{name}: not known to attention of ours")
    return 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
