"""With which attention a network runs on a CPU, where that of transformers is not the quickest."""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_ebm.models.attention_interface import attention_named
from residual_ebm.models.device import has_tiles
from residual_ebm.models.encoder_attention import attends_by_kernel, kernel_attention
from residual_ebm.models.energy_inputs import FULL_REGISTERS, TextInputs
from residual_ebm.models.energy_networks import TransformerEnergy
from residual_ebm.models.frozen import frozen_layers
from residual_ebm.models.packed_linear import packed_layers

# Tokens. Forward and backward, milliseconds for 2,560 tokens in 9 heads of 64 numbers, plain and
# fused: 22 and 49 in blocks of 160, 27 and 45 of 256, 62 and 73 of 512, 80 and 71 of 1,024.
_PLAIN_UP_TO = 512


def quick_backward(network: nn.Module, length: int) -> AbstractContextManager[None]:
    """The backward pass of fused attention is slower than that of plain products, as long as blocks
    are short: their weights take memory by the square of the length."""
    model = _fused_on_cpu(network)
    return (
        nullcontext() if model is None or length > _PLAIN_UP_TO else attention_named(model, "eager")
    )


@contextmanager
def quick_scoring(network: TransformerEnergy, num_tokens: int) -> Iterator[int]:
    """Without matrix tiles, fused attention multiplies bfloat16 at a fraction of the rate of plain
    products, and these wait for memory between them where our kernel does not. The processor
    decides, not the clock: energies must round alike in every process. Around the kernel, weights
    are laid out once where there are many tokens to read in all, and layers are compiled where
    there are very many.

    Gives what rows should have a multiple of tokens of: the kernel takes them as they are.
    """
    model = _fused_on_cpu(network)
    if model is None or model.dtype != torch.bfloat16 or has_tiles():
        yield FULL_REGISTERS
    elif attends_by_kernel(model):

        def read(ids_BL: Tensor, mask_BL: Tensor) -> None:
            network(TextInputs(ids_BL, mask_BL))

        with (
            kernel_attention(model),
            frozen_layers(model, num_tokens, read) as frozen,
            nullcontext() if frozen else packed_layers(model, num_tokens),
        ):
            yield 1
    else:
        with attention_named(model, "eager"):
            yield FULL_REGISTERS


def _fused_on_cpu(network: nn.Module) -> PreTrainedModel | None:
    """The model in a network, if it is there and attention is for us to choose."""
    # The first is the outermost, and answers for the models inside it; a head may have none.
    models = (part for part in network.modules() if isinstance(part, PreTrainedModel))
    for model in itertools.islice(models, 1):
        if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
            return model
    return None
