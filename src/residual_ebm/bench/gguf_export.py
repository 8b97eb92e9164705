"""A llama-shaped checkpoint as a GGUF file: what engines outside of transformers read."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from residual_ebm.errors import UserError
from residual_ebm.models.loading import load_pretrained, load_tokenizer

_TYPES = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


def write_gguf(model: str, path: Path, weights: str) -> None:
    """Write a model with its tokenizer; `weights` is bf16, f16 or q8_0."""
    loaded = load_pretrained(AutoModelForCausalLM, model, "model")
    config = loaded.config
    if config.model_type != "llama":
        raise UserError("model", model, f"is a {config.model_type}; only llama is written as GGUF")
    tensor_type, file_type = _TYPES[weights]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(file_type)
    _add_shape(writer, config)
    _add_tokenizer(writer, load_tokenizer(model, "model"), config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in loaded.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if name.endswith("q_proj.weight"):
            values = _halves_to_pairs(values, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            values = _halves_to_pairs(values, config.num_key_value_heads)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        # Vectors stay as they are: engines keep norms in float32.
        kind = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else tensor_type
        writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _halves_to_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """transformers rotates the halves of a head against each other, GGUF's llama its neighbours."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _add_shape(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, vocab_size: int
) -> None:
    model: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([tokens.get(number, f"<unused{number}>") for number in range(vocab_size)])
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL
            for number in range(vocab_size)
        ]
    )
    merges = model.get("merges", [])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(int(tokenizer.eos_token_id))
    writer.add_bos_token_id(int(tokenizer.eos_token_id))
    writer.add_add_bos_token(False)
