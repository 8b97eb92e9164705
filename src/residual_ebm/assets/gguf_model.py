"""A llama-shaped model in a GGUF file to the safetensors and tokenizer files of transformers.

transformers reads GGUF but refuses to save what it read, so the weights are copied into a fresh
model of the same configuration. They stay float32: Q4_1 gives scale * q + minimum with half-
precision scale and minimum, more digits than bfloat16 holds.
"""

import contextlib
import io
from pathlib import Path

import torch
import transformers
from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def convert_gguf(gguf: Path, folder: Path, *, end_of_document: str) -> None:
    """Write config.json, model.safetensors and the tokenizer to `folder`.

    `end_of_document` is the token between documents in pretraining. A chat model names the end of
    a turn instead (<|im_end|>), which no text document ends with.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    # A bar of the converter's own, which no setting silences.
    with contextlib.redirect_stderr(io.StringIO()):
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    fields = GGUFReader(gguf).fields

    token_types = fields["tokenizer.ggml.token_type"].contents()
    controls = [number for number, kind in enumerate(token_types) if kind == TokenType.CONTROL]
    tokenizer.add_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in tokenizer.convert_ids_to_tokens(controls)
        ]
    )
    if fields["tokenizer.ggml.pre"].contents() == "smollm":
        # transformers forgets this rule of the GGUF file: each digit is a piece of its own, cut
        # off before the rest, so that "\n\n1" is two tokens and not three.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    end_of_turn = loaded.config.eos_token_id
    tokenizer.eos_token = end_of_document

    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    config["eos_token_id"] = tokenizer.eos_token_id
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = sorted({tokenizer.eos_token_id, end_of_turn})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod((folder / "config.json").stat().st_mode)  # written for its owner alone
