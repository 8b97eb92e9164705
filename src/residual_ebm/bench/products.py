"""How fast each thing could be at most: its matrix products alone, at the model's own shapes.

Every linear layer is applied once for the rows that go through it together, with nothing between;
of samples, for every token of each, though samples that begin alike need fewer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from residual_ebm.bench.inputs import real_texts
from residual_ebm.bench.workers import Work
from residual_ebm.config import Precision
from residual_ebm.models.device import DTYPES
from residual_ebm.models.loading import load_pretrained, load_tokenizer

_ROWS_AT_ONCE = 4096  # tokens of blocks that are read together
Shape = tuple[int, int]  # of a weight: numbers that come out, numbers that go in


def drawing(
    *,
    model: str,
    precision: Precision,
    num_prefixes: int,
    prefix_length: int,
    samples_per_prefix: int,
    num_tokens: int,
    threads: int,
) -> Work:
    """Samples of some prefixes, all at once; a unit is a token."""
    torch.set_num_threads(threads)
    loaded = load_pretrained(AutoModelForCausalLM, model, "model", dtype=DTYPES[precision])
    num_rows = num_prefixes * samples_per_prefix
    inner, last = _inner_and_last(loaded)
    step = _forward([*inner, last], num_rows, precision)
    # Of a prefix, only the last token goes through the layer of the vocabulary; the first new ones
    # are drawn from that, and the last new ones are not read.
    prefixes = _few_at_once(inner, num_prefixes * prefix_length, precision)
    behind = _forward([last], num_prefixes, precision)
    steps = [step] * (num_tokens - 1)
    return Work(lambda: _each(prefixes, behind, *steps), num_rows * num_tokens)


def scoring(
    *,
    model: str,
    encoder: str,
    precision: Precision,
    text: str,
    num_blocks: int,
    length: int,
    threads: int,
) -> Work:
    """An encoder's layers for every token it reads of the blocks; a unit is a block."""
    torch.set_num_threads(threads)
    return Work(_of_blocks(model, encoder, precision, text, num_blocks, length), num_blocks)


def evaluating(
    *,
    model: str,
    encoder: str,
    precision: Precision,
    text: str,
    prefix_length: int,
    num_tokens: int,
    num_samples: int,
    threads: int,
) -> Work:
    """Samples of one prefix, drawn and read by an encoder; a unit is a sample."""
    drawn = drawing(
        model=model,
        precision=precision,
        num_prefixes=1,
        prefix_length=prefix_length,
        samples_per_prefix=num_samples,
        num_tokens=num_tokens,
        threads=threads,
    )
    blocks = _of_blocks(model, encoder, precision, text, num_samples, prefix_length + num_tokens)
    return Work(lambda: _each(drawn.run, blocks), num_samples)


def training_lm(
    *,
    architecture: dict[str, Any],
    precision: Precision,
    batch_size: int,
    length: int,
    threads: int,
) -> Work:
    """One step, forward and backward; a unit is a token."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
    num_rows = batch_size * length
    inner, last = _inner_and_last(model)
    layers = _step(inner, num_rows, precision)
    vocabulary = _step([last], num_rows - batch_size, precision)  # a last token predicts nothing
    return Work(lambda: _each(layers, vocabulary), num_rows)


def training_nce(
    *,
    model: str,
    encoder: str,
    precision: Precision,
    text: str,
    num_pairs: int,
    length: int,
    threads: int,
) -> Work:
    """One step of an encoder, forward and backward; a unit is a block."""
    torch.set_num_threads(threads)
    num_rows = _tokens_read(model, encoder, text, 2 * num_pairs, length)
    return Work(_step(_shapes_of_encoder(encoder), num_rows, precision), 2 * num_pairs)


def _of_blocks(
    model: str, encoder: str, precision: Precision, text: str, num_blocks: int, length: int
) -> Callable[[], None]:
    num_rows = _tokens_read(model, encoder, text, num_blocks, length)
    return _few_at_once(_shapes_of_encoder(encoder), num_rows, precision)


def _few_at_once(
    shapes: Sequence[Shape], num_rows: int, precision: Precision
) -> Callable[[], None]:
    whole, rest = divmod(num_rows, _ROWS_AT_ONCE)
    many, few = (_forward(shapes, rows, precision) for rows in (_ROWS_AT_ONCE, rest))
    return lambda: _each(*[many] * whole, few)


def _tokens_read(model: str, encoder: str, text: str, num_blocks: int, length: int) -> int:
    """How many tokens an encoder reads of blocks of the language model's, padding aside."""
    texts = real_texts(text, model, num_blocks, length)
    return sum(map(len, load_tokenizer(encoder, "encoder")(texts)["input_ids"]))


def _shapes_of_encoder(encoder: str) -> list[Shape]:
    loaded = load_pretrained(AutoModel, encoder, "encoder", dtype=torch.float32)
    # BERT's own pooling layer is not used: the energy is read off the mean of all tokens.
    pooler = getattr(loaded, "pooler", None)
    return _shapes(loaded, without=getattr(pooler, "dense", None))


def _inner_and_last(model: PreTrainedModel) -> tuple[list[Shape], Shape]:
    """The layers of a language model, and that of the vocabulary."""
    last = model.get_output_embeddings()
    return _shapes(model, without=last), (last.out_features, last.in_features)


def _shapes(model: PreTrainedModel, without: nn.Module | None = None) -> list[Shape]:
    return [
        (module.out_features, module.in_features)
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not without
    ]


def _forward(shapes: Sequence[Shape], num_rows: int, precision: Precision) -> Callable[[], None]:
    widths = {columns for _, columns in shapes}
    weights, values = _operands(shapes, widths, num_rows, precision)

    @torch.inference_mode()
    def run() -> None:
        for weight in weights:
            nn.functional.linear(values[weight.shape[1]], weight)

    return run


def _step(shapes: Sequence[Shape], num_rows: int, precision: Precision) -> Callable[[], None]:
    """A layer's own product, and two for its gradients: by what came in, and by its weights."""
    widths = {width for shape in shapes for width in shape}
    weights, values = _operands(shapes, widths, num_rows, precision)

    @torch.inference_mode()
    def run() -> None:
        for weight in weights:
            rows, columns = weight.shape
            nn.functional.linear(values[columns], weight)
            torch.mm(values[rows], weight)
            torch.mm(values[rows].T, values[columns])

    return run


def _operands(
    shapes: Sequence[Shape], widths: set[int], num_rows: int, precision: Precision
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """A weight for each layer; what goes through them, by its width, is in the cache as it would be
    behind another layer."""
    weights = [_numbers(rows, columns, precision) for rows, columns in shapes]
    return weights, {width: _numbers(num_rows, width, precision) for width in widths}


def _numbers(rows: int, columns: int, precision: Precision) -> Tensor:
    return torch.randn(rows, columns, dtype=DTYPES[precision])


def _each(*works: Callable[[], object]) -> None:
    for work in works:
        work()
