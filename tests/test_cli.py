"""The commands on a finished run: JSON for programs, numbers for people, nothing done twice."""

import argparse
import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from residual_ebm import __version__
from residual_ebm.bench import run
from residual_ebm.cli import STAGE_HELP, build_parser
from residual_ebm.files.blocks import read_blocks
from residual_ebm.files.log_weights import REAL, read_real
from residual_ebm.files.samples import read_rows
from residual_ebm.models import device
from residual_ebm.recipe_file import load_recipe
from residual_ebm.report.published import Published
from residual_ebm.report.rows import gap_text
from residual_ebm.report.table import print_results

Rebm = Callable[..., tuple[int, str, str]]

ROLES = ("base", "joint", "highest_energy", "real")


@pytest.fixture(scope="session")
def results(tiny_run: Path) -> dict[str, Any]:
    return dict(json.loads((tiny_run / "results.json").read_text()))


@pytest.fixture(scope="session")
def prompt(results: dict[str, Any]) -> str:
    """A real prefix of the test split, exactly as long as the energies know."""
    return str(results["examples"][0]["prefix"])


def answer(rebm: Rebm, *arguments: object) -> Any:
    """The one JSON value on standard output."""
    code, out, err = rebm(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def shown(rebm: Rebm, *arguments: object) -> str:
    code, out, err = rebm(*arguments)
    assert code == 0, err
    return out


# The package -----------------------------------------------------------------------------------


def test_recipes_are_listed(rebm: Rebm) -> None:
    listed = answer(rebm, "recipes")
    tiny = load_recipe("tiny")
    assert {"name": "tiny", "description": tiny.description} in listed
    assert tiny.description in shown(rebm, "recipes")


def test_the_version_is_told(rebm: Rebm) -> None:
    assert rebm("--version")[:2] == (0, f"rebm {__version__}\n")


def command_names() -> list[str]:
    (commands,) = (
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return list(commands.choices)


@pytest.mark.parametrize("command", ["", *command_names()])
def test_every_command_has_help(rebm: Rebm, command: str) -> None:
    code, out, err = rebm(*command.split(), "--help")
    assert code == 0
    assert err == ""
    assert out.startswith(f"usage: rebm {command}".rstrip())
    assert "--json" in out or not command


def test_commands_that_are_promised() -> None:
    named = {"recipes", "run", "status", "results", "generate", "score", "gap", "next-token"}
    assert named | {"report", "assets", "bench"} | set(STAGE_HELP) == set(command_names())


# Results ---------------------------------------------------------------------------------------


def test_results_hold_every_number_of_the_table(results: dict[str, Any], tiny_run: Path) -> None:
    recipe = load_recipe(str(tiny_run / "recipe.yaml"))
    assert results["recipe"] == "tiny"
    assert results["version"] == __version__
    assert results["num_samples"] == 32
    assert results["num_prefixes"] == {"validation": 16, "test": 24}
    (base,) = results["language_models"]
    assert set(base) == {"name", "parameters", "train", "validation", "test", "training"}
    names = [energy.name for energy in recipe.energies]
    rows = [(row["energy"], row["scaled"]) for row in results["joint_models"]]
    possible = [(name, scaled) for name in names for scaled in (False, True)]
    assert [row for row in rows if not row[1]] == [row for row in possible if not row[1]]
    assert rows == [row for row in possible if row in rows]  # a scaled one behind its own
    assert results["best_energy"] in names
    plain = {row["energy"]: row for row in results["joint_models"] if not row["scaled"]}
    best = min(plain, key=lambda name: plain[name]["validation"]["upper"])
    assert results["best_energy"] == best


@pytest.mark.parametrize("split", ["validation", "test"])
def test_every_interval_has_its_diagnostics(results: dict[str, Any], split: str) -> None:
    num_samples = results["num_samples"]
    for model in results["joint_models"]:
        row = model[split]
        assert row["lower"] <= row["upper"]
        assert row["published"]["low"] <= row["lower"]
        assert row["published"]["high"] >= row["upper"]
        assert row["difference_from_base"]["low"] <= row["difference_from_base"]["high"]
        counts = [at["num_samples"] for at in row["bounds_at"]]
        assert counts == [num_samples // 4, num_samples // 2, num_samples]
        assert all(at["lower"] <= at["upper"] for at in row["bounds_at"])
        assert row["bounds_at"][-1]["upper"] == row["upper"]
        assert row["bounds_at"][-1]["resampled"] == row["resampled"]
        assert row["resampled_difference"]["low"] <= row["resampled_difference"]["high"]
        assert 1 <= row["effective_sample_size"] <= num_samples
        assert 0 <= row["share_past_pareto_k"] <= 1
        assert 0 <= row["share_outweighed"] <= 1
        assert row["log_partition_spread"] >= 0
        assert isinstance(row["flags"], list)
        assert all(isinstance(flag, str) and flag for flag in row["flags"])


def test_no_model_beats_the_grammar_it_learns_from(results: dict[str, Any]) -> None:
    (base,) = results["language_models"]
    for split in ("validation", "test"):
        floor = results["floor"][split]
        assert 1 < floor["value"] < base[split]["value"]
        assert floor["published"]["low"] <= floor["value"] <= floor["published"]["high"]


def test_examples_show_what_each_model_would_have_said(
    results: dict[str, Any], tiny_run: Path
) -> None:
    assert len(results["examples"]) == load_recipe("tiny").evaluation.num_examples
    for example in results["examples"]:
        assert len(example["prefix"].split()) == results["prefix_length"]
        for role in ROLES:
            assert isinstance(example[role]["text"], str)
            assert np.isfinite(example[role]["energy"])
        assert example["highest_energy"]["energy"] >= example["base"]["energy"]
        assert example["highest_energy"]["energy"] >= example["joint"]["energy"]
    blocks = [example["block"] for example in results["examples"]]
    assert len(set(blocks)) == len(blocks)
    assert max(blocks) < len(read_blocks(tiny_run / "blocks" / "test.arrow"))


def test_results_prints_the_saved_ones(rebm: Rebm, tiny_run: Path, results: dict[str, Any]) -> None:
    timings = json.loads((tiny_run / "timings.json").read_text())
    assert answer(rebm, "results", tiny_run) == {**results, "timings": timings}


@pytest.mark.parametrize("same_text", [True, False])
def test_the_caption_says_whether_fine_tuning_would_do_as_well(
    results: dict[str, Any], monkeypatch: pytest.MonkeyPatch, same_text: bool
) -> None:
    """From the published results of a longer recipe, on the same text and on no other."""
    (base,) = results["language_models"]
    adapted = [
        {**base, "training": {"validations": validations}, "test": {**base["test"], "value": value}}
        for validations, value in (([], 31.0), ([{"step": 80}], 22.5), ([{"step": 40}], 23.25))
    ]
    long = {**results, "recipe": "long", "language_models": adapted}
    published = {"long": Published(long, None)}
    monkeypatch.setattr("residual_ebm.report.table.read_published", published.get)
    corpus = results["corpus"] if same_text else "another.txt"
    console = Console(width=200, record=True, file=io.StringIO())
    print_results({**results, "reference": "long", "corpus": corpus}, console)
    words = " ".join(console.export_text().split())
    assert ("stands at 23.25 after 40 steps, 22.50 after 80 steps; on top" in words) == same_text
    assert ("Would plain fine-tuning" in words) == same_text


@pytest.mark.parametrize("columns", [80, 200])
def test_the_table_shows_the_numbers_whole(
    rebm: Rebm,
    tiny_run: Path,
    results: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
) -> None:
    """Also where the terminal is narrow and in a pipe: a number cut short is a wrong number."""
    monkeypatch.setenv("COLUMNS", str(columns))
    text = shown(rebm, "results", tiny_run)
    assert "…" not in text
    (base,) = results["language_models"]
    for split in ("validation", "test"):
        assert f"{base[split]['value']:.2f}" in text
        assert f"{results['floor'][split]['value']:.2f}" in text
        for row in results["joint_models"]:
            assert f"{row[split]['lower']:.2f}-{row[split]['upper']:.2f}" in text
    for row in results["joint_models"]:
        test = row["test"]
        assert f"{test['published']['low']:.2f}-{test['published']['high']:.2f}" in text
    words = " ".join(text.split())
    assert f"{base['train']['value']:.2f} on training text" in words
    for row in results["joint_models"]:
        assert all(flag in words for flag in row["test"]["flags"])
    for example in results["examples"]:
        assert example["prefix"] in words
        assert all(example[role]["text"] in words for role in ROLES)


# Runs ------------------------------------------------------------------------------------------


def _times(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and path.name not in {".lock", "timings.json"}
    }


def test_a_second_run_does_nothing_and_prints_the_same(
    rebm: Rebm, tiny_run: Path, set_options: list[str], results: dict[str, Any]
) -> None:
    before, start = _times(tiny_run), time.monotonic()
    code, out, err = rebm("run", "tiny", *set_options, "--out", tiny_run, "--json")
    assert code == 0
    assert time.monotonic() - start < 5
    assert json.loads(out) == results
    assert err == ""
    assert _times(tiny_run) == before


def test_stages_one_by_one_give_the_same_as_run(
    rebm: Rebm, tiny_run: Path, tmp_path: Path, set_options: list[str]
) -> None:
    out = tmp_path / "stages"
    for number, stage in enumerate(STAGE_HELP):
        done = answer(rebm, stage, "tiny", *set_options, "--out", out)
        assert done == {"stage": stage, "run": str(out)}
        states = answer(rebm, "status", out)
        assert ("missing" in [entry["state"] for entry in states]) == (number < len(STAGE_HELP) - 1)
    assert (out / "results.json").read_bytes() == (tiny_run / "results.json").read_bytes()
    assert (out / "metrics.jsonl").read_bytes() == (tiny_run / "metrics.jsonl").read_bytes()
    assert set(json.loads((out / "timings.json").read_text())) == set(STAGE_HELP)


def test_status_tells_what_is_done(rebm: Rebm, tiny_copy: Path) -> None:
    states = {entry["what"]: entry["state"] for entry in answer(rebm, "status", tiny_copy)}
    assert set(states.values()) == {"done"}
    assert {"blocks", "language model base", "energy heat", "results"} <= set(states)
    (tiny_copy / "energies" / "heat").rename(tiny_copy / "energies" / "heat.training")
    (tiny_copy / "negatives" / "base" / "train" / "manifest.json").unlink()
    (tiny_copy / "results.json").unlink()
    changed = {entry["what"]: entry["state"] for entry in answer(rebm, "status", tiny_copy)}
    assert {what: state for what, state in changed.items() if state != "done"} == {
        "energy heat": "begun",
        "negatives of base, train": "begun",
        "results": "missing",
        "analysis": "missing",
    }
    assert re.search(r"missing +results", shown(rebm, "status", tiny_copy))


def test_the_curves_are_there_for_tensorboard(tiny_run: Path) -> None:
    folders = {path.parent.name for path in tiny_run.glob("tensorboard/*/events.*")}
    energies = {f"train-energy-{name}" for name in ("unit", "bit", "heat")}
    assert folders == {"train-lm-base", "train-encoder-encoder", *energies}


# Generate --------------------------------------------------------------------------------------


def test_generate_gives_a_sample_with_what_is_needed_to_trust_it(
    rebm: Rebm, tiny_run: Path, prompt: str
) -> None:
    options = ("generate", tiny_run, "--prompt", prompt, "--num-proposals", "64")
    sample = answer(rebm, *options)
    assert set(sample) == {
        "text",
        "ids",
        "energy",
        "lm_log_prob",
        "effective_sample_size",
        "num_proposals",
        "target",
        "flags",
    }
    assert sample["num_proposals"] == 64
    assert 1 <= sample["effective_sample_size"] <= 64.001
    assert sample["lm_log_prob"] < 0
    assert sample["flags"] == []
    assert sample["target"] == "P_LM exp(-E) / Z"
    assert len(sample["ids"]) == 16
    text = shown(rebm, *options)
    assert text.startswith(sample["text"] + "\n")
    assert f"energy {sample['energy']:+.3f}, lm_log_prob {sample['lm_log_prob']:.3f}" in text


def test_the_same_seed_gives_the_same_text_and_another_seed_another(
    rebm: Rebm, tiny_run: Path, prompt: str
) -> None:
    options = ("generate", tiny_run, "--prompt", prompt, "--num-proposals", "32", "--seed")
    assert answer(rebm, *options, 3) == answer(rebm, *options, 3)
    assert len({answer(rebm, *options, seed)["text"] for seed in range(4)}) > 1


def test_an_example_of_the_run_is_continued_again(
    rebm: Rebm, tiny_run: Path, results: dict[str, Any]
) -> None:
    options = ("--num-proposals", "16", "--json")
    code, by_number, _ = rebm("generate", tiny_run, "--example", "2", *options)
    assert code == 0
    prefix = results["examples"][1]["prefix"]
    assert by_number == rebm("generate", tiny_run, "--prompt", prefix, *options)[1]
    for number in ("0", "4"):
        code, _, error = rebm("generate", tiny_run, "--example", number)
        assert (code, error) == (
            2,
            f"rebm: --example = {number}: the run has examples 1 to 3\n",
        )


def test_the_whole_scored_set_comes_on_request(rebm: Rebm, tiny_run: Path, prompt: str) -> None:
    options = ("generate", tiny_run, "--prompt", prompt, "--num-proposals", "16", "--all")
    sample = answer(rebm, *options)
    proposals = sample["proposals"]
    assert len(proposals) == 16
    assert {"text", "energy", "lm_log_prob"} == set(proposals[0])
    chosen = {key: sample[key] for key in ("text", "energy", "lm_log_prob")}
    assert chosen in proposals
    energies = [float(line.split()[0]) for line in shown(rebm, *options).splitlines()[2:]]
    assert energies == sorted(energies)
    assert len(energies) == 16


def test_fewer_tokens_are_the_start_of_the_same_sample(
    rebm: Rebm, tiny_run: Path, prompt: str
) -> None:
    """Cut after resampling: an exact marginal, not a sample of another model."""
    options = ("generate", tiny_run, "--prompt", prompt, "--num-proposals", "32")
    whole = answer(rebm, *options)
    cut = answer(rebm, *options, "--num-tokens", "5")
    assert cut["ids"] == whole["ids"][:5]
    assert whole["text"].startswith(cut["text"])
    assert cut["energy"] == whole["energy"]


def test_truncation_changes_the_target_and_says_so(rebm: Rebm, tiny_run: Path, prompt: str) -> None:
    options = ("generate", tiny_run, "--prompt", prompt, "--num-proposals", "32", "--all")
    one = answer(rebm, *options, "--top-k", "1")
    assert one["target"] == "P_LM[top_k=1] exp(-E) / Z"
    assert len({proposal["text"] for proposal in one["proposals"]}) == 1
    few = answer(rebm, *options, "--top-p", "0.3")
    assert few["target"] == "P_LM[top_p=0.3] exp(-E) / Z"
    plain = answer(rebm, *options, "--top-p", "1")
    assert plain["target"] == "P_LM exp(-E) / Z"

    def mean_log_prob(sample: dict[str, Any]) -> float:
        return float(np.mean([proposal["lm_log_prob"] for proposal in sample["proposals"]]))

    assert mean_log_prob(few) > mean_log_prob(plain)
    both = answer(rebm, *options, "--top-k", "5", "--top-p", "0.9")
    assert both["target"] == "P_LM[top_k=5, top_p=0.9] exp(-E) / Z"


@pytest.mark.parametrize("energy", ["unit", "bit", "heat"])
def test_every_energy_generates_and_a_short_prompt_is_flagged(
    rebm: Rebm, tiny_run: Path, energy: str
) -> None:
    options = ("--prompt", "the small queen", "--num-proposals", "8", "--energy", energy)
    sample = answer(rebm, "generate", tiny_run, *options)
    (flag,) = sample["flags"]
    assert "the prompt has 3 tokens" in flag
    assert flag in shown(rebm, "generate", tiny_run, *options)


# Score and gap ---------------------------------------------------------------------------------


def test_score_tells_log_prob_and_energy_of_every_passage(
    rebm: Rebm, tiny_run: Path, tmp_path: Path, results: dict[str, Any]
) -> None:
    (tmp_path / "texts").mkdir()
    examples = results["examples"]
    for number, example in enumerate(examples):
        text = f"{example['prefix']} {example['real']['text']}"
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    # Each file is a block of its own where the end of the text is not cut off.
    alone = answer(rebm, "score", tiny_run, tmp_path / "texts" / "0.txt")
    (passage,) = alone["passages"]
    assert passage["document"] == "0.txt"
    assert passage["num_tokens"] == 16
    assert passage["energy"] == pytest.approx(examples[0]["real"]["energy"], abs=1e-5)
    assert passage["lm_log_prob"] < 0
    assert "perplexity" not in alone

    options = ("score", tiny_run, tmp_path / "texts", "--num-samples", "16")
    together = answer(rebm, *options)
    report = together["perplexity"]
    assert report["num_samples"] == 16
    assert report["num_prefixes"] == len(together["passages"])
    assert report["joint"]["lower"] <= report["joint"]["upper"]
    counts = [at["num_samples"] for at in report["joint"]["bounds_at"]]
    assert counts == [4, 8, 16]
    total = sum(passage["lm_log_prob"] for passage in together["passages"])
    tokens = sum(passage["num_tokens"] for passage in together["passages"])
    assert report["base"]["value"] == pytest.approx(np.exp(-total / tokens))
    text = shown(rebm, *options)
    assert f"P_LM {report['base']['value']:.3f}" in text
    assert f"{report['joint']['lower']:.3f}-{report['joint']['upper']:.3f}" in text


def test_gap_tells_how_far_and_where(rebm: Rebm, tiny_run: Path, results: dict[str, Any]) -> None:
    report = answer(rebm, "gap", tiny_run, "--num-passages", "24")
    assert report["energy"] == results["best_energy"]
    assert report["num_prefixes"] == 24
    gaps = [passage["gap"] for passage in report["passages"]]
    assert gaps == sorted(gaps, reverse=True)
    assert np.mean(gaps) == pytest.approx(report["gap"])
    assert report["interval"]["low"] <= report["gap"] <= report["interval"]["high"]
    assert len(answer(rebm, "gap", tiny_run)["passages"]) == 5
    assert answer(rebm, "gap", tiny_run, "--num-passages", "0")["passages"] == []
    text = shown(rebm, "gap", tiny_run, "--energy", "unit")
    unit = answer(rebm, "gap", tiny_run, "--energy", "unit")
    assert gap_text(unit["language_model"], "unit", unit["gap"], unit["interval"]) in text
    assert unit["passages"][0]["continuation"] in text


def test_next_token_shows_both_models(rebm: Rebm, tiny_run: Path) -> None:
    prompt = json.loads((tiny_run / "results.json").read_text())["examples"][0]["prefix"]
    options = ("next-token", tiny_run, "--prompt", prompt, "--num-candidates", "6")
    found = answer(rebm, *options, "--num-samples", "8", "--num-shown", "4")
    for model in ("base", "joint"):
        assert len(found[model]) == 4
        chances = [one["probability"] for one in found[model]]
        assert sum(chances) == pytest.approx(1)
        assert chances == sorted(chances, reverse=True)
    text = shown(rebm, *options, "--num-samples", "8", "--num-shown", "4")
    for one in (*found["base"], *found["joint"]):
        assert f"{one['probability']:.3f} {one['text']!r}" in text
    assert answer(rebm, *options, "--num-samples", "8", "--num-shown", "4") == found


# Continuations that end ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ending_run(tmp_path_factory: pytest.TempPathFactory, tiny_overrides: list[str]) -> Path:
    """The whole pipeline in `until_end` mode."""
    from residual_ebm.files.open_run import open_run
    from residual_ebm.stages.pipeline import run_all

    folder = tmp_path_factory.mktemp("ending") / "run"
    recipe = load_recipe("tiny", [*tiny_overrides, "block.continuation=until_end"])
    with open_run(folder, recipe) as run_dir:
        run_all(recipe, run_dir)
    return folder


def test_continuations_that_end_go_through_the_whole_pipeline(rebm: Rebm, ending_run: Path) -> None:
    results = answer(rebm, "results", ending_run)
    assert results["continuation"] == "until_end"
    horizon = results["block_length"] - results["prefix_length"]
    blocks = read_blocks(ending_run / "blocks" / "test.arrow")
    assert (blocks.length_B < results["block_length"]).any()
    for folder in ("negatives/base/train", "proposals/base/test"):
        rows = [read_rows(path) for path in sorted((ending_run / folder).glob("shard-*"))]
        length_N = np.concatenate([row.length_N for row in rows])
        ids_NC = np.concatenate([row.ids_NC for row in rows])
        assert (length_N < horizon).any()
        assert (length_N >= 1).all()
        ended = length_N < horizon
        end_of_text = ids_NC[ended, length_N[ended] - 1]
        assert len(set(end_of_text.tolist())) == 1  # the last token of an ended row is its end
    for energy in ("unit", "bit", "heat"):
        real = read_real(ending_run / "log_weights" / energy / "test" / REAL)
        assert (real.num_tokens_P < horizon).any()
        assert (real.num_tokens_P >= 1).all()
    for row in results["joint_models"]:
        assert row["test"]["lower"] <= row["test"]["upper"]
    (base,) = results["language_models"]
    assert results["floor"]["test"]["value"] < base["test"]["value"]


def test_samples_that_end_are_shown_without_their_end(rebm: Rebm, ending_run: Path) -> None:
    options = ("generate", ending_run, "--prompt", "the queen sees a book .", "--all")
    sample = answer(rebm, *options, "--num-proposals", "64")
    texts = [proposal["text"] for proposal in sample["proposals"]]
    assert len({len(text.split()) for text in texts}) > 1
    assert not any("<|" in text for text in texts)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((), None),
        (("--precision", "bfloat16"), "bfloat16"),
        (("--precision", "float32"), "float32"),
    ],
)
def test_benchmarks_are_in_what_the_processor_multiplies_quickly(
    rebm: Rebm,
    asked: tuple[str, ...],
    expected: str | None,
    quick: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "_multiplies_bfloat16_quicker", lambda: quick)
    monkeypatch.setattr(
        run, "run_benchmarks", lambda names, setting, *_: {"names": names, "in": setting.precision}
    )
    found = answer(rebm, "bench", "score", *asked)
    assert found == {"names": ["score"], "in": expected or ("bfloat16" if quick else "float32")}
