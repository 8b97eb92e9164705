"""What takes part in benchmarks besides us: each alternative with its settings, of which the best
is found by a sweep."""

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

from residual_ebm.bench.setting import PLAIN, Setting
from residual_ebm.bench.sweeps import Sweeps
from residual_ebm.bench.workers import Spec
from residual_ebm.progress import Progress

HERE = "residual_ebm.bench"
KEPT = ", memory kept"  # ends the name of a peer that has our way with memory


class Bench(NamedTuple):
    """What every benchmark is given."""

    setting: Setting
    progress: Progress
    sweeps: Sweeps


def spec_of(name: str, factory: str, **arguments: Any) -> Spec:
    return Spec(
        name,
        f"{HERE}.{factory}",
        arguments,
        keeps_memory=not factory.startswith("peers:"),
    )


def _with_either_attention(spec: Spec) -> list[Spec]:
    """What transformers does by itself, and with plain attention, which is sometimes quicker."""
    arguments = {**spec.arguments, "attention": PLAIN}
    return [spec, spec._replace(name=f"{spec.name}, plain attention", arguments=arguments)]


def ladders_of(*ladders: Sequence[Spec]) -> list[list[Spec]]:
    """Each ladder with either attention."""
    return [
        list(column)
        for ladder in ladders
        for column in zip(*map(_with_either_attention, ladder), strict=True)
    ]


def with_memory_kept(
    bench: Bench, name: str, *ladders: Sequence[Spec]
) -> tuple[Spec, list[dict[str, Any]]]:
    """The quickest of peers if they had our way with memory too, and what was tried."""
    kept = [
        [spec._replace(name=f"{spec.name}{KEPT}", keeps_memory=True) for spec in ladder]
        for ladder in ladders_of(*ladders)
    ]
    return bench.sweeps.best(name, kept)


def each_at_its_best(
    bench: Bench, name: str, ladders: Sequence[Sequence[Spec]]
) -> tuple[list[Spec], list[dict[str, Any]]]:
    """The best of every ladder, the quickest of all with memory kept, and what was tried."""
    found = [bench.sweeps.best(name, ladders_of(ladder)) for ladder in ladders]
    found.append(with_memory_kept(bench, name, *ladders))
    return [best for best, _ in found], [row for _, sweep in found for row in sweep]


# Title, factory, which is named like the module it needs, and the ways in which each is tried.
ENGINES: tuple[tuple[str, str, dict[str, dict[str, Any]]], ...] = (
    (
        "CTranslate2",
        "ctranslate2",
        {kind: {"compute_type": kind} for kind in ("float32", "int8")},
    ),
    (
        "llama.cpp",
        "llama_cpp",
        {
            "bf16, one cache": {"weights": "bf16", "unified": True},
            "q8_0, one cache": {"weights": "q8_0", "unified": True},
            "bf16, a cache each": {"weights": "bf16", "unified": False},
            "q8_0, a cache each": {"weights": "q8_0", "unified": False},
        },
    ),
    ("OpenVINO GenAI", "openvino", {kind: {"weights": kind} for kind in ("f16", "q8_0")}),
)
DRAWING = ("model", "text", "prefix_length", "num_tokens", "threads")


def generate_spec(bench: Bench, title: str, **arguments: Any) -> Spec:
    compiled = ", compiled" if arguments["compiled"] else ""
    return spec_of(
        f"generate, {title}, {arguments['cache']} cache{compiled}",
        "peers:generate",
        **bench.setting.take(*DRAWING, "precision"),
        top_k=None,
        **arguments,
    )


def best_of_generate(bench: Bench) -> tuple[list[Spec], Spec, list[dict[str, Any]]]:
    """Of one prefix: ways between which one turn does not decide, the quickest if it had our way
    with memory, and what was tried."""
    setting = bench.setting
    dynamic, *static = (
        [
            generate_spec(
                bench,
                f"batch {size}",
                num_prefixes=1,
                samples_per_prefix=size,
                cache=cache,
                compiled=compiled,
            )
            for size in (setting.compiled_sizes if compiled else setting.batch_sizes)
        ]
        for cache, compiled in (("dynamic", False), ("static", False), ("static", True))
    )
    bests, sweep = bench.sweeps.contenders("decode", ladders_of(dynamic, *static))
    kept, swept = with_memory_kept(bench, "decode", dynamic)
    return bests, kept, sweep + swept


def best_of_engines(bench: Bench) -> tuple[list[Spec], list[dict[str, Any]]]:
    """As with generate, of each engine that is installed."""
    setting = bench.setting
    bests: list[Spec] = []
    sweep: list[dict[str, Any]] = []
    for title, factory, ways in ENGINES:
        ladders = [
            [
                spec_of(
                    f"{title}, batch {size}, {way}",
                    f"engines:{factory}",
                    **setting.take(*DRAWING),
                    top_k=None,
                    samples_per_prefix=size,
                    **options,
                )
                for size in setting.batch_sizes
            ]
            for way, options in ways.items()
        ]
        if importlib.util.find_spec(factory) is None:
            bests.append(ladders[0][0])  # says why it cannot take part
            continue
        engines, swept = bench.sweeps.contenders("decode", ladders)
        bests += engines
        sweep += swept
    return bests, sweep


def classifiers_in(setting: Setting, precision: str) -> list[Spec]:
    return [
        spec_of(
            f"classifier in {precision}, batch {size}",
            "peers:classify",
            **setting.take("encoder", "text", "num_blocks", "length", "threads"),
            tokenizer=setting.model,
            precision=precision,
            batch_size=size,
        )
        for size in setting.classifier_sizes
    ]


def best_trainers(
    bench: Bench, name: str, factory: str, arguments: dict[str, Any]
) -> tuple[list[Spec], list[dict[str, Any]]]:
    """Trainer in each precision, and compiled, with the attention that suits it."""
    ways: dict[str, dict[str, bool]] = {
        "Trainer in float32": {"bf16": False},
        "Trainer(bf16=True)": {"bf16": True},
    }
    if bench.setting.compiled_trainer:
        ways["Trainer(bf16=True, torch_compile=True)"] = {"bf16": True, "compiled": True}
    ladders = [[spec_of(title, factory, **arguments, **options)] for title, options in ways.items()]
    return each_at_its_best(bench, name, ladders)
