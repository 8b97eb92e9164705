"""Other engines that draw samples: CTranslate2, llama.cpp, OpenVINO GenAI.

They are an extra, `pip install residual-ebm[bench]`; one that is not installed is listed with that
reason. Each is given the ids of one prefix and asked for as many samples at once as it is told.
"""

import ctypes
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from residual_ebm.assets.resolve import local_source
from residual_ebm.bench.gguf_export import write_gguf
from residual_ebm.bench.inputs import real_blocks
from residual_ebm.bench.workers import Work
from residual_ebm.models.loading import load_tokenizer

# By the name of the function that runs it.
_PACKAGES = {
    "ctranslate2": ("ctranslate2",),
    "llama_cpp": ("llama-cpp-python",),
    "openvino": ("openvino", "openvino-genai"),
}


def versions_of(factory: str) -> dict[str, str]:
    """Of what a candidate is made of beside torch and transformers, as far as it is installed."""
    found = {}
    for package in _PACKAGES.get(factory.rpartition(":")[2], ()):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _prefix(model: str, text: str, prefix_length: int) -> list[int]:
    ids: list[int] = real_blocks(text, load_tokenizer(model, "model"), 1, prefix_length)[0].tolist()
    return ids


@contextmanager
def _gguf(model: str, weights: str) -> Iterator[str]:
    """The model as a file that lasts until it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(model, path, weights)
        yield str(path)


def ctranslate2(
    *,
    model: str,
    text: str,
    prefix_length: int,
    num_tokens: int,
    samples_per_prefix: int,
    top_k: int | None,
    compute_type: str,
    threads: int,
) -> Work:
    """CTranslate2's generator; a unit is a token."""
    import ctranslate2 as engine

    path = local_source(model, "model", kind="model")
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder) / "model"
        engine.converters.TransformersConverter(path).convert(str(converted))
        generator = engine.Generator(
            str(converted), compute_type=compute_type, intra_threads=threads
        )
    ids = _prefix(model, text, prefix_length)
    prefix = load_tokenizer(model, "model").convert_ids_to_tokens(ids)

    def run() -> None:
        generator.generate_batch(
            [prefix[-1:]] * samples_per_prefix,
            static_prompt=prefix[:-1],  # which is read once
            max_batch_size=samples_per_prefix,
            min_length=num_tokens,
            max_length=num_tokens,
            sampling_topk=0 if top_k is None else top_k,
            include_prompt_in_result=False,
            end_token=[],
        )

    return Work(run, samples_per_prefix * num_tokens)


def openvino(
    *,
    model: str,
    text: str,
    prefix_length: int,
    num_tokens: int,
    samples_per_prefix: int,
    top_k: int | None,
    weights: str,
    threads: int,
) -> Work:
    """OpenVINO GenAI with continuous batching and a cache of prefixes; a unit is a token."""
    import openvino as runtime
    import openvino_genai as engine

    scheduler = engine.SchedulerConfig()
    scheduler.cache_size = 4  # GB
    scheduler.max_num_seqs = samples_per_prefix
    scheduler.max_num_batched_tokens = max(samples_per_prefix, prefix_length)
    scheduler.enable_prefix_caching = True
    with _gguf(model, weights) as path:
        pipeline = engine.LLMPipeline(
            path, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads
        )
    config = engine.GenerationConfig()
    config.do_sample = True
    config.temperature = 1.0
    config.top_p = 1.0
    if top_k is not None:
        config.top_k = top_k
    config.num_return_sequences = samples_per_prefix
    config.max_new_tokens = num_tokens
    config.ignore_eos = True
    ids = runtime.Tensor(np.array([_prefix(model, text, prefix_length)], dtype=np.int64))
    return Work(lambda: pipeline.generate(ids, config), samples_per_prefix * num_tokens)


def llama_cpp(
    *,
    model: str,
    text: str,
    prefix_length: int,
    num_tokens: int,
    samples_per_prefix: int,
    top_k: int | None,
    weights: str,
    unified: bool,
    threads: int,
) -> Work:
    """llama.cpp: the prefix once, then copied to all sequences, or shared by them in one `unified`
    buffer; a unit is a token."""
    import llama_cpp as engine

    limit = engine.llama_max_parallel_sequences()
    if samples_per_prefix > limit:
        raise ValueError(f"llama.cpp takes {limit} sequences at most")
    _quiet(engine)
    engine.llama_backend_init()
    with _gguf(model, weights) as path:
        loaded = engine.llama_model_load_from_file(
            path.encode(), engine.llama_model_default_params()
        )
    if loaded is None:
        raise RuntimeError("llama.cpp does not read the model")
    parameters = engine.llama_context_default_params()
    prefixes_kept = 1 if unified else samples_per_prefix
    parameters.n_ctx = prefixes_kept * prefix_length + samples_per_prefix * num_tokens
    parameters.n_batch = parameters.n_ubatch = max(prefix_length, samples_per_prefix)
    parameters.n_seq_max = samples_per_prefix
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.kv_unified = unified
    context = engine.llama_init_from_model(loaded, parameters)
    if context is None:
        raise RuntimeError("llama.cpp has no room for so many sequences")
    memory = engine.llama_get_memory(context)
    batch = engine.llama_batch_init(parameters.n_batch, 0, 1)
    chain = engine.llama_sampler_chain_init(engine.llama_sampler_chain_default_params())
    if top_k is not None:
        engine.llama_sampler_chain_add(chain, engine.llama_sampler_init_top_k(top_k))
    engine.llama_sampler_chain_add(chain, engine.llama_sampler_init_dist(0))
    prefix = _prefix(model, text, prefix_length)

    def read(tokens: list[int], first_position: int, *, rows: bool) -> None:
        """One token of each sequence, or several of the first."""
        for number, token in enumerate(tokens):
            batch.token[number] = token
            batch.pos[number] = first_position + (0 if rows else number)
            batch.n_seq_id[number] = 1
            batch.seq_id[number][0] = number if rows else 0
            batch.logits[number] = rows or number == len(tokens) - 1
        batch.n_tokens = len(tokens)
        if engine.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def run() -> None:
        engine.llama_memory_clear(memory, False)
        read(prefix, 0, rows=False)
        for sequence in range(1, samples_per_prefix):
            engine.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        last = [prefix_length - 1] * samples_per_prefix
        for step in range(num_tokens):
            tokens = [engine.llama_sampler_sample(chain, context, row) for row in last]
            if step + 1 < num_tokens:
                read(tokens, prefix_length + step, rows=True)
                last = list(range(samples_per_prefix))

    return Work(run, samples_per_prefix * num_tokens)


def _quiet(engine: Any) -> None:
    """Its log goes to stderr otherwise."""
    callback = engine.llama_log_callback(lambda *_: None)
    _kept.append(callback)
    engine.llama_log_set(callback, ctypes.c_void_p(0))


_kept: list[Any] = []  # C holds no reference to a callback
