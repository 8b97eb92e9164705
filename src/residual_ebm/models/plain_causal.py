"""Which models attend plainly: each token to all before it and itself, by products of queries and
keys and nothing else. Their attention can be computed by us, in any order (`shared_prefix`)."""

from transformers import PretrainedConfig, PreTrainedModel

from residual_ebm.models.loading import POSITIONS_AFTER_PADDING


def may_share_prefix(model: PreTrainedModel, length: int) -> bool:
    """Whether, by all that a model says of itself, its attention is plain in passages of so many
    tokens."""
    return (
        all(getattr(part, "_supports_attention_backend", False) for part in parts_of(model))
        and all(_attends_to_everything(config, length) for config in configs_of(model))
        # Sinks: a learnt share of attention that goes to no token.
        and not any(hasattr(module, "sinks") for module in model.modules())
    )


def parts_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """A model and the models inside it."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def configs_of(model: PreTrainedModel) -> list[PretrainedConfig]:
    return list({id(part.config): part.config for part in parts_of(model)}.values())


def _attends_to_everything(config: PretrainedConfig, length: int) -> bool:
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if window and (not hasattr(config, "layer_types") or "sliding_attention" in layer_types):
        if length > window:
            return False
        layer_types.discard("sliding_attention")
    return (
        layer_types <= {"full_attention"}
        and getattr(config, "is_causal", True) is not False
        and not getattr(config, "use_bidirectional_attention", False)
        and config.model_type not in POSITIONS_AFTER_PADDING  # ours count from 0
        and getattr(config, "v_head_dim", None) is None  # values of another size than keys
        and getattr(config, "attn_logit_softcapping", None) is None
        # GPT-2's options that scale or upcast scores layer by layer.
        and not getattr(config, "scale_attn_by_inverse_layer_idx", False)
        and not getattr(config, "reorder_and_upcast_attn", False)
    )
