"""The networks that compute an energy (section 4.1, and HeaT, which is ours).

UniT and BiT: a transformer over the whole block, E = w . mean of its top hidden states + b; they
differ in whether its attention is causal. HeaT: a small bidirectional network over what the frozen
P_LM computes anyway for the continuation (hidden states, token embedding, log-prob, entropy).

The last layer starts at zero, so an untrained energy is 0 and the joint model is P_LM itself.

Shapes: B blocks, L tokens, H hidden size of a transformer, C tokens of a continuation, F features.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_ebm.config import HeadConfig
from residual_ebm.models.energy_inputs import TextInputs
from residual_ebm.models.language_model import TokenFeatures
from residual_ebm.models.loading import train_every_embedding
from residual_ebm.models.shared_prefix import run_after_prefix


def masked_mean(hidden_BLH: Tensor, mask_BL: Tensor) -> Tensor:
    """Mean over tokens that are not padding, in float32."""
    weight_BL1 = mask_BL[..., None].float()
    return (hidden_BLH.float() * weight_BL1).sum(1) / weight_BL1.sum(1)


def _scalar_layer(size: int) -> nn.Linear:
    layer = nn.Linear(size, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class TransformerEnergy(nn.Module):
    """UniT over a causal backbone, BiT over a bidirectional one."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        train_every_embedding(backbone)
        # BERT's own pooling layer reads the first token only; ours is the mean over all of them.
        if getattr(backbone, "pooler", None) is not None:
            backbone.pooler = None
        self.scalar = _scalar_layer(int(backbone.config.hidden_size))

    def forward(self, inputs: TextInputs) -> Tensor:
        arguments = {"use_cache": False} if hasattr(self.backbone.config, "use_cache") else {}
        hidden_BLH = self.backbone(
            input_ids=inputs.ids_BL, attention_mask=inputs.mask_BL, **arguments
        ).last_hidden_state
        return _in_float32(self.scalar, masked_mean(hidden_BLH, inputs.mask_BL))

    def after_prefix(self, inputs: TextInputs, prefix_length: int) -> Tensor:
        """The same, of a causal backbone: a prefix that blocks have in common is read once."""
        prefix_length = min(prefix_length, inputs.ids_BL.shape[1])
        outputs = run_after_prefix(self.backbone, inputs.ids_BL, prefix_length)
        prefix_GPH, *rest = (output.last_hidden_state for output in outputs)
        repeats = len(inputs.ids_BL) // len(prefix_GPH)
        hidden_BLH = torch.cat([prefix_GPH.repeat_interleave(repeats, dim=0), *rest], dim=1)
        return _in_float32(self.scalar, masked_mean(hidden_BLH, inputs.mask_BL))

    def of_packed(self, inputs: TextInputs, prefix_length: int, blocks_per_prefix: int) -> Tensor:
        """The same, with gradients: a prefix and its continuations are one row, in which each
        continuation sees the prefix and itself alone."""
        ids_GJL = inputs.ids_BL.view(-1, blocks_per_prefix, inputs.ids_BL.shape[1])
        mask_GJL = inputs.mask_BL.view(ids_GJL.shape)
        prefix_GJP = ids_GJL[..., :prefix_length]
        assert torch.equal(prefix_GJP, prefix_GJP[:, :1].expand_as(prefix_GJP)), "one prefix"
        # Attention costs the square of a row: not more continuations than make it twice a block.
        length = ids_GJL.shape[2]
        at_once = max(1, (2 * length - prefix_length) // (length - prefix_length))
        parts = [
            self._of_rows(ids_GjL, mask_GjL, prefix_length)
            for ids_GjL, mask_GjL in zip(
                ids_GJL.split(at_once, dim=1), mask_GJL.split(at_once, dim=1), strict=True
            )
        ]
        return torch.cat(parts, dim=1).flatten()

    def _of_rows(self, ids_GJL: Tensor, mask_GJL: Tensor, prefix_length: int) -> Tensor:
        """Energies (G, J) of J continuations of each of G prefixes."""
        groups, num_blocks, length = ids_GJL.shape
        device, own_length = ids_GJL.device, length - prefix_length
        own_GQ = ids_GJL[..., prefix_length:].flatten(1)
        packed_GQ = torch.cat([ids_GJL[:, 0, :prefix_length], own_GQ], dim=1)
        position_L = torch.arange(length, device=device)
        position_Q = torch.cat([position_L, position_L[prefix_length:].repeat(num_blocks - 1)])
        # The prefix is part 0, its continuations are parts 1, 2 and so on.
        part_Q = (torch.arange(len(position_Q), device=device) - prefix_length) // own_length + 1
        part_Q[:prefix_length] = 0
        seen_QQ = (position_Q <= position_Q[:, None]) & (
            (part_Q == 0) | (part_Q == part_Q[:, None])
        )
        hidden_GQH = self.backbone(
            input_ids=packed_GQ,
            attention_mask=_as_mask(seen_QQ, self.backbone),
            position_ids=position_Q[None],
            use_cache=False,
        ).last_hidden_state
        prefix_BPH = hidden_GQH[:, :prefix_length].repeat_interleave(num_blocks, dim=0)
        own_BCH = hidden_GQH[:, prefix_length:].reshape(
            groups * num_blocks, own_length, hidden_GQH.shape[2]
        )
        hidden_BLH = torch.cat([prefix_BPH, own_BCH], dim=1)
        energy_B = _in_float32(self.scalar, masked_mean(hidden_BLH, mask_GJL.flatten(0, 1)))
        return energy_B.view(groups, num_blocks)


def _as_mask(seen_QQ: Tensor, model: PreTrainedModel) -> Tensor:
    """Which tokens a token sees, in the form that the model's attention wants."""
    seen_11QQ = seen_QQ[None, None]
    if model.config._attn_implementation != "eager":
        return seen_11QQ
    hidden = torch.finfo(model.dtype).min
    return torch.zeros_like(seen_11QQ, dtype=model.dtype).masked_fill(~seen_11QQ, hidden)


class HeadEnergy(nn.Module):
    """HeaT: reads a continuation through the eyes of P_LM, in both directions."""

    def __init__(self, language_model_size: int, max_tokens: int, config: HeadConfig) -> None:
        super().__init__()
        size = config.hidden_size

        def reader() -> nn.Sequential:
            return nn.Sequential(
                nn.LayerNorm(language_model_size), nn.Linear(language_model_size, size)
            )

        self.hidden = reader()
        self.embedding = reader()
        self.layers = nn.ModuleList(reader() for _ in config.layers)
        # P_LM's states tell one training block from another: without dropout on them as well, a
        # head learns a few thousand blocks by heart.
        self.dropout = nn.Dropout(config.dropout)
        self.scores = nn.Linear(2, size)
        self.position = nn.Embedding(max_tokens, size)
        layer = nn.TransformerEncoderLayer(
            size,
            config.num_heads,
            dim_feedforward=4 * size,
            dropout=config.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, config.num_layers, norm=nn.LayerNorm(size), enable_nested_tensor=False
        )
        self.scalar = _scalar_layer(size)

    def forward(self, features: TokenFeatures, mask_BC: Tensor) -> Tensor:
        dtype = self.scores.weight.dtype
        scores_BC2 = torch.stack([features.log_prob_BC, features.entropy_BC], dim=-1)
        position_C = torch.arange(mask_BC.shape[1], device=mask_BC.device)
        states = features.hidden_BCH.to(dtype).chunk(1 + len(self.layers), dim=-1)
        hidden_BCF = (
            sum(
                read(self.dropout(state_BCH))
                for read, state_BCH in zip([self.hidden, *self.layers], states, strict=True)
            )
            + self.embedding(self.dropout(features.embedding_BCH.to(dtype)))
            + self.scores(scores_BC2.to(dtype))
            + self.position(position_C)
        )
        hidden_BCF = self.encoder(hidden_BCF, src_key_padding_mask=~mask_BC)
        return _in_float32(self.scalar, masked_mean(hidden_BCF, mask_BC))


def _in_float32(layer: nn.Linear, pooled_BF: Tensor) -> Tensor:
    """Energies are differences of large sums later on: the last product is not rounded."""
    with torch.autocast(pooled_BF.device.type, enabled=False):
        energy_B1 = nn.functional.linear(
            pooled_BF.float(), layer.weight.float(), layer.bias.float()
        )
    return energy_B1[:, 0]
