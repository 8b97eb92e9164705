"""The report of a run: every section is there, text stays text, and the words fit the numbers."""

import dataclasses
import json
import platform
import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from residual_ebm.report.charts import add_legend, image_of, new_chart, plot_curve
from residual_ebm.report.figures import run_figures
from residual_ebm.report.markdown import markdown_report
from residual_ebm.report.page import Run, html_report, notes_of, read_run
from residual_ebm.report.rows import gap_text, table_rows
from residual_ebm.report.story import Piece, compare_texts, verdict

ATTACK = '<script>alert(1)</script> & "quoted" | *starred* `code` {{ 7 * 7 }}'
SECTIONS = ("table", "flags", "figures", "gap", "examples", "made")


class Page(HTMLParser):
    """Ids, tags and the text of a page; markup that does not close raises."""

    VOID = ("meta", "br", "link", "path", "use", "stop")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attributes)
        self.links += [str(values[key]) for key in ("src", "href") if key in values]
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def run(tiny_run: Path) -> Run:
    return read_run(tiny_run)


@pytest.fixture(scope="module")
def page(run: Run) -> Page:
    return Page(html_report([run]))


def test_every_section_is_there(run: Run, page: Page) -> None:
    for section in SECTIONS:
        assert f"run-1-{section}" in page.ids
    for figure in run.figures:
        assert f"run-1-{figure.name}" in page.ids
        assert figure.title in page.text
        assert f"{figure.caption} {figure.made_of}" in page.text
    assert page.tags.count("svg") == len(run.figures) == 11
    assert verdict(run.results).text in page.text
    for row in table_rows(run.results):
        for cell in row.cells:
            assert cell in page.text


def test_figures_say_what_they_are_made_of(run: Run) -> None:
    for figure in run.figures:
        if not figure.name.startswith("curves-"):
            assert "24 test prefixes, n = 32 proposals a prefix, seed 0" in figure.made_of
        else:
            on = {"energies": "24 validation prefixes", "language-models": "Blocks of the"}
            assert figure.made_of.startswith(on[figure.name.removeprefix("curves-")])
            assert figure.made_of.endswith("seed 0.")


def test_the_page_stands_alone(page: Page) -> None:
    """It loads nothing from elsewhere and runs nothing."""
    assert "script" not in page.tags
    assert all(link.startswith("#") for link in page.links)


def test_the_page_holds_recipe_commit_version_and_times(run: Run, page: Page) -> None:
    assert "negatives_per_positive" in page.text
    assert f"residual-ebm {run.results['version']}" in page.text
    assert f"torch {torch.__version__.partition('+')[0]}" in page.text
    assert f"python {platform.python_version()}" in page.text
    assert "float32 on 1 threads" in page.text
    assert str(run.results["commit"])[:10] in page.text
    for stage in run.timings:
        assert stage in page.text


def test_the_same_numbers_give_the_same_page(run: Run) -> None:
    assert html_report([run]) == html_report([deepcopy(run)])


def attacked(run: Run) -> Run:
    """The run with markup wherever text of a corpus or a name may stand."""
    results, analysis = deepcopy(run.results), deepcopy(run.analysis)
    assert analysis is not None
    for example in results["examples"]:
        example["prefix"] = ATTACK
        for role in ("base", "joint", "highest_energy", "real"):
            example[role]["text"] = f"{ATTACK} {role}"
    for found in analysis["energies"][results["best_energy"]]["passages"].values():
        for passage in found:
            for key in ("prefix", "continuation", "base", "joint"):
                assert isinstance(passage[key], str)
                passage[key] = ATTACK
    results["corpus"] = results["resolved_recipe"]["description"] = ATTACK
    results["joint_models"][0]["test"]["flags"] = [ATTACK]
    results["language_models"][0]["name"] = ATTACK
    for row in results["joint_models"]:
        row["language_model"] = ATTACK
    for entry in analysis["energies"].values():
        entry["language_model"] = ATTACK
    likely = [
        {"token": ATTACK, "is_sampled": True, "probability": 0.75},
        {"token": " x", "is_sampled": False, "probability": 0.25},
    ]
    analysis["per_step"] = {
        "energy": ATTACK,
        "num_prefixes": 1,
        "num_samples": 4,
        "positions": [
            {
                "position": 1,
                "base": 4.0,
                "lower": 2.0,
                "upper": 3.0,
                "gain_interval": {"low": 0.1, "high": 0.5},
            }
        ],
        "diagnostics": {
            "effective_sample_size": 3.0,
            "least_effective_sample_size": 2.0,
            "share_past_pareto_k": 0.0,
        },
        "last_step": None,
        "repeats": [
            {
                "is_repeat": is_repeat,
                "num_samples": 4,
                "context": ATTACK,
                "sampled": ATTACK,
                "base": 0.5,
                "joint": joint,
                "best_base": likely,
                "best_joint": likely,
            }
            for is_repeat, joint in ((True, 0.25), (True, 0.5), (False, 0.75))
        ],
    }
    return Run(ATTACK, results, analysis, {ATTACK: 1.0})


def test_markup_of_a_corpus_stays_text_all_the_way(
    rebm: Callable[..., tuple[int, str, str]], tmp_path: Path, set_options: list[str]
) -> None:
    """From the file through tokenizer, blocks, examples and passages to the page."""
    line = "Then he said <script>alert(1)</script> and <b>left</b> & never came back.\n"
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"Day {number}. {line}" * 12, encoding="utf-8")
    own = {"corpus.path": tmp_path, "corpus.num_generated": 0, "tokenizer.kind": "bpe"}
    own["tokenizer.vocab_size"] = 300
    options = [part for key, value in own.items() for part in ("--set", f"{key}={value}")]
    out = tmp_path / "run"
    code, _, error = rebm("run", "tiny", "--out", out, *set_options, *options)
    assert code == 0, error
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "script" not in Page(text).tags
    assert "<script>alert(1)</script>" in Page(text).text


def test_train_against_validation(run: Run, page: Page) -> None:
    for row in run.results["joint_models"]:
        if not row["scaled"]:
            for split in ("train", "validation"):
                found = row["training"]["detection"][split]
                assert f"{found['accuracy']:.1%}" in page.text
                assert f"{found['auc']:.3f}" in page.text
    assert "by heart?" in page.text


@pytest.mark.parametrize(
    ("gap", "low", "high", "said"),
    [
        (0.5, 0.2, 0.8, "lm is at least 0.200 nats a passage away from the test text (estimate"),
        (0.5, -0.1, 1.1, "No gap between lm and the test text that is certain (estimate +0.500"),
        (-0.5, -0.8, -0.2, "No gap between lm and the test text that is certain (estimate -0.5"),
        (0.5, None, None, "No gap between lm and the test text that is certain (estimate +0.5"),
    ],
)
def test_a_gap_is_called_one_where_it_is_certain(
    gap: float, low: float | None, high: float | None, said: str
) -> None:
    assert gap_text("lm", "heat", gap, {"low": low, "high": high}).startswith(said)


def test_a_flagged_model_is_marked_wherever_it_is_named(run: Run) -> None:
    best = run.results["best_energy"]
    sound, flagged = (
        dataclasses.replace(run, results=changed(run, flags=flags))
        for flags in ([], ["wide: far apart"])
    )
    for one, marks in ((sound, 0), (flagged, 1)):
        page = html_report([one, sound])
        assert page.count(f"<td>joint {best} ⚠</td>") == marks
        assert page.count(f"<td>{best} ⚠</td>") == marks  # side by side
    # The caption explains the sign everywhere.
    assert "⚠: flagged" in html_report([run])


def test_legends_of_many_entries_stand_below_the_axes() -> None:
    for count, is_within in ((4, True), (5, False)):
        figure, axes = new_chart()
        for number in range(count):
            plot_curve(axes, [(0, number), (1, number)], f"energy {number}")
        add_legend(axes)
        image_of(figure, "svg")  # lays it out
        legend = axes.get_legend().get_window_extent()
        own = axes.get_window_extent()
        assert (legend.y0 >= own.y0) == is_within
        if not is_within:
            assert legend.y1 <= own.y0
            assert legend.y0 >= 0
            assert own.height > 0.5 * figure.bbox.height


def test_many_notes_are_folded(run: Run) -> None:
    notes = len(notes_of(run))
    assert notes > 6
    assert f"<summary>{notes} notes: how models compare" in html_report([run])
    alone = dataclasses.replace(run, results={**run.results, "joint_models": [], "comparisons": []})
    alone.results["best_energy"] = None
    assert "notes: how models" not in html_report([dataclasses.replace(alone, analysis=None)])


def test_markup_in_text_stays_text(run: Run) -> None:
    text = html_report([attacked(run)])
    page = Page(text)
    assert "script" not in page.tags
    assert page.text.count("<script>alert(1)</script>") > 20
    assert "49" not in re.findall(r"starred\* `code` (\d+)", page.text)


def test_markup_in_text_stays_text_in_markdown(run: Run) -> None:
    text = markdown_report([attacked(run)], {ATTACK: Path("figures")})
    text, _, recipe = text.partition("\n## How it was made\n")
    found = set(re.findall(r"<[^>]*>", text))
    assert {"<code>", "</code>"} == {one for one in found if not one.startswith("<figures/")}
    assert "\n## Where the language model repeats itself\n" in text
    # log(1/2) at one place and 0 at another; log(3/2) at one that is new.
    assert "of the third by -0.347 nats (2 places)" in text
    assert "something new, by +0.405 nats (1 place)" in text
    assert text.count("Repeated: ") == 2
    assert "</code> (repeated) 0.75, <code> x</code> 0.25" in text
    assert re.findall(r"(?<!\\)[`{}]", text) == []
    assert "\n    negatives:\n" in recipe  # indented: a block that nothing in it can end
    assert all(line.startswith("    ") for line in recipe.strip("\n").splitlines()[2:])


def test_several_runs_side_by_side(run: Run) -> None:
    other = Run("other", run.results, None, {})
    page = Page(html_report([run, other]))
    assert "side-by-side" in page.ids
    for number in (1, 2):
        for section in ("table", "flags", "figures", "made"):
            assert f"run-{number}-{section}" in page.ids
    assert page.links == ["#run-1", "#run-2", *page.links[2:]]
    assert len(page.ids) == len(set(page.ids)) or _repeated(page.ids) <= set(_svg_ids(page.ids))


def _repeated(ids: list[str]) -> set[str]:
    return {one for one in ids if ids.count(one) > 1}


def _svg_ids(ids: list[str]) -> list[str]:
    return [one for one in ids if not one.startswith("run-")]


def test_a_run_without_energies(run: Run) -> None:
    results = deepcopy(run.results)
    results.update(joint_models=[], best_energy=None, examples=[])
    page = Page(html_report([Run("plain", results, {"energies": {}}, {})]))
    assert "No energy was trained" in page.text
    assert "run-1-gap" not in page.ids
    assert [figure.name for figure in run_figures(results, None)] == ["curves-language-models"]


# The command


def test_report_of_one_run(rebm: Callable[..., tuple[int, str, str]], tiny_copy: Path) -> None:
    (tiny_copy / "report.html").unlink()
    code, out, _ = rebm("report", tiny_copy)
    assert code == 0
    assert out.splitlines() == [str(tiny_copy / "report.html")]
    assert (tiny_copy / "report.html").read_text() == html_report([read_run(tiny_copy)])


def test_report_as_markdown(rebm: Callable[..., tuple[int, str, str]], tiny_copy: Path) -> None:
    code, out, _ = rebm("report", tiny_copy, "--format", "md", "--json")
    written = json.loads(out)
    assert code == 0
    assert written["page"] == str(tiny_copy / "report.md")
    text = (tiny_copy / "report.md").read_text()
    images = re.findall(r"!\[[^]]*\]\(<([^)]+)>\)", text)
    assert len(images) == 11
    made_of = {figure.name: figure.made_of for figure in read_run(tiny_copy).figures}
    for image in images:
        drawing = (tiny_copy / image).read_text()
        assert drawing.lstrip().startswith("<?xml")
        assert made_of[Path(image).stem] in drawing, "a figure says what it was made of"
        assert (tiny_copy / image).with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert len(written["figures"]) == 22
    assert "## Can it be trusted?" in text


def test_report_of_several_runs(
    rebm: Callable[..., tuple[int, str, str]], tiny_copy: Path, tmp_path: Path
) -> None:
    """Of the same name, too: their figures stay apart."""
    other = tmp_path / "other" / tiny_copy.name
    shutil.copytree(tiny_copy, other)
    out = tmp_path / "new" / "both.html"
    code, _, _ = rebm("report", tiny_copy, other, "--out", out, "--figures", tmp_path / "f")
    assert code == 0
    assert "Side by side" in out.read_text()
    assert len(list((tmp_path / "f").rglob("*.svg"))) == 22
    page = tmp_path / "new" / "both.md"
    code, _, _ = rebm("report", tiny_copy, other, "--out", page, "--format", "md")
    assert code == 0
    text = page.read_text()
    assert text.startswith("# Side by side\n")
    images = re.findall(r"!\[[^]]*\]\(<([^)]+)>\)", text)
    assert len(set(images)) == len(images) == 22
    assert all((page.parent / image).is_file() for image in images)


def test_a_run_that_is_named_twice(
    rebm: Callable[..., tuple[int, str, str]], tiny_run: Path
) -> None:
    code, _, error = rebm("report", tiny_run, tiny_run)
    assert code == 2
    assert error == f"rebm: run = {tiny_run}: is named twice; name each run once\n"


def test_report_of_no_run(rebm: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, _, error = rebm("report", tmp_path)
    assert code == 2
    assert error == f"rebm: run = {tmp_path}: is not a run directory; make one with `rebm run`\n"
    code, _, error = rebm("report", tmp_path, "--out", tmp_path)
    assert code == 2


def test_results_of_an_older_version(
    rebm: Callable[..., tuple[int, str, str]], tiny_copy: Path
) -> None:
    before = (tiny_copy / "report.html").read_bytes()
    results = json.loads((tiny_copy / "results.json").read_text())
    del results["growth"]
    (tiny_copy / "results.json").write_text(json.dumps(results))
    code, _, error = rebm("report", tiny_copy)
    assert code == 2
    assert "older version" in error
    assert (tiny_copy / "report.html").read_bytes() == before
    code, _, _ = rebm("run", tiny_copy / "recipe.yaml", "--out", tiny_copy)
    assert code == 0
    assert "versions" in json.loads((tiny_copy / "results.json").read_text())
    code, _, _ = rebm("report", tiny_copy)
    assert code == 0


def test_a_missing_analysis_is_told(run: Run) -> None:
    without = Run(run.name, run.results, None, run.timings)
    told = "the analysis is missing or old"
    assert told in html_report([without])
    assert told in markdown_report([without], {run.name: Path("figures")})
    assert told not in html_report([run])


# Words


def changed(run: Run, **test: Any) -> dict[str, Any]:
    results = deepcopy(run.results)
    for row in results["joint_models"]:
        row["test"].update(test)
    return results


def test_verdicts(run: Run) -> None:
    (base,) = [row["test"]["value"] for row in run.results["language_models"]]
    gain = {"difference_from_base": {"low": -0.5, "high": -0.1}, "upper": 0.9 * base}
    assert verdict(changed(run, **gain, flags=[])).text.startswith("A gain: on 24 test prefixes")
    assert "10.0% lower" in verdict(changed(run, **gain, flags=[])).text
    kinds = [verdict(changed(run, **gain, flags=flags)).kind for flags in ([], ["x"])]
    assert kinds == ["gain", "doubt"]
    assert verdict(changed(run, **gain, flags=["x"])).text.startswith("A gain with a warning:")
    assert verdict(changed(run, **gain, flags=["x", "y"])).text.startswith(
        "A gain with 2 warnings:"
    )
    unsure = {"difference_from_base": {"low": -0.5, "high": 0.1}}
    assert verdict(changed(run, **unsure)).text.startswith("No gain that is certain:")
    loss = {"difference_from_base": {"low": 0.2, "high": 0.3}}
    assert verdict(changed(run, **loss)).text.startswith("A loss:")
    assert verdict(changed(run, **loss)).kind == verdict(changed(run, **unsure)).kind == "doubt"
    unknown = {"difference_from_base": {"low": None, "high": None}}
    assert verdict(changed(run, **unknown)).text.startswith("Undecided:")


def test_marked_words() -> None:
    pieces = compare_texts("the cat sat on a mat", "the dog sat on the mat")
    assert pieces == [
        Piece("the", False),
        Piece("cat", True),
        Piece("sat on", False),
        Piece("a", True),
        Piece("mat", False),
    ]
    assert compare_texts("same words", "same words") == [Piece("same words", False)]
    assert compare_texts("", "anything") == []
