"""One token after the other behind some prefixes, in the best of three ways that a model allows.

    shared      keys and values of a prefix are kept once, and all its rows attend to them
    repeated    they are kept once a row: models with attention of their own
    read again  every step reads everything before it: models whose memory is no keys and values

Which of them a model allows is found by a trial of a few tokens, once: what its class says of
itself is not enough, and a model that quietly forgets its prefix would be sampled from a
distribution that is not the one it is scored by.

Shapes: G prefixes, P tokens of a prefix, N samples or rows, U rows where samples that begin alike
have one, C new tokens, V vocabulary.
"""

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from residual_ebm.models.at_rest import REFUSALS, at_rest
from residual_ebm.models.beginnings import Beginnings
from residual_ebm.models.compiled import compiled_layers
from residual_ebm.models.plain_causal import may_share_prefix
from residual_ebm.models.shared_prefix import (
    AfterPrefix,
    causal_prefix,
    run_after_prefix,
    shared_prefix,
)

NextLogits = Callable[[Tensor, int], tuple[Tensor, Tensor]]

_PREFIX_TOKENS_AT_ONCE = 4096
_logger = logging.getLogger(__name__)


class Way(Enum):
    SHARED = "shares its prefix"
    REPEATED = "has attention of its own; its prefix is repeated for each sample"
    READ_AGAIN = "keeps no keys and values; all tokens are read again for every new one"


def way_of(model: PreTrainedModel, length: int) -> Way:
    """The best way for passages of so many tokens."""
    if can_share_prefix(model, length):
        return Way.SHARED
    return Way.REPEATED if _works(model, Way.REPEATED) else Way.READ_AGAIN


def can_share_prefix(model: PreTrainedModel, length: int) -> bool:
    return may_share_prefix(model, length) and _works(model, Way.SHARED)


def _read_some_at_a_time(
    model: PreTrainedModel, ids_GP: Tensor, way: Way
) -> tuple[Tensor, DynamicCache]:
    """The logits behind each prefix and the keys and values of all; some prefixes at a time, so
    that what a layer hands to the next stays in the processor's cache."""
    logits, caches = [], []
    for part in ids_GP.split(max(1, _PREFIX_TOKENS_AT_ONCE // ids_GP.shape[1])):
        cache = DynamicCache()
        with causal_prefix(model) if way is Way.SHARED else nullcontext():
            output = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits.append(output.logits[:, -1])
        caches.append(cache)
    first = caches[0]
    if len(caches) > 1:
        for layer, *others in zip(*(cache.layers for cache in caches), strict=True):
            layer.keys = torch.cat([part.keys for part in (layer, *others)])
            layer.values = torch.cat([part.values for part in (layer, *others)])
    return torch.cat(logits), first


def begin(
    model: PreTrainedModel, ids_GP: Tensor, samples_per_prefix: int, num_tokens: int
) -> tuple[Tensor, NextLogits]:
    """The logits behind each prefix, (G, V), and a function from each sample's last token (N,) and
    its number after the prefix to the next logits, (U, V), and which of them each sample has, (N,).
    """
    prefix_length = ids_GP.shape[1]
    way = way_of(model, prefix_length + num_tokens)
    if way is not Way.SHARED:
        _tell_once(type(model).__name__, way)
    if way is Way.READ_AGAIN:
        return _reading_again(model, ids_GP, samples_per_prefix)
    logits_GV, prefix_cache = _read_some_at_a_time(model, ids_GP, way)
    if way is Way.REPEATED:
        prefix_cache.batch_repeat_interleave(samples_per_prefix)
        return logits_GV, _repeating(model, prefix_cache, prefix_length)
    # The last token is drawn but never read again, so it needs no room.
    cache = AfterPrefix(prefix_cache, num_tokens - 1)
    beginnings = Beginnings(len(ids_GP), samples_per_prefix, ids_GP.device)

    def next_logits(token_N: Tensor, number: int) -> tuple[Tensor, Tensor]:
        token_U, before_U = beginnings.go_on(token_N)
        if before_U is not None:
            cache.follow(before_U)
        with compiled_layers(model, len(token_U)):
            output = _step(model, token_U[:, None], cache, prefix_length + number, logits_to_keep=1)
        return output.logits[:, -1], beginnings.row_N

    return logits_GV, next_logits


def _repeating(model: PreTrainedModel, cache: Cache, prefix_length: int) -> NextLogits:
    def next_logits(token_N: Tensor, number: int) -> tuple[Tensor, Tensor]:
        output = _step(model, token_N[:, None], cache, prefix_length + number, logits_to_keep=1)
        return output.logits[:, -1], _own_row_each(token_N)

    return next_logits


def _step(
    model: PreTrainedModel, ids_N1: Tensor, cache: Cache, position: int, **options: Any
) -> Any:
    """The tokens at one position, read behind what `cache` holds."""
    options |= {
        "past_key_values": cache,
        "position_ids": torch.full((1, 1), position, device=ids_N1.device),
        "use_cache": True,
    }
    if isinstance(cache, AfterPrefix):
        with shared_prefix(model, cache):
            return model(ids_N1, **options)
    return model(ids_N1, **options)


def _reading_again(
    model: PreTrainedModel, ids_GP: Tensor, samples_per_prefix: int
) -> tuple[Tensor, NextLogits]:
    def logits_behind(ids: Tensor) -> Tensor:
        return cast(Tensor, model(ids, use_cache=False, logits_to_keep=1).logits[:, -1])

    rows = [ids_GP.repeat_interleave(samples_per_prefix, dim=0)]

    def next_logits(token_N: Tensor, _number: int) -> tuple[Tensor, Tensor]:
        rows.append(token_N[:, None])
        return logits_behind(torch.cat(rows, dim=1)), _own_row_each(token_N)

    return logits_behind(ids_GP), next_logits


def _own_row_each(token_N: Tensor) -> Tensor:
    return torch.arange(len(token_N), device=token_N.device)


@functools.cache
def _tell_once(model: str, way: Way) -> None:
    _logger.warning("%s %s", model, way.value)


# A trial: rows of one prefix, and tokens of each after it.
_ROWS, _PREFIX, _OWN = 2, 5, 3
# Of the difference that another prefix makes, what may be rounding: a prefix that is not heeded
# makes about 1, half precision a tenth, more where a rounded score asks for another expert.
_ROUNDING, _ROUNDING_OF_HALVES = 0.01, 0.5
_tried: WeakKeyDictionary[PreTrainedModel, dict[Way, bool]] = WeakKeyDictionary()


def _works(model: PreTrainedModel, way: Way) -> bool:
    known = _tried.setdefault(model, {})
    if way not in known:
        known[way] = _try(model, way)
    return known[way]


@torch.inference_mode()
def _try(model: PreTrainedModel, way: Way) -> bool:
    """Whether tokens behind a prefix give in this way what a pass over whole rows gives."""
    device = model.device
    draw = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    shape = (2 + _ROWS, _PREFIX + _OWN)
    one, other, *own = torch.randint(vocabulary, shape, generator=draw).to(device)
    own_NC = torch.stack(own)[:, _PREFIX:]
    ids_NT, other_NT = (
        torch.cat([prefix[:_PREFIX].expand(_ROWS, -1), own_NC], dim=1) for prefix in (one, other)
    )
    with at_rest(model), torch.autocast(device.type, enabled=False):
        expected, elsewhere = (
            _outcome(model(ids, use_cache=False))[:, _PREFIX:] for ids in (ids_NT, other_NT)
        )
        try:
            outcomes = _step_by_step(model, ids_NT, way)
        except REFUSALS:
            return False
    share = _ROUNDING_OF_HALVES if model.dtype.itemsize < 4 else _ROUNDING
    allowed = share * (elsewhere - expected).norm()
    return all(bool((outcome - expected).norm() <= allowed) for outcome in outcomes)


def _step_by_step(model: PreTrainedModel, ids_NT: Tensor, way: Way) -> list[Tensor]:
    """What a model gives for the tokens behind the prefix; for a shared one also all at once."""
    together = []
    prefix_cache = DynamicCache()
    model(ids_NT[:1, :_PREFIX], past_key_values=prefix_cache, use_cache=True)
    cache: Cache = prefix_cache
    if way is Way.SHARED:
        cache = AfterPrefix(prefix_cache, _OWN)
        together.append(_outcome(run_after_prefix(model, ids_NT, _PREFIX)[1]))
    else:
        prefix_cache.batch_repeat_interleave(_ROWS)
    steps = [
        _outcome(_step(model, ids_NT[:, place : place + 1], cache, place))
        for place in range(_PREFIX, _PREFIX + _OWN)
    ]
    return [torch.cat(steps, dim=1), *together]


def _outcome(output: Any) -> Tensor:
    """A language model's logits, or the states of a network without a vocabulary layer."""
    outcome = output.logits if "logits" in output else output.last_hidden_state
    return cast(Tensor, outcome.float())
