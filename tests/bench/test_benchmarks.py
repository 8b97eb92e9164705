"""Every benchmark runs to its end on tiny models, ours and the alternatives."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from residual_ebm.bench.benchmarks import _ENGINES as ENGINES
from residual_ebm.bench.benchmarks import BENCHMARKS, OURS, PRODUCTS, run_benchmarks
from residual_ebm.bench.setting import Setting
from residual_ebm.report.bench_table import print_benchmarks


@pytest.fixture(scope="module")
def setting(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    text = tmp_path_factory.mktemp("bench") / "text.txt"
    text.write_text("the cat sees a dog and the dog sees the cat . " * 200)
    return Setting(
        model=str(tiny_run / "language_models" / "base"),
        encoder=str(tiny_run / "encoders" / "encoder"),
        text=str(text),
        precision="float32",
        threads=1,
        repeats=2,
        timeout=120.0,
        prefix_length=12,
        num_tokens=4,
        num_samples=6,
        batch_sizes=(2,),
        compiled_sizes=(),
        num_prefixes=2,
        samples_per_prefix=2,
        num_blocks=4,
        num_pairs=2,
        train_steps=2,
        train_batch=2,
        few_samples=3,
        many_samples=6,
        chunk_size=4,
        layers=1,
        hidden_size=16,
        vocabulary=50,
    )


# decode-top-10 is decode with another argument.
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "decode-top-10"])
def test_a_benchmark_measures_us_and_what_it_names(setting: Setting, name: str) -> None:
    results = run_benchmarks([name], setting)
    benchmark = results["benchmarks"][name]
    rows = {row["name"]: row for row in benchmark["rows"]}
    for row_name, row in rows.items():
        if any(row_name.startswith(engine) for engine, *_ in ENGINES):
            assert (row["error"] or "").startswith(("ModuleNotFoundError", "UserError")), row
            continue  # extras, and the toy is no model for them
        assert row["error"] is None, row
        assert row["rate"] > 0
        assert len(row["seconds"]) == 2
        assert row["peak_bytes"] > 1e6
    ours = next(iter(rows.values()))
    assert ours["name"].startswith(OURS)
    for other, ratio in benchmark["ours_to"].items():
        assert ratio == pytest.approx(ours["rate"] / rows[other]["rate"])
    assert (PRODUCTS in rows) == name.startswith("decode")

    output = io.StringIO()
    print_benchmarks(results, Console(file=output, width=120))
    for row_name in rows:
        assert row_name in output.getvalue()
