"""A GGUF file becomes a model folder with the same weights and the tokenizer it speaks of."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from residual_ebm.assets.gguf_model import convert_gguf

_HIDDEN, _INNER, _HEADS, _KEY_HEADS, _LAYERS = 64, 96, 4, 2, 2
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]


def _write_gguf(path: Path) -> None:
    """A llama as small as its quantisation allows, with the tokenizer's rules of SmolLM2."""
    alphabet = sorted(ByteLevel.alphabet())
    tokens = [*_SPECIAL, *alphabet, "ĊĊ", "he", "hel"]
    kinds = [TokenType.CONTROL] * len(_SPECIAL) + [TokenType.NORMAL] * (len(alphabet) + 3)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KEY_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ċ Ċ", "h e", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)

    random = np.random.default_rng(0)

    def add(name: str, *shape: int, kind: GGMLQuantizationType) -> None:
        data = random.normal(size=shape).astype(np.float32) / 4
        if len(shape) == 1:
            writer.add_tensor(name, data + 1)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), _HIDDEN, kind=GGMLQuantizationType.Q8_0)
    add("output_norm.weight", _HIDDEN, kind=GGMLQuantizationType.F32)
    keys = _HIDDEN * _KEY_HEADS // _HEADS
    for layer in range(_LAYERS):
        for name, shape in {
            "attn_norm": (_HIDDEN,),
            "ffn_norm": (_HIDDEN,),
            "attn_q": (_HIDDEN, _HIDDEN),
            "attn_k": (keys, _HIDDEN),
            "attn_v": (keys, _HIDDEN),
            "attn_output": (_HIDDEN, _HIDDEN),
            "ffn_gate": (_INNER, _HIDDEN),
            "ffn_up": (_INNER, _HIDDEN),
            "ffn_down": (_HIDDEN, _INNER),
        }.items():
            add(f"blk.{layer}.{name}.weight", *shape, kind=GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The GGUF file, and the folder made of it."""
    folder = tmp_path_factory.mktemp("gguf")
    _write_gguf(folder / "tiny.gguf")
    target = tmp_path_factory.mktemp("converted")
    convert_gguf(folder / "tiny.gguf", target, end_of_document="<|endoftext|>")
    return folder / "tiny.gguf", target


def test_the_saved_model_is_the_one_in_the_file(converted: tuple[Path, Path]) -> None:
    file, folder = converted
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    original = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    ids = torch.arange(40)[None] + 5
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, original(ids).logits)
        # The weights have digits that bfloat16 would lose.
        assert not torch.equal(model.bfloat16().float()(ids).logits, original(ids).logits)


def test_the_weights_may_be_read_by_whoever_may_read_the_rest(
    converted: tuple[Path, Path],
) -> None:
    _, folder = converted
    modes = {(folder / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1


def test_a_document_ends_with_end_of_text_and_not_with_the_end_of_a_turn(
    converted: tuple[Path, Path],
) -> None:
    _, folder = converted
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    assert model.config.eos_token_id == 0
    # Both stop a generation, for those who use it as the chat model it is.
    assert model.generation_config.eos_token_id == [0, 2]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", ["hel", "l", "o"]),
        ("\n\n12", ["ĊĊ", "1", "2"]),
        (" 7", ["Ġ", "7"]),
        ("<repo_name>", ["<repo_name>"]),
        ("a<|im_end|>", ["a", "<|im_end|>"]),
    ],
)
def test_the_tokenizer_cuts_as_smollm2_does(
    converted: tuple[Path, Path], text: str, tokens: list[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[1], local_files_only=True)
    assert tokenizer.is_fast
    assert tokenizer.tokenize(text) == tokens


@pytest.mark.parametrize(
    "text", ["Two\n\nlines  and\ttabs ", " 3.14 in 1790", "Grüße, 日本語 🙂", 'it\'s - "so" . \r\n']
)
def test_text_comes_back_as_it_was(converted: tuple[Path, Path], text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[1], local_files_only=True)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.all_special_ids)  # nothing is added in front or behind
