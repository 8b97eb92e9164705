"""A report as files: the page, and its figures as images of their own."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

from residual_ebm.errors import UserError
from residual_ebm.files.storage import disk_errors, write_bytes
from residual_ebm.report.charts import image_of
from residual_ebm.report.markdown import markdown_report
from residual_ebm.report.page import Run, html_report, read_run


def write_report(
    folders: list[Path], out: Path | None, kind: str, figures: Path | None
) -> list[Path]:
    """Write the report of some runs and return what was written, the page first.

    A page in Markdown needs its figures as files; beside HTML, which holds them, they are written
    where `figures` says.
    """
    runs = _named_apart(folders)
    if out is None:
        out = folders[0] / f"report.{kind}" if len(folders) == 1 else Path(f"report.{kind}")
    if out.is_dir():
        raise UserError("--out", str(out), "is a folder; name a file")
    if figures is None and kind == "md":
        figures = out.parent / "figures"
    written = [out]
    places = {}
    if figures is not None:
        for number, run in enumerate(runs, start=1):
            own = f"{number}-{Path(run.name).name}"
            places[run.name] = figures if len(runs) == 1 else figures / own
            written += _write_figures(run, places[run.name])
    if kind == "html":
        page = html_report(runs)
    else:
        start = out.parent.resolve()
        page = markdown_report(
            runs,
            {name: Path(os.path.relpath(place.resolve(), start)) for name, place in places.items()},
        )
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, page.encode())
    return written


def _named_apart(folders: list[Path]) -> list[Run]:
    """Runs by the names of their folders, or by their paths where two have the same."""
    resolved = [folder.resolve() for folder in folders]
    for folder in folders:
        if resolved.count(folder.resolve()) > 1:
            raise UserError("run", str(folder), "is named twice; name each run once")
    runs = [read_run(folder) for folder in folders]
    count = Counter(run.name for run in runs)
    return [
        replace(run, name=folder.as_posix()) if count[run.name] > 1 else run
        for run, folder in zip(runs, folders, strict=True)
    ]


def _write_figures(run: Run, folder: Path) -> list[Path]:
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in run.figures:
        chart = figure.chart(alone=True)
        for kind in ("svg", "png"):
            path = folder / f"{figure.name}.{kind}"
            write_bytes(path, image_of(chart, kind))
            written.append(path)
    return written
