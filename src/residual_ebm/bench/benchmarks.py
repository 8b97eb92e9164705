"""The benchmarks: what is compared with what, each alternative at its own best setting.

An alternative with settings (a batch size, a kind of cache) is swept first; the best then takes
turns with us.
"""

from collections.abc import Callable, Sequence
from typing import Any

from residual_ebm.bench.agreement import agreement
from residual_ebm.bench.alternatives import (
    DRAWING,
    HERE,
    KEPT,
    Bench,
    best_of_engines,
    best_of_generate,
    best_trainers,
    classifiers_in,
    each_at_its_best,
    generate_spec,
    ladders_of,
    spec_of,
    with_memory_kept,
)
from residual_ebm.bench.engines import versions_of
from residual_ebm.bench.setting import FUSED, OURS, PRODUCTS
from residual_ebm.bench.sweeps import reading_row
from residual_ebm.bench.workers import Spec, alternate

_NO_ALTERNATIVES = (f"{HERE}.ours:", f"{HERE}.products:")  # to us


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


_MULTIPLYING = ("model", "precision", "prefix_length", "num_tokens", "threads")


def _decode(bench: Bench, top_k: int | None = None) -> dict[str, Any]:
    setting = bench.setting
    bests, kept, sweep = best_of_generate(bench)
    engines, swept = best_of_engines(bench)
    bests = [
        spec._replace(arguments={**spec.arguments, "top_k": top_k})
        for spec in (*bests, kept, *engines)
    ]
    drawn = {"num_prefixes": 1, "samples_per_prefix": setting.num_samples}
    ours = {**setting.take(*DRAWING, "precision"), "top_k": top_k, **drawn}
    return _compare(
        "decode",
        "tokens/s",
        [
            spec_of(OURS, "ours:draw", **ours),
            spec_of(
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
    common = {**setting.take(*DRAWING, "precision", "samples_per_prefix"), "top_k": None}
    sizes = sorted({max(1, setting.num_prefixes // divisor) for divisor in (16, 4, 1)})
    # A static cache without compiling is no quicker than a dynamic one anywhere in `decode`.
    dynamic, compiled = (
        [
            generate_spec(
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
    bests, sweep = bench.sweeps.contenders("negatives", ladders_of(dynamic, compiled))
    kept, swept = with_memory_kept(bench, "negatives", dynamic)
    ours = spec_of(OURS, "ours:draw", **common, num_prefixes=setting.num_prefixes)
    products = spec_of(
        PRODUCTS,
        "products:drawing",
        **setting.take(*_MULTIPLYING, "num_prefixes", "samples_per_prefix"),
    )
    specs = [ours, products, *bests, kept]
    return _compare("negatives", "tokens/s", specs, bench, sweep + swept)


def _score(bench: Bench) -> dict[str, Any]:
    setting = bench.setting
    common = setting.take("encoder", "text", "num_blocks", "length", "threads")
    precisions = dict.fromkeys(("float32", setting.precision))  # which may be the same
    ladders = [classifiers_in(setting, precision) for precision in precisions]
    bests, sweep = each_at_its_best(bench, "score", ladders)
    given = {**common, **setting.take("model", "precision")}
    ours = spec_of(OURS, "ours:score", **given, batch_size=64)
    products = spec_of(PRODUCTS, "products:scoring", **given)
    return _compare("score", "blocks/s", [ours, products, *bests], bench, sweep)


def _train(bench: Bench) -> dict[str, Any]:
    setting = bench.setting
    batch = {
        **setting.take("architecture", "length", "threads"),
        "batch_size": setting.train_batch,
    }
    common = {**batch, "steps": setting.steps_a_turn}
    ours = spec_of(OURS, "ours:train_lm", **common, precision=setting.precision)
    products = spec_of(PRODUCTS, "products:training_lm", **batch, precision=setting.precision)
    bests, sweep = best_trainers(bench, "train", "peers:trainer_lm", common)
    return _compare("train", "tokens/s", [ours, products, *bests], bench, sweep)


def _train_nce(bench: Bench) -> dict[str, Any]:
    setting = bench.setting
    common = setting.take("encoder", "text", "length", "threads")
    given = {**common, **setting.take("model", "num_pairs", "precision")}
    steps = {"steps": setting.nce_steps_a_turn}
    peer = {**common, **steps, "tokenizer": setting.model, "batch_size": 2 * setting.num_pairs}
    ours = spec_of(OURS, "ours:train_nce", **given, **steps)
    products = spec_of(PRODUCTS, "products:training_nce", **given)
    bests, sweep = best_trainers(bench, "train-nce", "peers:trainer_classifier", peer)
    remark = (
        "Dropout of ours takes eight random bits for a number, Trainer's more: a rate of 0.1 is"
        " 26/256 here, and much of the difference (`models/quick_dropout.py`)."
    )
    result = _compare("train-nce", "blocks/s", [ours, products, *bests], bench, sweep)
    return {**result, "remark": remark}


def _evaluate(bench: Bench) -> dict[str, Any]:
    setting = bench.setting
    common = setting.take(*DRAWING, "precision")

    def ours(name: str, num_samples: int, encoder: str | None, **options: Any) -> Spec:
        return spec_of(
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
            name=f"{drawing.name.removesuffix(KEPT)}, then classifier",
            factory=f"{HERE}.peers:generate_then_classify",
            arguments={
                "drawing": drawing.arguments,
                "encoder": setting.encoder,
                "batch_size": given["batch_size"],
                "attention": given.get("attention", FUSED),
            },
        )

    classifiers = classifiers_in(setting, setting.precision)
    classifier, _ = bench.sweeps.best("score", ladders_of(classifiers))
    kept_classifier, _ = with_memory_kept(bench, "score", classifiers)
    bests, kept, _ = best_of_generate(bench)
    kept = theirs(kept, kept_classifier)
    products = spec_of(
        PRODUCTS,
        "products:evaluating",
        **setting.take(*DRAWING, "precision", "encoder"),
        num_samples=setting.few_samples,  # as many as go through our layers together
    )
    specs = [
        ours("", many, setting.encoder),
        ours("", few, setting.encoder),
        ours(" with HeaT", few, None),
        ours(", drawing alone", few, None, scored=False),
        products,
        *(theirs(best, classifier) for best in bests),
        kept._replace(name=f"{kept.name}{KEPT}"),
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
            given = setting.take(*DRAWING, "plain_samples")
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
