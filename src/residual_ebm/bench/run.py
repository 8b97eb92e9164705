"""Benchmarks one after the other, each kept with when, where and with what it was measured."""

import datetime
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import residual_ebm
from residual_ebm.bench.alternatives import Bench
from residual_ebm.bench.benchmarks import BENCHMARKS
from residual_ebm.bench.setting import Setting
from residual_ebm.bench.sweeps import Sweeps
from residual_ebm.errors import UserError
from residual_ebm.files.source_commit import source_commit
from residual_ebm.files.versions import versions
from residual_ebm.progress import QUIET, Progress


def run_benchmarks(
    names: Sequence[str],
    setting: Setting,
    progress: Progress = QUIET,
    *,
    earlier: dict[str, Any] | None = None,
    after_each: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure what is named; of `earlier` results the rest is kept. They take hours:
    `after_each` is given what there is by then."""
    benchmarks = dict((earlier or {}).get("benchmarks", {}))
    swept = dict((earlier or {}).get("sweeps", {}))
    results: dict[str, Any] = {
        "setting": asdict(setting),
        "sweeps": swept,
        "benchmarks": benchmarks,
    }
    now = json.loads(json.dumps(results["setting"]))
    before = (earlier or {}).get("setting", {})
    # A field that only one of the two knows came or went with a change of a benchmark itself.
    for field in sorted(before.keys() & now.keys()):
        if before[field] != now[field]:
            raise UserError(
                "--page",
                f"{field} {before[field]}",
                f"it was measured so, and this would be {now[field]}; name another page",
            )
    sweeps = Sweeps(setting, progress, swept, keep=lambda: after_each(results))
    for name in names:
        progress.stage(f"Measuring {name}")
        measured = _circumstances()  # now: files may change meanwhile, and are seen to below
        found = BENCHMARKS[name](Bench(setting, progress, sweeps))
        if measured["commit"] != source_commit():
            measured["commit"] = f"{measured['commit']}+"
        benchmarks[name] = {**found, "measured": measured}
        ordered = {known: benchmarks[known] for known in BENCHMARKS if known in benchmarks}
        results["benchmarks"] = ordered
        after_each(results)
    return results


def _circumstances() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "version": residual_ebm.__version__,
        "commit": source_commit(),
        "cores": os.cpu_count(),
        **versions(),
    }
