"""Every benchmark runs to its end on tiny models, ours and the alternatives."""

import io
import json
import multiprocessing
import os
from dataclasses import replace

import pytest
from rich.console import Console

from residual_ebm.bench import benchmarks, sweeps
from residual_ebm.bench.agreement import compare
from residual_ebm.bench.alternatives import ENGINES
from residual_ebm.bench.benchmarks import BENCHMARKS
from residual_ebm.bench.run import run_benchmarks
from residual_ebm.bench.setting import OURS, PRODUCTS, Setting
from residual_ebm.bench.workers import Reading, Spec
from residual_ebm.errors import UserError
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.report.bench_table import print_benchmarks

# What takes most of a worker's start. Not ours: that looks at the process it is imported into.
_IMPORTED_ONCE = (
    "arviz_stats",
    "datasets",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "transformers.core_model_loading",
    "transformers.generation",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)


@pytest.fixture(autouse=True)
def workers_start_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by a fork of one process in which libraries wait, a dozen times as quick as anew."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED_ONCE))
    monkeypatch.setattr(multiprocessing, "get_context", lambda _method: context)


@pytest.fixture
def setting(small_setting: Setting) -> Setting:
    return replace(
        small_setting,
        repeats=2,
        timeout=120.0,
        num_samples=6,
        batch_sizes=(2,),
        classifier_sizes=(2,),
        compiled_sizes=(),
        compiled_prefixes=(2,),
        compiled_trainer=False,  # a minute of compiling
        num_prefixes=2,
        samples_per_prefix=2,
        num_blocks=4,
        num_pairs=2,
        steps_a_turn=2,
        train_batch=2,
        few_samples=3,
        many_samples=6,
        agreeing_samples=5,
        plain_samples=4,
        layers=1,
    )


# decode-top-10 is decode with another argument; agreement is no race.
@pytest.mark.parametrize(
    "name", [name for name in BENCHMARKS if name not in ("decode-top-10", "agreement")]
)
def test_a_benchmark_measures_us_and_what_it_names(setting: Setting, name: str) -> None:
    results = run_benchmarks([name], setting)
    benchmark = results["benchmarks"][name]
    rows = {row["name"]: row for row in benchmark["rows"]}
    for row_name, row in rows.items():
        if any(row_name.startswith(engine) for engine, *_ in ENGINES):
            # Not installed as a rule; where it is, it may or may not take a toy.
            assert row["error"] or row["rate"], row
            continue  # extras, and the toy is no model for them
        assert row["error"] is None, row
        assert row["rate"] > 0
        assert len(row["seconds"]) == 2
        assert row["peak_bytes"] > 1e6
    others = {row_name for row_name in rows if not row_name.startswith((OURS, PRODUCTS))}
    assert set(benchmark["alternatives"]) == others
    ours = next(iter(rows.values()))
    assert ours["name"].startswith(OURS)
    for other, ratio in benchmark["ours_to"].items():
        assert ratio == pytest.approx(ours["rate"] / rows[other]["rate"])
    # What has no encoder has fewer products than these.
    no_encoder = ("with HeaT", "drawing alone")
    assert set(benchmark["products_to"]) == {
        row_name
        for row_name, row in rows.items()
        if row["rate"] and row_name != PRODUCTS and not any(has in row_name for has in no_encoder)
    }
    for other, ratio in benchmark["products_to"].items():
        assert ratio == pytest.approx(rows[PRODUCTS]["rate"] / rows[other]["rate"])

    output = io.StringIO()
    print_benchmarks(results, Console(file=output, width=200))
    for row_name in rows:
        assert row_name in output.getvalue()


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "agreement"])
def test_peers_have_a_usual_process_and_one_has_our_memory(
    setting: Setting, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What we do to memory is ours: what others would gain by it is told apart."""
    rounds: list[list[Spec]] = []

    def alternate(specs: list[Spec], *_arguments: object, **_named: object) -> list[Reading]:
        rounds.append(list(specs))
        return [Reading(spec.name, 1, 1.0, 0.0, [1.0 + spec.keeps_memory], 1) for spec in specs]

    for module in (benchmarks, sweeps):
        monkeypatch.setattr(module, "alternate", alternate)
    found = run_benchmarks([name], setting)["benchmarks"][name]
    for spec in {spec.name: spec for specs in rounds for spec in specs}.values():
        peer = spec.factory.startswith("residual_ebm.bench.peers:")
        assert spec.keeps_memory == (not peer or spec.name.endswith(", memory kept"))
    *others, last = [spec for spec in rounds[-1] if ".peers:" in spec.factory]
    assert not any(spec.keeps_memory for spec in others)
    assert last.keeps_memory
    assert last.name in found["alternatives"]
    if name == "evaluate":  # whose parts are at their best in benchmarks of their own
        assert found["settings_of"] == ["decode", "score"]
        for spec in (*others, last):
            drawn = spec.name.replace(", then classifier", "")
            drawing = next(of for specs in rounds for of in specs if of.name == drawn)
            assert spec.arguments["drawing"] == drawing.arguments
        return
    tried = {row["name"] for row in found["sweep"]}
    assert {spec.name for spec in (*others, last)} <= tried


def test_the_decoder_agrees_with_the_scorer(setting: Setting) -> None:
    results = run_benchmarks(["agreement"], setting)
    checks = results["benchmarks"]["agreement"]["agreement"]
    assert [check["num_samples"] for check in checks] == [6]  # float32 is its precision as well
    for check in checks:
        assert check["same_twice"]
        assert check["largest_difference"] < 1e-4
        assert abs(check["mean_difference"]) <= check["largest_difference"]
        assert check["to_plain"]["num_samples"] == 4
        assert check["to_plain"]["largest_difference"] < 1e-4
    output = io.StringIO()
    print_benchmarks(results, Console(file=output, width=300))
    assert "6 samples in float32: log-prob as drawn minus" in output.getvalue()


def test_a_scorer_that_disagrees_is_found_out(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LanguageModel.log_prob
    monkeypatch.setattr(LanguageModel, "log_prob", lambda *given: right(*given) + 0.1)
    names = ("model", "text", "prefix_length", "num_tokens", "threads", "precision")
    check = compare(**setting.take(*names), num_samples=5, plain_samples=3)
    assert check["mean_difference"] == pytest.approx(-0.1 * setting.num_tokens, abs=1e-3)
    assert check["largest_difference"] == pytest.approx(0.1 * setting.num_tokens, abs=1e-3)
    assert check["to_plain"]["largest_difference"] < 1e-4  # which is not misled by the scorer


def test_what_cannot_be_compared_is_told_and_nothing_is_lost(setting: Setting) -> None:
    results = run_benchmarks(["agreement"], replace(setting, model="no/such/model"))
    (check,) = results["benchmarks"]["agreement"]["agreement"]
    assert check["error"].startswith("UserError: ")
    output = io.StringIO()
    print_benchmarks(results, Console(file=output, width=300))
    assert "6 samples in float32: not compared (UserError" in output.getvalue()


def test_the_table_says_what_was_swept() -> None:
    row = {"name": "theirs", "rate": 1.0}
    found = {"unit": "", "rows": [], "ours_to": {}, "sweep": [row], "sweep_is_of": " elsewhere"}
    output = io.StringIO()
    print_benchmarks({"benchmarks": {"decode": found}}, Console(file=output, width=200))
    assert "Settings tried elsewhere, one turn each: theirs 1.0." in output.getvalue()


def test_what_was_measured_before_stays(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"unit": "", "rows": [], "sweep": [], "ours_to": {}, "products_to": {}}
    for name in ("decode", "score"):
        monkeypatch.setitem(BENCHMARKS, name, lambda *_: made)
    seen: list[list[str]] = []
    first = run_benchmarks(["score"], setting)
    assert first["benchmarks"]["score"]["measured"]["cores"] == os.cpu_count()
    first = json.loads(json.dumps(first))  # as it is read again
    both = run_benchmarks(
        ["decode"],
        setting,
        earlier=first,
        after_each=lambda results: seen.append(list(results["benchmarks"])),
    )
    assert list(both["benchmarks"]) == ["decode", "score"]  # in their own order
    assert seen == [["decode", "score"]]
    with pytest.raises(UserError, match="this would be 3; name another page") as refused:
        run_benchmarks(["decode"], replace(setting, num_tokens=3), earlier=first)
    assert refused.value.value == f"num_tokens {setting.num_tokens}"
