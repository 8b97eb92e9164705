"""A small language with long-range duties: text for the `tiny` recipe, with no download.

A document keeps to one topic and has at least three sentences, which open with FIRST_WORDS; later
ones open with one of OPENERS or with nothing:

    today the proud king that the knights praise sees a crown himself still .

What a weak left-to-right model gets wrong and a judge of the whole passage can see: verbs agree
with nouns across adjectives and relative clauses, and determiners with nouns; an opener demands
its closer; the reflexive agrees with the subject; nouns stay within the topic. The full stop ends
every duty but the topic and nothing is hidden, so any 15 consecutive words tell the state.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from residual_ebm.errors import UserError
from residual_ebm.files import bracket_grammar
from residual_ebm.files.automaton import END, Grammar, Symbol
from residual_ebm.randomness import generator

__all__ = ["END", "GRAMMARS", "Grammar", "Symbol", "build_grammar", "generate_documents"]

TOPICS = {  # no noun and no adjective starts with a vowel: "a" never has to be "an"
    "court": ("king", "knights", "queen", "ladies", "crown", "swords", "banners", "throne"),
    "sea": ("sailor", "pirates", "mermaid", "whales", "ship", "nets", "sails", "lighthouse"),
    "school": ("master", "pupils", "schoolgirl", "scholars", "book", "maps", "pens", "desk"),
    "kitchen": ("waiter", "bakers", "waitress", "guests", "loaf", "cakes", "spoons", "kettle"),
}
# The reflexive of each of a topic's nouns. It tells the number too, and the first four act.
REFLEXIVES = (
    *("himself", "themselves", "herself", "themselves"),
    *("itself", "themselves", "themselves", "itself"),
)
NUM_ACTORS = 4
DETERMINERS = {"the": None, "a": False, "some": True, "this": False, "these": True}  # plural?
ADJECTIVES = ("small", "proud", "clever", "quiet", "green", "young", "strange", "busy")
VERBS = ("see", "like", "follow", "praise", "find", "paint", "remember", "want")
FIRST_WORDS = ("first", "then", "next")
OPENERS = {"today": "still", "once": "before", "sometimes": "too", "perhaps": "though"}

_P_END, _P_OPENER, _P_RELATIVE, _P_OBJECT_RELATIVE, _P_REFLEXIVE = 0.1, 0.5, 0.25, 0.6, 0.5
_P_ADJECTIVE = 0.4
_MAX_ADJECTIVES = {"subject": 2, "relative subject": 0, "relative object": 0, "object": 1}
_AFTER_NOUN = {
    "subject": "after subject",
    "relative subject": "relative verb",
    "relative object": "verb",
    "object": "after object",
}


class _State(NamedTuple):
    """What comes next in the sentence, and all that it will have to agree with."""

    next: str = "sentence"
    num_sentences: int = 0  # finished ones, counted up to the three that a document must have
    topic: str = ""  # none before the first noun
    opener: str | None = None
    subject: str = ""  # the reflexive that agrees with it
    role: str = "subject"  # of the noun phrase under way
    plural: bool | None = None  # number of that noun phrase; open after "the"
    num_adjectives: int = 0


_Choice = tuple[float, Symbol, _State]


def _zipf(words: Iterable[str]) -> list[tuple[float, str]]:
    """Words with probabilities in proportion to 1 / rank."""
    weighted = [(1 / rank, word) for rank, word in enumerate(words, start=1)]
    total = sum(weight for weight, _ in weighted)
    return [(weight / total, word) for weight, word in weighted]


def _mixture(
    probability: float, first: Iterable[_Choice], second: Iterable[_Choice]
) -> Iterator[_Choice]:
    """Choices of `first` with this probability, else of `second`."""
    for share, choices in ((probability, first), (1 - probability, second)):
        yield from ((share * weight, symbol, state) for weight, symbol, state in choices if share)


def _nouns(state: _State) -> list[_Choice]:
    """Nouns of the topic (of any, in a document that has none yet) that fit role and determiner."""
    choices: list[_Choice] = []
    for topic in [state.topic] if state.topic else TOPICS:
        nouns = dict(zip(TOPICS[topic], REFLEXIVES, strict=True))
        actors, things = TOPICS[topic][:NUM_ACTORS], TOPICS[topic][NUM_ACTORS:]
        for weight, noun in _zipf((*things, *actors) if state.role == "object" else actors):
            plural = nouns[noun] == "themselves"
            if state.plural not in (None, plural):
                continue
            # What no later word must agree with is dropped, so that equal futures are one state.
            following = _State(
                next=_AFTER_NOUN[state.role],
                num_sentences=state.num_sentences,
                topic=topic,
                opener=state.opener,
                subject=nouns[noun] if state.role == "subject" else state.subject,
                plural=plural if state.role == "relative subject" else None,
            )
            choices.append((weight, noun, following))
    total = sum(weight for weight, _, _ in choices)
    return [(weight / total, noun, following) for weight, noun, following in choices]


def _verbs(plural: bool, following: _State) -> list[_Choice]:
    """Verbs of this number; each topic ranks them in another order."""
    first = 2 * list(TOPICS).index(following.topic)
    stems = _zipf([*VERBS[first:], *VERBS[:first]])
    return [(weight, stem if plural else f"{stem}s", following) for weight, stem in stems]


def _small(state: _State) -> Iterable[_Choice]:
    """The next words in this state: (probability, word, state after it)."""
    subject_plural = state.subject == "themselves"
    match state.next:
        case "sentence" if state.num_sentences < len(FIRST_WORDS):
            first_word = FIRST_WORDS[state.num_sentences]
            return [(1.0, first_word, state._replace(next="noun phrase"))]
        case "sentence":
            plain = state._replace(next="noun phrase")
            opened = [(p, word, plain._replace(opener=word)) for p, word in _zipf(OPENERS)]
            sentence = _mixture(_P_OPENER, opened, _small(plain))
            return _mixture(_P_END, [(1.0, END, _State())], sentence)
        case "noun phrase":
            noun = state._replace(next="noun")
            return [
                (p, word, noun._replace(plural=DETERMINERS[word])) for p, word in _zipf(DETERMINERS)
            ]
        case "noun":
            again = state._replace(num_adjectives=state.num_adjectives + 1)
            adjectives = [(p, word, again) for p, word in _zipf(ADJECTIVES)]
            more = state.num_adjectives < _MAX_ADJECTIVES[state.role]
            return _mixture(_P_ADJECTIVE if more else 0.0, adjectives, _nouns(state))
        case "after subject":
            relative = [(1.0, "that", state._replace(next="relative"))]
            return _mixture(_P_RELATIVE, relative, _small(state._replace(next="verb")))
        case "relative":
            by_another = _small(state._replace(next="noun phrase", role="relative subject"))
            whom = state._replace(next="noun phrase", role="relative object")
            by_subject = _verbs(subject_plural, whom)
            return _mixture(_P_OBJECT_RELATIVE, by_another, by_subject)
        case "relative verb":
            return _verbs(bool(state.plural), state._replace(next="verb", plural=None))
        case "verb":
            return _verbs(subject_plural, state._replace(next="noun phrase", role="object"))
        case "after object":
            closing = state._replace(next="closing")
            return _mixture(_P_REFLEXIVE, [(1.0, state.subject, closing)], _small(closing))
        case "closing" if state.opener:
            return [(1.0, OPENERS[state.opener], state._replace(opener=None))]
        case "closing":
            num_sentences = min(state.num_sentences + 1, len(FIRST_WORDS))
            return [(1.0, ".", _State(num_sentences=num_sentences, topic=state.topic))]
    raise AssertionError(state)


# Where a document starts, and what may follow in a state.
GRAMMARS: dict[str, tuple[Any, Callable[[Any], Iterable[tuple[float, Symbol, Any]]]]] = {
    "small": (_State(), _small),
    "brackets": (bracket_grammar.Open(), bracket_grammar.choices),
}


@cache
def build_grammar(name: str) -> Grammar:
    """The grammar of this name, its table unrolled from the start of a document."""
    if name not in GRAMMARS:
        remedy = f"no such grammar; there is {', '.join(f'grammar:{known}' for known in GRAMMARS)}"
        raise UserError("corpus.path", f"grammar:{name}", remedy)
    table: dict[Hashable, dict[Symbol, tuple[float, Hashable]]] = {}
    start, choices = GRAMMARS[name]
    found = [start]
    for state in found:
        if state in table:
            continue
        row = table[state] = {}
        for probability, symbol, following in choices(state):
            assert symbol not in row, f"{symbol!r} stands for two choices in {state}"
            row[symbol] = (probability, following)
            found.append(following)
    return Grammar(table, start=start)


def generate_documents(name: str, num_documents: int, seed: int) -> list[str]:
    """Document i depends on (name, seed, i) only: asking for more leaves the first ones alone."""
    grammar = build_grammar(name)
    return [
        grammar.sample_document(generator(seed, "grammar", name, i)) for i in range(num_documents)
    ]
