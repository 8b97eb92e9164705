"""The benchmarks: what is compared with what, each alternative at its own best setting.

An alternative with settings (a batch size, a kind of cache) is swept first; the best then takes
turns with us.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from residual_ebm.bench.agreement import agreement
from residual_ebm.bench.engines import versions_of
from residual_ebm.bench.setting import FUSED, OURS, PLAIN, PRODUCTS, Setting
from residual_ebm.bench.sweeps import Sweeps, reading_row
from residual_ebm.bench.workers import Spec, alternate
from residual_ebm.progress import Progress

_HERE = "residual_ebm.bench"
_NO_ALTERNATIVES = (f"{_HERE}.ours:", f"{_HERE}.products:")  # to us


_KEPT = ", memory kept"  # ends the name of a peer that has our way with memory


class Bench(NamedTuple):
    """What every benchmark is given."""

    setting: Setting
    progress: Progress
    sweeps: Sweeps


def _spec(name: str, factory: str, **arguments: Any) -> Spec:
    return Spec(
        name,
        f"{_HERE}.{factory}",
        arguments,
        keeps_memory=not factory.startswith("peers:"),
    )


def _with_either_attention(spec: Spec) -> list[Spec]:
    """What transformers does by itself, and with plain attention, which is sometimes quicker."""
    arguments = {**spec.arguments, "attention": PLAIN}
    return [spec, spec._replace(name=f"{spec.name}, plain attention", arguments=arguments)]


def _ladders(*ladders: Sequence[Spec]) -> list[list[Spec]]:
    """Each ladder with either attention."""
    return [
        list(column)
        for ladder in ladders
        for column in zip(*map(_with_either_attention, ladder), strict=True)
    ]


def _with_memory_kept(
    bench: Bench, name: str, *ladders: Sequence[Spec]
) -> tuple[Spec, list[dict[str, Any]]]:
    """The quickest of peers if they had our way with memory too, and what was tried."""
    kept = [
        [spec._replace(name=f"{spec.name}{_KEPT}", keeps_memory=True) for spec in ladder]
        for ladder in _ladders(*ladders)
    ]
    return bench.sweeps.best(name, kept)


def _each_at_its_best(
    bench: Bench, name: str, ladders: Sequence[Sequence[Spec]]
) -> tuple[list[Spec], list[dict[str, Any]]]:
    """The best of every ladder, the quickest of all with memory kept, and what was tried."""
    found = [bench.sweeps.best(name, _ladders(ladder)) for ladder in ladders]
    found.append(_with_memory_kept(bench, name, *ladders))
    return [best for best, _ in found], [row for _, sweep in found for row in sweep]


def _compare(
    name: str,
    unit: str,
    specs: Sequence[Spec],
    bench: Bench,
    sweep: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Ours, first of the specs, against the rest."""
    readings = alternate(
        specs,
        bench.setting.repeats,
        timeout=bench.setting.timeout,
        label=name,
        progress=bench.progress,
    )
    ours = readings[0].rate
    products = next((reading.rate for reading in readings if reading.name == PRODUCTS), None)
    return {
        "unit": unit,
        "rows": [reading_row(reading) for reading in readings],
        "sweep": sweep or [],
        "alternatives": [
            spec.name for spec in specs if not spec.factory.startswith(_NO_ALTERNATIVES)
        ],
        "engines": {name: of for spec in specs for name, of in versions_of(spec.factory).items()},
        "ours_to": {
            reading.name: ours / reading.rate
            for reading in readings[1:]
            if ours is not None and reading.rate is not None
        },
        "products_to": {
            reading.name: products / reading.rate
            for reading in readings
            if products is not None and reading.rate is not None and reading.name != PRODUCTS
        },
    }


# Title, factory, which is named like the module it needs, and the ways in which each is tried.
_ENGINES: tuple[tuple[str, str, dict[str, dict[str, Any]]], ...] = (
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
_DRAWING = ("model", "text", "prefix_length", "num_tokens", "threads")
_MULTIPLYING = ("model", "precision", "prefix_length", "num_tokens", "threads")


def _generate(bench: Bench, title: str, **arguments: Any) -> Spec:
    compiled = ", compiled" if arguments["compiled"] else ""
    return _spec(
        f"generate, {title}, {arguments['cache']} cache{compiled}",
        "peers:generate",
        **bench.setting.take(*_DRAWING, "precision"),
        **{"top_k": None, **arguments},
    )


def _best_of_generate(bench: Bench) -> tuple[list[Spec], Spec, list[dict[str, Any]]]:
    """Of one prefix: ways between which one turn does not decide, the quickest if it had our way
    with memory, and what was tried."""
    setting = bench.setting
    dynamic, *static = (
        [
            _generate(
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
    bests, sweep = bench.sweeps.contenders("decode", _ladders(dynamic, *static))
    kept, swept = _with_memory_kept(bench, "decode", dynamic)
    return bests, kept, sweep + swept


def _best_of_engines(bench: Bench) -> tuple[list[Spec], list[dict[str, Any]]]:
    """As with generate, of each engine that is installed."""
    setting = bench.setting
    bests: list[Spec] = []
    sweep: list[dict[str, Any]] = []
    for title, factory, ways in _ENGINES:
        ladders = [
            [
                _spec(
                    f"{title}, batch {size}, {way}",
                    f"engines:{factory}",
                    **setting.take(*_DRAWING),
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


def _decode(bench: Bench, top_k: int | None = None) -> dict[str, Any]:
    setting = bench.setting
    bests, kept, sweep = _best_of_generate(bench)
    engines, swept = _best_of_engines(bench)
    bests = [
        spec._replace(arguments={**spec.arguments, "top_k": top_k})
        for spec in (*bests, kept, *engines)
    ]
    drawn = {"num_prefixes": 1, "samples_per_prefix": setting.num_samples}
    ours = {**setting.take(*_DRAWING, "precision"), "top_k": top_k, **drawn}
    return _compare(
        "decode",
        "tokens/s",
        [
            _spec(OURS, "ours:draw", **ours),
            _spec(
                PRODUCTS,
                "products:drawing",
                **setting.take(*_MULTIPLYING),
                **drawn,
            ),
            *bests,
        ],
        bench,
        sweep + swept,
    )


def _decode_top_k(bench: Bench) -> dict[str, Any]:
    return {**_decode(bench, top_k=10), "sweep_is_of": " without truncation"}


def _negatives(bench: Bench) -> dict[str, Any]:
    setting = bench.setting
    common = {**setting.take(*_DRAWING, "precision", "samples_per_prefix"), "top_k": None}
    sizes = sorted({max(1, setting.num_prefixes // divisor) for divisor in (16, 4, 1)})
    # A static cache without compiling is no quicker than a dynamic one anywhere in `decode`.
    dynamic, compiled = (
        [
            _generate(
                bench,
                f"{size} prefixes at once",
                num_prefixes=size,
                samples_per_prefix=setting.samples_per_prefix,
                cache=cache,
                compiled=compiled,
            )
            for size in (setting.compiled_prefixes if compiled else sizes)
        ]
        for cache, compiled in (("dynamic", False), ("static", True))
    )
    bests, sweep = bench.sweeps.contenders("negatives", _ladders(dynamic, compiled))
    kept, swept = _with_memory_kept(bench, "negatives", dynamic)
    ours = _spec(OURS, "ours:draw", **common, num_prefixes=setting.num_prefixes)
    products = _spec(
        PRODUCTS,
        "products:drawing",
        **setting.take(*_MULTIPLYING, "num_prefixes", "samples_per_prefix"),
    )
    specs = [ours, products, *bests, kept]
    return _compare("negatives", "tokens/s", specs, bench, sweep + swept)


def _classifiers(setting: Setting, precision: str) -> list[Spec]:
    return [
        _spec(
            f"classifier in {precision}, batch {size}",
            "peers:classify",
            **setting.take("encoder", "text", "num_blocks", "length", "threads"),
            tokenizer=setting.model,
            precision=precision,
            batch_size=size,
        )
        for size in setting.classifier_sizes
    ]


def _score(bench: Bench) -> dict[str, Any]:
    setting = bench.setting
    common = setting.take("encoder", "text", "num_blocks", "length", "threads")
    ladders = [_classifiers(setting, precision) for precision in ("float32", setting.precision)]
    bests, sweep = _each_at_its_best(bench, "score", ladders)
    given = {**common, **setting.take("model", "precision")}
    ours = _spec(OURS, "ours:score", **given, batch_size=64)
    products = _spec(PRODUCTS, "products:scoring", **given)
    return _compare("score", "blocks/s", [ours, products, *bests], bench, sweep)


def _train(bench: Bench) -> dict[str, Any]:
    setting = bench.setting
    batch = {
        **setting.take("architecture", "length", "threads"),
        "batch_size": setting.train_batch,
    }
    common = {**batch, "steps": setting.steps_a_turn}
    ours = _spec(OURS, "ours:train_lm", **common, precision=setting.precision)
    products = _spec(PRODUCTS, "products:training_lm", **batch, precision=setting.precision)
    bests, sweep = _best_trainers(bench, "train", "peers:trainer_lm", common)
    return _compare("train", "tokens/s", [ours, products, *bests], bench, sweep)


def _train_nce(bench: Bench) -> dict[str, Any]:
    setting = bench.setting
    common = setting.take("encoder", "text", "length", "threads")
    given = {**common, **setting.take("model", "num_pairs", "precision")}
    steps = {"steps": setting.nce_steps_a_turn}
    peer = {**common, **steps, "tokenizer": setting.model, "batch_size": 2 * setting.num_pairs}
    ours = _spec(OURS, "ours:train_nce", **given, **steps)
    products = _spec(PRODUCTS, "products:training_nce", **given)
    bests, sweep = _best_trainers(bench, "train-nce", "peers:trainer_classifier", peer)
    return _compare("train-nce", "blocks/s", [ours, products, *bests], bench, sweep)


def _best_trainers(
    bench: Bench, name: str, factory: str, arguments: dict[str, Any]
) -> tuple[list[Spec], list[dict[str, Any]]]:
    """Trainer in each precision, and compiled, with the attention that suits it."""
    ways: dict[str, dict[str, bool]] = {
        "Trainer in float32": {"bf16": False},
        "Trainer(bf16=True)": {"bf16": True},
    }
    if bench.setting.compiled_trainer:
        ways["Trainer(bf16=True, torch_compile=True)"] = {"bf16": True, "compiled": True}
    ladders = [[_spec(title, factory, **arguments, **options)] for title, options in ways.items()]
    return _each_at_its_best(bench, name, ladders)


def _evaluate(bench: Bench) -> dict[str, Any]:
    setting = bench.setting
    common = setting.take(*_DRAWING, "precision")

    def ours(name: str, num_samples: int, encoder: str | None, **options: Any) -> Spec:
        return _spec(
            f"{OURS}{name}, n = {num_samples}",
            "ours:evaluate",
            **common,
            batch_size=64,
            encoder=encoder,
            num_samples=num_samples,
            chunk_size=setting.few_samples,  # for both: memory and rate depend on it
            **options,
        )

    few, many = setting.few_samples, setting.many_samples

    def theirs(drawing: Spec, classifier: Spec) -> Spec:
        # Its time is proportional to n, so one batch of it is enough to know its rate.
        given = classifier.arguments
        return drawing._replace(
            name=f"{drawing.name.removesuffix(_KEPT)}, then classifier",
            factory=f"{_HERE}.peers:generate_then_classify",
            arguments={
                "drawing": drawing.arguments,
                "encoder": setting.encoder,
                "batch_size": given["batch_size"],
                "attention": given.get("attention", FUSED),
            },
        )

    classifiers = _classifiers(setting, setting.precision)
    classifier, _ = bench.sweeps.best("score", _ladders(classifiers))
    kept_classifier, _ = _with_memory_kept(bench, "score", classifiers)
    bests, kept, _ = _best_of_generate(bench)
    kept = theirs(kept, kept_classifier)
    products = _spec(
        PRODUCTS,
        "products:evaluating",
        **setting.take(*_DRAWING, "precision", "encoder"),
        num_samples=setting.few_samples,  # as many as go through our layers together
    )
    specs = [
        ours("", many, setting.encoder),
        ours("", few, setting.encoder),
        ours(" with HeaT", few, None),
        ours(", drawing alone", few, None, scored=False),
        products,
        *(theirs(best, classifier) for best in bests),
        kept._replace(name=f"{kept.name}{_KEPT}"),
    ]
    result = _compare("evaluate", "samples/s", specs, bench)
    result["settings_of"] = ["decode", "score"]
    for without_encoder in specs[2:4]:  # whose products are fewer
        result["products_to"].pop(without_encoder.name, None)
    seconds = {row["name"]: row["median_seconds"] for row in result["rows"]}
    longer, shorter, with_heat, drawing = (seconds[spec.name] for spec in specs[:4])
    result["time_at_many_to_few"] = longer / shorter if longer and shorter else None
    result["time_with_heat_to_drawing"] = with_heat / drawing if with_heat and drawing else None
    at_many, at_few = (row["peak_bytes"] for row in result["rows"][:2])
    result["peak_at_many_to_few"] = at_many / at_few if at_many and at_few else None
    return result


def _agreement(bench: Bench) -> dict[str, Any]:
    setting = bench.setting
    counts = {setting.precision: setting.agreeing_samples, "float32": setting.num_samples}
    checks = []
    with bench.progress.bar("agreement", len(counts)) as bar:
        for precision, count in counts.items():
            given = setting.take(*_DRAWING, "plain_samples")
            given |= {"precision": precision, "num_samples": count}
            checks.append(agreement(timeout=setting.timeout, **given))
            bar.advance()
    return {"unit": "", "rows": [], "sweep": [], "ours_to": {}, "agreement": checks}


BENCHMARKS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "decode": _decode,
    "decode-top-10": _decode_top_k,
    "negatives": _negatives,
    "score": _score,
    "train": _train,
    "train-nce": _train_nce,
    "evaluate": _evaluate,
    "agreement": _agreement,
}
