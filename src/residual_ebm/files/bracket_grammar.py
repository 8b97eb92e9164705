"""A language of ten words, small enough to write down everything that could follow.

A sentence opens things and closes them in reverse order, with filler in between:

    ba lu do no do od lu od ab .

What is still open decides which closing word is right, however far back it was opened: a weak
left-to-right model guesses, a judge of the whole passage can count.
"""

from collections.abc import Iterator
from typing import NamedTuple

from residual_ebm.files.automaton import END, Symbol

CLOSERS = {"ba": "ab", "do": "od", "gi": "ig"}
FILLERS = ("lu", "me", "no")
MAX_DEPTH = 3
_P_END, _P_OPEN, _P_FILLER, _P_AGAIN = 0.2, 0.35, 0.3, 0.3


class Open(NamedTuple):
    """What was opened and not closed, outermost first."""

    words: tuple[str, ...] = ()
    in_sentence: bool = False


def choices(state: Open) -> Iterator[tuple[float, Symbol, Open]]:
    """The next words in this state: (probability, word, state after it)."""
    if not state.words:
        # With nothing open, a sentence may stop; between sentences, a document may end.
        goes_on = _P_AGAIN if state.in_sentence else 1 - _P_END
        yield 1 - goes_on, "." if state.in_sentence else END, Open()
        yield from _opened(state, goes_on)
        return
    left = 1.0
    if len(state.words) < MAX_DEPTH:
        yield from _opened(state, _P_OPEN)
        left -= _P_OPEN
    for word in FILLERS:
        yield _P_FILLER / len(FILLERS), word, state
    *outer, innermost = state.words
    yield left - _P_FILLER, CLOSERS[innermost], Open(tuple(outer), in_sentence=True)


def _opened(state: Open, probability: float) -> Iterator[tuple[float, Symbol, Open]]:
    """Openers in falling order of frequency: 3, 2 and 1 of 6."""
    for share, word in zip((3, 2, 1), CLOSERS, strict=True):
        yield probability * share / 6, word, Open((*state.words, word), in_sentence=True)
