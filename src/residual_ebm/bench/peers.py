"""What one would use instead: generate, a classifier and Trainer of transformers.

Importing our models mends AMX for them as well, without which they would die on some machines. What
it does to memory is part of our own work: their processes do without (`Spec.keeps_memory`).
"""

import tempfile
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


def generate(
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
) -> Work:
    """transformers' generate; a unit is a token."""
    torch.set_num_threads(threads)
    loaded = _load(model, precision, attention)
    ids_GP = real_blocks(text, load_tokenizer(model, "model"), num_prefixes, prefix_length)
    if compiled:
        loaded.forward = torch.compile(loaded.forward)

    def run() -> None:
        _generate(loaded, ids_GP, samples_per_prefix, num_tokens, top_k, cache)

    return Work(run, num_prefixes * samples_per_prefix * num_tokens)


def _load(model: str, precision: str, attention: str) -> PreTrainedModel:
    path = local_source(model, "model", kind="model")
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[precision], attn_implementation=attention
    )
    # It goes on behind an end-of-text as we do; to forbid one would cost a pass over the logits.
    loaded.generation_config.eos_token_id = None
    return loaded.eval()


def _generate(
    model: PreTrainedModel,
    ids_GP: Tensor,
    samples_per_prefix: int,
    num_tokens: int,
    top_k: int | None,
    cache: str = "dynamic",
) -> Tensor:
    generated: Tensor = model.generate(
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
    *,
    model: str,
    encoder: str,
    precision: str,
    text: str,
    prefix_length: int,
    num_tokens: int,
    num_samples: int,
    classifier: dict[str, Any],
    threads: int,
    attention: str = FUSED,
) -> Work:
    """Samples of one prefix by generate, decoded and scored by a classifier with its own batch size
    and attention; a unit is a sample."""
    torch.set_num_threads(threads)
    loaded = _load(model, precision, attention)
    tokenizer = load_tokenizer(model, "model")
    ids_GP = real_blocks(text, tokenizer, 1, prefix_length)
    scorer = _Classifier(encoder, precision, **classifier)

    def run() -> None:
        ids_NT = _generate(loaded, ids_GP, num_samples, num_tokens, None)
        scorer.score(tokenizer.batch_decode(ids_NT))

    return Work(run, num_samples)


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

    def run() -> None:
        _trainer(model, rows, batch_size, steps, bf16, compiled)

    return Work(run, steps * batch_size * length)


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

    def run() -> None:
        _trainer(model, batch * steps, batch_size, steps, bf16, compiled)

    return Work(run, steps * batch_size)


def _trainer(
    model: PreTrainedModel,
    rows: list[dict[str, Any]],
    batch_size: int,
    steps: int,
    bf16: bool,
    compiled: bool = False,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
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
        trainer.train()
