"""What one would use instead: generate, a classifier and Trainer of transformers.

Importing our models mends AMX for them as well, without which they would die on some machines. What
it does to memory is part of our own work: their processes do without (`Spec.keeps_memory`).
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from residual_ebm.assets.resolve import local_source
from residual_ebm.bench.inputs import real_blocks, real_texts
from residual_ebm.bench.setting import FUSED
from residual_ebm.bench.workers import Work
from residual_ebm.models.device import DTYPES
from residual_ebm.models.loading import load_tokenizer


def generate(**drawing: Any) -> Work:
    """transformers' generate; a unit is a token."""
    draw = _drawing(**drawing)
    units = drawing["num_prefixes"] * drawing["samples_per_prefix"] * drawing["num_tokens"]
    return Work(draw, units)


def _drawing(
    *,
    model: str,
    precision: str,
    text: str,
    prefix_length: int,
    num_tokens: int,
    num_prefixes: int,
    samples_per_prefix: int,
    top_k: int | None,
    cache: str,
    compiled: bool,
    threads: int,
    attention: str = FUSED,
) -> Callable[[], Tensor]:
    """Draws tokens of some prefixes, each with its prefix before them."""
    torch.set_num_threads(threads)
    path = local_source(model, "model", kind="model")
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[precision], attn_implementation=attention
    ).eval()
    # It goes on behind an end-of-text as we do; to forbid one would cost a pass over the logits.
    loaded.generation_config.eos_token_id = None
    ids_GP = real_blocks(text, load_tokenizer(model, "model"), num_prefixes, prefix_length)
    if compiled:
        loaded.forward = torch.compile(loaded.forward)

    def draw() -> Tensor:
        generated: Tensor = loaded.generate(
            ids_GP,
            attention_mask=torch.ones_like(ids_GP),
            do_sample=True,
            top_k=0 if top_k is None else top_k,
            top_p=1.0,
            temperature=1.0,
            num_return_sequences=samples_per_prefix,
            max_new_tokens=num_tokens,
            cache_implementation=cache,
            pad_token_id=0,
            disable_compile=True,
        )
        return generated

    return draw


def classify(
    *,
    encoder: str,
    tokenizer: str,
    precision: str,
    text: str,
    num_blocks: int,
    length: int,
    batch_size: int,
    threads: int,
    attention: str = FUSED,
) -> Work:
    """A sequence classifier over texts; a unit is a text."""
    torch.set_num_threads(threads)
    classifier = _Classifier(encoder, precision, batch_size, attention)
    texts = real_texts(text, tokenizer, num_blocks, length)
    return Work(lambda: classifier.score(texts), num_blocks)


class _Classifier:
    def __init__(self, encoder: str, precision: str, batch_size: int, attention: str) -> None:
        path = local_source(encoder, "encoder", kind="model")
        self._model = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=DTYPES[precision], attn_implementation=attention
        ).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._batch_size = batch_size

    @torch.inference_mode()
    def score(self, texts: list[str]) -> None:
        for start in range(0, len(texts), self._batch_size):
            inputs = self._tokenizer(
                texts[start : start + self._batch_size],
                padding=True,
                truncation=True,
                max_length=256,
                return_tensors="pt",
            )
            self._model(**inputs)


def generate_then_classify(
    *, drawing: dict[str, Any], encoder: str, batch_size: int, attention: str
) -> Work:
    """Samples of one prefix by generate, decoded and scored by a classifier with a batch size and
    attention of its own; a unit is a sample."""
    draw = _drawing(**drawing)
    tokenizer = load_tokenizer(drawing["model"], "model")
    scorer = _Classifier(encoder, drawing["precision"], batch_size, attention)
    return Work(lambda: scorer.score(tokenizer.batch_decode(draw())), drawing["samples_per_prefix"])


def trainer_lm(
    *,
    architecture: dict[str, Any],
    bf16: bool,
    batch_size: int,
    length: int,
    steps: int,
    threads: int,
    compiled: bool = False,
    attention: str = FUSED,
) -> Work:
    """Trainer on a language model from scratch; a unit is a token."""
    torch.set_num_threads(threads)
    config = AutoConfig.for_model(**architecture)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    ids = torch.randint(0, model.config.vocab_size, (length,))
    rows = [{"input_ids": ids, "labels": ids}] * (steps * batch_size)
    trainer = _trainer(model, rows, batch_size, steps, bf16, compiled)
    return Work(trainer.train, steps * batch_size * length)


def trainer_classifier(
    *,
    encoder: str,
    tokenizer: str,
    bf16: bool,
    text: str,
    batch_size: int,
    length: int,
    steps: int,
    threads: int,
    compiled: bool = False,
    attention: str = FUSED,
) -> Work:
    """Trainer on a binary classifier of texts, tokenized beforehand; a unit is a text."""
    torch.set_num_threads(threads)
    path = local_source(encoder, "encoder", kind="model")
    model = AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=2, attn_implementation=attention
    )
    texts = real_texts(text, tokenizer, batch_size, length)
    inputs = AutoTokenizer.from_pretrained(path)(
        texts, padding=True, truncation=True, max_length=256, return_tensors="pt"
    )
    batch = [
        {**{name: values[row] for name, values in inputs.items()}, "labels": row % 2}
        for row in range(batch_size)
    ]
    trainer = _trainer(model, batch * steps, batch_size, steps, bf16, compiled)
    return Work(trainer.train, steps * batch_size)


def _trainer(
    model: PreTrainedModel,
    rows: list[dict[str, Any]],
    batch_size: int,
    steps: int,
    bf16: bool,
    compiled: bool,
) -> Trainer:
    """One for all turns: a second Trainer of the same model would not compile it, as accelerate
    leaves a mark on a model that it has prepared."""
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        per_device_train_batch_size=batch_size,
        max_steps=steps,
        bf16=bf16,
        torch_compile=compiled,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)  # it would write into our output
    return trainer
