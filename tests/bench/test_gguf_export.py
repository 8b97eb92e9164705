"""A model written as GGUF is the same model when transformers reads it back."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from residual_ebm.bench.gguf_export import write_gguf
from residual_ebm.errors import UserError
from residual_ebm.files.tokenizers import train_tokenizer

TEXT = ["the cat sees a dog and the dog sees the cat . " * 20]


def saved(folder: Path, model_type: str, **changes: object) -> str:
    tokenizer = train_tokenizer(TEXT, "bpe", 280)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **changes,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("weights", "tolerance"), [("bf16", 1e-2), ("f16", 1e-3), ("q8_0", 2e-2)])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_read_back_has_the_same_weights(
    tmp_path: Path, weights: str, tolerance: float, tied: bool
) -> None:
    source = saved(tmp_path / "model", "llama", tie_word_embeddings=tied)
    write_gguf(source, tmp_path / "model.gguf", weights)
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    expected, read = before.state_dict(), after.state_dict()
    assert read.keys() == expected.keys()
    for name, weight in expected.items():
        scale = weight.abs().max().item()
        torch.testing.assert_close(read[name], weight, rtol=0, atol=tolerance * scale, msg=name)
    ids_BT = torch.arange(12)[None]
    torch.testing.assert_close(after(ids_BT).logits, before(ids_BT).logits, rtol=0.1, atol=0.05)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", "qwen2")
    with pytest.raises(UserError, match="qwen2"):
        write_gguf(source, tmp_path / "model.gguf", "bf16")
    assert not (tmp_path / "model.gguf").exists()
