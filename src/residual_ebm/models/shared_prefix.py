"""Attention of many rows over a prefix they share.

The keys and values of a prefix are kept once, not once a row, and all rows' queries meet them in
one matrix product. Attention over a row's own tokens is computed apart, and the two are merged by
their log-sum-exps, which is exact:

    softmax over both = (out_prefix e^lse_prefix + out_own e^lse_own) / (e^lse_prefix + e^lse_own).

It enters through transformers' attention interface and cache classes, so it serves every model that
uses them with plain causal attention; the others are asked to repeat the prefix for each row.

Shapes: G prefixes, P tokens of a prefix, N = G x rows of a prefix, L new tokens a row, S own tokens
a row has so far, H heads, K heads of keys and values, R = H / K, D head size.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    Cache,
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from residual_ebm.models.attention_interface import attention_named, scale_of_plain_scores
from residual_ebm.models.compiled import FROM_ROWS, compiled_instead_of
from residual_ebm.models.device import has_tiles
from residual_ebm.models.operators import operator
from residual_ebm.models.packed_attention import PackedLayer, attend_causal, can_attend

_NAME, _CAUSAL = "residual_ebm_shared_prefix", "residual_ebm_causal"


class _Layer:
    """The keys and values of a prefix, and room for those of each row's own tokens after it."""

    def __init__(self, prefix: DynamicLayer, num_tokens: int) -> None:
        self._cached = prefix
        self._prefix: tuple[Tensor, ...] = (prefix.keys, prefix.values)
        self.num_prefixes = len(prefix.keys)
        self._room = num_tokens
        self._filled = 0
        self._buffers: list[Tensor] = []
        self._packed: PackedLayer | None = None

    @property
    def packed(self) -> PackedLayer:
        """The same in the kernel's layout, from its first use on: many prefixes are gigabytes, so
        they are not kept in both."""
        if self._packed is None:
            keys, values = self._prefix
            self._packed = PackedLayer(keys, values, self._room)
            # What is asked of the cache from now on is its shape.
            self._cached.keys = self._cached.values = keys.new_zeros(()).expand(keys.shape)
            self._prefix = ()
        return self._packed

    def prefix_for(self, num_heads: int, num_queries: int) -> tuple[Tensor, ...]:
        """The prefix's keys and values, (G, K, P, D), or (G, H, P, D) where products are quick and
        a prefix has more queries than tokens: repeating it once for heads that share it then costs
        less than moving the queries at every step, which makes for fewer and larger products."""
        repeats = num_heads // self._prefix[0].shape[1]
        if repeats > 1 and num_queries > self._prefix[0].shape[2] and has_tiles():
            self._prefix = tuple(
                states.repeat_interleave(repeats, dim=1) for states in self._prefix
            )
        return self._prefix

    def append(self, key_NK1D: Tensor, value_NK1D: Tensor) -> tuple[Tensor, Tensor]:
        """All own keys and values so far, with those of the newest token."""
        if not self._buffers:
            num_rows, kv_heads, _, size = key_NK1D.shape
            shape = (num_rows, kv_heads, self._room, size)
            self._buffers = [states.new_empty(shape) for states in (key_NK1D, value_NK1D)]
        for buffer, states in zip(self._buffers, (key_NK1D, value_NK1D), strict=True):
            buffer[:, :, self._filled] = states[:, :, 0]
        self._filled += 1
        keys, values = (buffer[:, :, : self._filled] for buffer in self._buffers)
        return keys, values

    def follow(self, before_N: Tensor) -> None:
        """From now on, each row goes on from what the row named for it has had so far."""
        if self._packed is not None:
            self._packed.follow(before_N)
        before = self._buffers
        self._buffers = [old.new_empty((len(before_N), *old.shape[1:])) for old in before]
        for old, new in zip(before, self._buffers, strict=True):
            filled = (slice(None), slice(None), slice(self._filled))
            torch.index_select(old[filled], 0, before_N, out=new[filled])


_layers: ContextVar[list[_Layer]] = ContextVar("layers")


class AfterPrefix(Cache):
    """Stands where a model expects a cache; keys and values are kept by the attention itself."""

    def __init__(self, prefix_cache: DynamicCache, num_tokens: int) -> None:
        super().__init__(layers=prefix_cache.layers)
        self.own = [_Layer(layer, num_tokens) for layer in prefix_cache.layers]

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def follow(self, before_N: Tensor) -> None:
        """Rows part: each goes on from the own tokens of the row named for it."""
        for layer in self.own:
            layer.follow(before_N)


@contextmanager
def shared_prefix(model: PreTrainedModel, cache: AfterPrefix) -> Iterator[None]:
    """Within, the model's rows attend to the prefix in `cache` and to their own tokens."""
    token = _layers.set(cache.own)
    try:
        with attention_named(model, _NAME):
            yield
    finally:
        _layers.reset(token)


@contextmanager
def causal_prefix(model: PreTrainedModel) -> Iterator[None]:
    """Within, a model that may share its prefixes reads them."""
    with attention_named(model, _CAUSAL):
        yield


def prefix_batches(ids_NT: Tensor, prefix_length: int, batch_size: int) -> Iterator[slice]:
    """Rows that go through a model together, at most `batch_size`: either some rows of one prefix,
    or all rows of some that have as many each, so that no prefix is read for every row."""
    prefixes = ids_NT[:, :prefix_length].unique_consecutive(dim=0, return_counts=True)
    start = 0
    for count, alike in itertools.groupby(prefixes[1].tolist()):
        end = start + count * len(list(alike))
        if count < batch_size:
            at_once = batch_size // count * count
            bounds = list(range(start, end, at_once))
        else:
            bounds = [
                first
                for prefix in range(start, end, count)
                for first in range(prefix, prefix + count, batch_size)
            ]
        for first, last in itertools.pairwise([*bounds, end]):
            yield slice(first, last)
        start = end


def run_after_prefix(
    model: PreTrainedModel,
    ids_NT: Tensor,
    prefix_length: int,
    **of_prefix: Any,
) -> list[Any]:
    """What a model gives for the prefixes, G rows, and for the tokens after them, N rows.

    Rows that follow each other with the same prefix share it, if each prefix has as many rows.
    `of_prefix` are arguments for the prefixes alone.
    """
    prefix_GP, count_G = ids_NT[:, :prefix_length].unique_consecutive(dim=0, return_counts=True)
    if not bool((count_G == count_G[0]).all()):
        prefix_GP = ids_NT[:, :prefix_length]
    cache = DynamicCache()
    with causal_prefix(model):
        outputs = [model(prefix_GP, past_key_values=cache, use_cache=True, **of_prefix)]
    length = ids_NT.shape[1]
    if length > prefix_length:
        after = AfterPrefix(cache, num_tokens=1)
        with shared_prefix(model, after):
            rest = model(
                ids_NT[:, prefix_length:],
                past_key_values=after,
                position_ids=torch.arange(prefix_length, length, device=ids_NT.device)[None],
                use_cache=True,
            )
        outputs.append(rest)
    return outputs


def forward_after_prefix(
    model: PreTrainedModel, ids_NT: Tensor, prefix_length: int
) -> list[Tensor]:
    """Logits behind the prefix, (G, 1, V), and behind each token after it, (N, T - p, V)."""
    outputs = run_after_prefix(model, ids_NT, prefix_length, logits_to_keep=1)
    return [output.logits for output in outputs]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    assert attention_mask is None
    scale = scale_of_plain_scores(query, scaling, named)
    layer: int = module.layer_idx  # type: ignore[assignment]
    return _operator(query, key, value, layer, scale), None


def _attend_causal(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    assert attention_mask is None
    scale = scale_of_plain_scores(query, scaling, named)
    if can_attend(query):
        return attend_causal(query, key, value, scale), None
    out_NHLD = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] > key.shape[1]
    )
    return out_NHLD.transpose(1, 2).contiguous(), None


def _attend_after_prefix(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float
) -> Tensor:
    """Attention of new tokens (N, H, L, D) to prefix and own tokens, as (N, L, H, D)."""
    kept = _layers.get()[layer]
    num_rows, num_heads, num_new, size = query.shape
    if num_new == 1 and can_attend(query):
        return kept.packed.attend(query, key, value, scale)
    kv_heads = key.shape[1]
    repeats = num_heads // kv_heads
    prefix_out, prefix_lse = _attend_to_prefix(query, kept, scale)

    if num_new == 1:  # heads that share keys are queries again, with nothing to mask
        own_shape = (num_rows, kv_heads, repeats, size)
        keys, values = kept.append(key, value)
        # A first own token alone would be compiled apart.
        merge = _own_by_attention if keys.shape[2] == 1 else _merge_own
        out_NKRD = merge(
            query.reshape(own_shape).contiguous(),
            keys,
            values,
            prefix_out.reshape(own_shape),
            prefix_lse.reshape(own_shape[:-1]),
            torch.tensor(scale),
        )
        return out_NKRD.reshape(num_rows, 1, num_heads, size)
    # Several new tokens at once are a row's first, and all it will have.
    key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    own_out, own_lse = _attention(query, key, value, scale, is_causal=True)
    out_NHLD = _merge(prefix_out, prefix_lse, own_out, own_lse)
    return out_NHLD.transpose(1, 2).contiguous()


def _attend_to_prefix(query_NHLD: Tensor, kept: _Layer, scale: float) -> tuple[Tensor, Tensor]:
    """Rows of a prefix, their new tokens and heads that share keys are all just queries to it."""
    num_rows, num_heads, num_new, size = query_NHLD.shape
    keys, values = kept.prefix_for(num_heads, num_new * num_rows // kept.num_prefixes)
    groups, key_heads = keys.shape[:2]
    # Where every head has its keys and there is one new token, no number is moved: a transposed
    # view goes in, and what comes out lies row after row in memory.
    query_GMKD = (
        query_NHLD.view(num_rows, key_heads, -1, num_new, size)
        .permute(0, 2, 3, 1, 4)
        .reshape(groups, -1, key_heads, size)
    )
    out_GKMD, lse_GKM = _attention(query_GMKD.transpose(1, 2), keys, values, scale, is_causal=False)
    by_row = (num_rows, num_heads // key_heads, num_new, key_heads)
    out_NKRLD = out_GKMD.transpose(1, 2).reshape(*by_row, size).permute(0, 3, 1, 2, 4)
    lse_NKRL = lse_GKM.transpose(1, 2).reshape(by_row).permute(0, 3, 1, 2)
    return out_NKRLD.reshape(query_NHLD.shape), lse_NKRL.reshape(query_NHLD.shape[:-1])


def _shape_of_attended(query: Tensor, *_rest: Any) -> Tensor:
    num_rows, num_heads, num_new, size = query.shape
    return query.new_empty(num_rows, num_new, num_heads, size)


def _merge(prefix_out: Tensor, prefix_lse: Tensor, own_out: Tensor, own_lse: Tensor) -> Tensor:
    weight = torch.sigmoid(own_lse - prefix_lse)[..., None].to(prefix_out.dtype)
    return torch.lerp(prefix_out, own_out, weight)


def _own_by_attention(
    query_NKRD: Tensor,
    key_NKSD: Tensor,
    value_NKSD: Tensor,
    prefix_out_NKRD: Tensor,
    prefix_lse_NKR: Tensor,
    scale: Tensor,
) -> Tensor:
    """Attention over a row's own tokens, merged with what the prefix gave."""
    own_out, own_lse = _attention(query_NKRD, key_NKSD, value_NKSD, float(scale), is_causal=False)
    return _merge(prefix_out_NKRD, prefix_lse_NKR, own_out, own_lse)


def _two_own_tokens(
    query: Tensor, key: Tensor, value: Tensor, prefix_out: Tensor, prefix_lse: Tensor, scale: Tensor
) -> tuple[Tensor, ...]:
    """How many tokens samples have when they are many rows at last depends on what was drawn."""
    few = slice(FROM_ROWS)
    own = (key[few, :, :2], value[few, :, :2])
    return query[few], *own, prefix_out[few], prefix_lse[few], scale


@compiled_instead_of(_own_by_attention, from_numbers=2**17, first=_two_own_tokens)
def _merge_own(
    query_NKRD: Tensor,
    key_NKSD: Tensor,
    value_NKSD: Tensor,
    prefix_out_NKRD: Tensor,
    prefix_lse_NKR: Tensor,
    scale: Tensor,
) -> Tensor:
    """The same in one loop: a few queries to a few tokens are too little for matrix products."""
    product_NKRSD = query_NKRD.float().unsqueeze(3) * key_NKSD.float().unsqueeze(2)
    score_NKRS = product_NKRSD.sum(-1) * scale
    largest_NKR1 = score_NKRS.amax(-1, keepdim=True)
    mass_NKRS = (score_NKRS - largest_NKR1).exp()
    total_NKR1 = mass_NKRS.sum(-1, keepdim=True)
    own_NKRD = (mass_NKRS.unsqueeze(-1) * value_NKSD.float().unsqueeze(2)).sum(3) / total_NKR1
    own_lse_NKR1 = largest_NKR1 + total_NKR1.log()
    weight_NKR1 = torch.sigmoid(own_lse_NKR1 - prefix_lse_NKR.unsqueeze(-1))
    return torch.lerp(prefix_out_NKRD.float(), own_NKRD, weight_NKR1).to(query_NKRD.dtype)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores (float32)."""
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
        return out, lse
    score = (query @ key.mT).float() * scale
    if is_causal:
        future = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).triu(1)
        score = score.masked_fill(future, -torch.inf)
    lse = score.logsumexp(-1)
    return (score - lse[..., None]).exp().to(value.dtype) @ value, lse


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Both mask by themselves."""


_operator = operator(
    "attend_after_prefix(Tensor query, Tensor key, Tensor value, SymInt layer, float scale)"
    " -> Tensor",
    _attend_after_prefix,
    _shape_of_attended,
)
AttentionInterface.register(_NAME, _attend)
AttentionInterface.register(_CAUSAL, _attend_causal)
for _name in (_NAME, _CAUSAL):
    AttentionMaskInterface.register(_name, _no_mask)
