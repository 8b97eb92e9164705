"""RALM: a residual model that is normalised at every step (section 4.1).

    log P(x_t | x_<t) = log P_LM(x_t | x_<t) + log P_phi(x_t | x_<t) - log sum over the vocabulary

P_phi is another autoregressive model with the same vocabulary, P_LM stays as it is. The sum over
the vocabulary is exact, so it is trained by maximum likelihood and needs neither negatives nor Z;
what it cannot do is look at a continuation as a whole. To everything else it is a causal language
model as transformers has them: it is saved, loaded, scored and sampled like any other.

Logits of both are added; softmax does the rest. A constant P_phi, with which training begins if its
last layer starts near zero, leaves P_LM unchanged. A P_phi that can speak already would say
everything twice: its logits are multiplied by a small constant, so that it begins as nearly one.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast


class RalmConfig(PretrainedConfig):
    """The configurations of P_LM and of P_phi, one inside the other."""

    model_type = "residual_ebm_ralm"

    def __init__(
        self,
        base: dict[str, Any] | None = None,
        residual: dict[str, Any] | None = None,
        residual_scale: float = 1.0,
        **arguments: Any,
    ) -> None:
        self.base, self.residual = base or {}, residual or {}
        self.residual_scale = residual_scale
        # Some models have other names for these; their configurations know.
        parts = [AutoConfig.for_model(**part) for part in (self.base, self.residual) if part]
        for part in parts[:1]:
            self.vocab_size, self.hidden_size = part.vocab_size, part.hidden_size
            for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
                arguments.setdefault(key, getattr(part, key, None))
        self.num_hidden_layers = sum(part.num_hidden_layers for part in parts)
        lengths = [getattr(part, "max_position_embeddings", None) for part in parts]
        self.max_position_embeddings = min(filter(None, lengths), default=None)
        super().__init__(**arguments)


class RalmForCausalLM(PreTrainedModel, GenerationMixin):
    """P_LM times P_phi, normalised at each step; only P_phi learns."""

    config_class = RalmConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: RalmConfig) -> None:
        super().__init__(config)
        self.base = AutoModelForCausalLM.from_config(_inner(config.base, config))
        self.residual = AutoModelForCausalLM.from_config(_inner(config.residual, config))
        self._join()
        self.post_init()

    @classmethod
    def of(
        cls, base: PreTrainedModel, residual: PreTrainedModel, residual_scale: float = 1.0
    ) -> "RalmForCausalLM":
        """Put P_phi on top of a P_LM, sharing the weights of both."""
        config = RalmConfig(_settings_of(base), _settings_of(residual), residual_scale)
        with torch.device("meta"):
            joined = cls(config)
        joined.base, joined.residual = base, residual
        joined._join()
        return joined

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> "RalmForCausalLM":
        model: RalmForCausalLM = super().from_pretrained(*arguments, **options)
        model.base.requires_grad_(False)  # loading makes new parameters, which would learn
        return model

    def _join(self) -> None:
        self.base.requires_grad_(False)
        # One cache holds the keys of both: those of P_phi lie behind those of P_LM.
        first = _num_layers(self.base)
        numbered = [module for module in self.residual.modules() if hasattr(module, "layer_idx")]
        lowest = min(int(module.layer_idx) for module in numbered)
        for module in numbered:
            module.layer_idx = module.layer_idx - lowest + first
        self._no_split_modules = [
            *(self.base._no_split_modules or ()),
            *(self.residual._no_split_modules or ()),
        ]

    @property
    def parts(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        return self.base, self.residual

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.base.get_input_embeddings()
        return embeddings

    def get_output_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.base.get_output_embeddings()
        return embeddings

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        labels: Tensor | None = None,
        **_arguments: Any,
    ) -> CausalLMOutputWithPast:
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if position_ids is None and past_key_values is not None:
            # Now: each part lengthens the cache, and the other would count that as the past.
            begun = past_key_values.get_seq_length()
            length = input_ids.shape[1]
            position_ids = torch.arange(begun, begun + length, device=input_ids.device)[None]
        logits = [
            part(
                input_ids,
                past_key_values=cache,
                position_ids=position_ids,
                attention_mask=attention_mask,
                use_cache=cache is not None,
                logits_to_keep=logits_to_keep,
            ).logits
            for part, cache in zip(self.parts, self._caches(past_key_values), strict=True)
        ]
        # In float32: a sum of two bfloat16 numbers would be rounded a third time.
        product = logits[0].float() + self.config.residual_scale * logits[1].float()
        loss = None
        if labels is not None:
            loss = self.loss_function(product, labels, vocab_size=product.shape[-1])
        return CausalLMOutputWithPast(loss=loss, logits=product, past_key_values=past_key_values)

    def _caches(self, cache: Cache | None) -> list[Cache | None]:
        if not isinstance(cache, DynamicCache):
            return [cache, cache]  # none, or one that tells layers apart by itself
        first, total = _num_layers(self.base), sum(_num_layers(part) for part in self.parts)
        while len(cache.layers) < total:
            cache.layers.append(DynamicLayer())
        return [_Part(cache, 0, first), _Part(cache, first, total)]


class _Part(Cache):
    """The layers of one part in the cache of both."""

    def __init__(self, cache: DynamicCache, first: int, last: int) -> None:
        super().__init__(layers=cache.layers[first:last])
        self._first = first

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        number = layer_idx - self._first
        updated: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, number, *args, **kwargs
        )
        return updated


def _num_layers(model: PreTrainedModel) -> int:
    return int(model.config.num_hidden_layers)


def _settings_of(model: PreTrainedModel) -> dict[str, Any]:
    """Without the folder it was loaded from, which is another on every machine."""
    return {**model.config.to_dict(), "_name_or_path": ""}


def _inner(config: dict[str, Any], outer: RalmConfig) -> PretrainedConfig:
    inner: PretrainedConfig = AutoConfig.for_model(**config)
    inner.dtype = outer.dtype  # its own would be the one it was saved in
    return inner


AutoConfig.register(RalmConfig.model_type, RalmConfig)
AutoModelForCausalLM.register(RalmConfig, RalmForCausalLM)
