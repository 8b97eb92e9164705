"""What a run says, in words: the verdict, and texts with what is new in them marked."""

import difflib
from typing import Any, Literal, NamedTuple

from residual_ebm.report.rows import (
    base_perplexity,
    best_row,
    bounds_text,
    number_text,
    resampled_text,
)


class Piece(NamedTuple):
    text: str
    is_marked: bool


class Verdict(NamedTuple):
    kind: Literal["gain", "doubt", "none"]
    text: str


def verdict(results: dict[str, Any]) -> Verdict:
    """One sentence that a reader may take home, with every reservation that the numbers have."""
    row = best_row(results)
    counts = f"{results['num_prefixes']['test']} test prefixes"
    if row is None:
        shown = ", ".join(
            f"{row['name']} {number_text(row['test']['value'])}"
            for row in results["language_models"]
        )
        return Verdict("none", f"No energy was trained; perplexity on {counts}: {shown}.")
    test, name = row["test"], row["language_model"]
    base = base_perplexity(results, row)
    difference = test["difference_from_base"]
    what = (
        f"on {counts} the energy {row['energy']} takes {name} from a perplexity of"
        f" {number_text(base)} to {bounds_text(test)}"
    )
    low, high = difference["low"], difference["high"]
    if test["upper"] is None or low is None or high is None:
        words = "but there are too few documents to say how certain that is."
        return Verdict("doubt", f"Undecided: {what}, {words}")
    interval = f"the 95 % interval of the difference is {low:+.2f} to {high:+.2f}"
    if high < 0:
        gain = f"{1 - test['upper'] / base:.1%}"
        if test["flags"]:
            count = len(test["flags"])
            warning = "a warning" if count == 1 else f"{count} warnings"
            words = f"{what} ({gain} lower; {interval}); see the flags below.{resampled_text(test)}"
            return Verdict("doubt", f"A gain with {warning}: {words}")
        words = f"{what}, {gain} lower; {interval}, and no diagnostic objects."
        return Verdict("gain", f"A gain: {words}")
    if low > 0:
        return Verdict("doubt", f"A loss: {what}; {interval}.")
    return Verdict("doubt", f"No gain that is certain: {what}; {interval}, which holds 0.")


def compare_texts(text: str, reference: str) -> list[Piece]:
    """A text in pieces, those marked that the reference has not, word by word."""
    words, known = text.split(), reference.split()
    matcher = difflib.SequenceMatcher(None, known, words, autojunk=False)
    pieces = []
    for operation, _, _, start, end in matcher.get_opcodes():
        if end > start:
            pieces.append(Piece(" ".join(words[start:end]), operation != "equal"))
    return pieces
