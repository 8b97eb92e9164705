"""The small grammar: what its sentences must obey, and that its probabilities are the true ones."""

import math
import re

import numpy as np
import pytest

from residual_ebm.errors import UserError
from residual_ebm.files.grammar import (
    ADJECTIVES,
    END,
    TOPICS,
    VERBS,
    Grammar,
    Symbol,
    build_grammar,
    generate_documents,
)

PLURALS = {
    *("knights", "ladies", "swords", "banners", "pirates", "whales", "nets", "sails"),
    *("pupils", "scholars", "maps", "pens", "bakers", "guests", "cakes", "spoons"),
}
FEMALE = {"queen", "mermaid", "schoolgirl", "waitress"}
CLOSERS = {"today": "still", "once": "before", "sometimes": "too", "perhaps": "though"}
_DETERMINER, _NOUN = "the|a|this|some|these", "|".join(sum(TOPICS.values(), ()))
_VERB, _ADJECTIVE = "|".join(f"{stem}s?" for stem in VERBS), "|".join(ADJECTIVES)
# A parser of its own, by regular expression: the tests do not ask the grammar about itself.
SENTENCE = re.compile(
    rf"""((?P<first>first|then|next)\ |(?P<opener>{"|".join(CLOSERS)})\ )?
    (?P<determiner>{_DETERMINER})\ (({_ADJECTIVE})\ ){{0,2}}(?P<subject>{_NOUN})\ 
    (that\ (
        (?P<determiner2>{_DETERMINER})\ (?P<noun2>{_NOUN})\ (?P<verb2>{_VERB})
        |(?P<verb3>{_VERB})\ (?P<determiner3>{_DETERMINER})\ (?P<noun3>{_NOUN})
    )\ )?
    (?P<verb>{_VERB})\ 
    (?P<determiner4>{_DETERMINER})\ (({_ADJECTIVE})\ )?(?P<object>{_NOUN})
    (\ (?P<reflexive>himself|herself|themselves))?
    (\ (?P<closer>{"|".join(CLOSERS.values())}))?""",
    re.VERBOSE,
)


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    return build_grammar("small")


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return generate_documents("small", 2000, seed=0)


@pytest.fixture(scope="module")
def stream(documents: list[str]) -> list[Symbol]:
    return [word for document in documents for word in [*document.split(" "), END]]


def sentences_of(document: str) -> list[str]:
    assert document.endswith(" .")
    return document.removesuffix(" .").split(" . ")


def test_size(grammar: Grammar) -> None:
    assert 60 <= len(grammar.words) <= 90
    assert 300 <= len(grammar.states) <= 3000
    assert 1.2 < grammar.entropy_rate() < 1.8
    nouns = [set(topic) for topic in TOPICS.values()]
    assert len(set().union(*nouns)) == sum(map(len, nouns)) == 32
    assert all(len(topic & PLURALS) == 4 for topic in nouns)


def test_distributions_sum_to_one_in_every_state(grammar: Grammar) -> None:
    for state, row in grammar.table.items():
        assert sum(p for p, _ in row.values()) == pytest.approx(1, abs=1e-12), state


def test_documents_are_as_long_as_announced(documents: list[str]) -> None:
    num_sentences = [document.split().count(".") for document in documents]
    num_words = [len(document.split()) for document in documents]
    assert min(num_sentences) == 3
    # 2 + geometric(0.1): mean 12, standard deviation sqrt(90).
    assert abs(np.mean(num_sentences) - 12) < 4 * math.sqrt(90 / len(documents))
    assert 6 < sum(num_words) / sum(num_sentences) < 10


def test_every_duty_is_kept_in_every_sentence(documents: list[str]) -> None:
    seen = set()
    for document in documents[:500]:
        topics = set()
        for position, sentence in enumerate(sentences_of(document)):
            match = SENTENCE.fullmatch(sentence)
            assert match, sentence
            part = match.groupdict()
            seen |= {name for name, value in part.items() if value}

            assert part["first"] == dict(enumerate(("first", "then", "next"))).get(position)
            assert part["closer"] == CLOSERS.get(part["opener"] or ""), sentence
            for noun, verb in [("subject", "verb"), ("noun2", "verb2"), ("subject", "verb3")]:
                if part[verb]:
                    assert part[verb].endswith("s") != (part[noun] in PLURALS), sentence
            for determiner, noun in [
                ("determiner", "subject"),
                ("determiner2", "noun2"),
                ("determiner3", "noun3"),
                ("determiner4", "object"),
            ]:
                allowed = {"some", "these"} if part[noun] in PLURALS else {"a", "this"}
                assert part[determiner] in {"the", None, *allowed}, sentence
            if part["reflexive"]:
                subject = part["subject"]
                expected = "herself" if subject in FEMALE else "himself"
                assert part["reflexive"] == ("themselves" if subject in PLURALS else expected)
            topics |= {
                topic
                for topic, nouns in TOPICS.items()
                if {part["subject"], part["noun2"], part["noun3"], part["object"]} & set(nouns)
            }
        assert len(topics) == 1, document
    assert seen == set(SENTENCE.groupindex)


PREFIX = "then some ladies see a crown . next the queen likes this throne herself ."


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("the king sees a crown .", "the king see a crown ."),
        ("the king that the knights praise sees", "the king that the knights praises sees"),
        ("the king that the knights praise sees", "the king that the knights praise see"),
        ("the knights that praise a king see", "the knights that praise a king sees"),
        ("some proud knights", "some proud swords"),  # things do not act
        ("some small proud knights", "some small proud king"),
        ("today the king sees a crown still .", "today the king sees a crown too ."),
        ("today the king sees a crown still .", "today the king sees a crown ."),
        ("the king sees a crown .", "the king sees a crown still ."),
        ("the queen sees some knights herself", "the queen sees some knights themselves"),
        ("the queen sees a king herself", "the queen sees a king himself"),
        ("the king sees a crown", "the king sees a ship"),
        ("the king sees a crown", "first the king sees a crown"),
    ],
)
def test_breaking_a_duty_is_impossible(grammar: Grammar, good: str, bad: str) -> None:
    assert np.isfinite(grammar.log_prob(good.split(), given=PREFIX.split())).all()
    assert grammar.log_prob(bad.split(), given=PREFIX.split())[-1] == -np.inf


def test_log_prob_of_a_document_is_the_sum_along_its_states(
    grammar: Grammar, documents: list[str]
) -> None:
    for document in documents[:50]:
        symbols: list[Symbol] = [*document.split(" "), END]
        state, expected = grammar.start, []
        for symbol in symbols:
            probability, state = grammar.table[state][symbol]
            expected.append(math.log(probability))
        assert state == grammar.start
        np.testing.assert_allclose(grammar.log_prob(symbols, from_start=True), expected, atol=1e-12)


def test_empirical_entropy_is_the_entropy_rate(grammar: Grammar, documents: list[str]) -> None:
    surprise, num_symbols = [], []
    for document in documents:
        symbols: list[Symbol] = [*document.split(" "), END]
        surprise.append(-grammar.log_prob(symbols, from_start=True).sum())
        num_symbols.append(len(symbols))
    rate = sum(surprise) / sum(num_symbols)
    # Delta method for a ratio over independent documents.
    residual = np.array(surprise) - rate * np.array(num_symbols)
    standard_error = residual.std() / np.mean(num_symbols) / math.sqrt(len(documents))
    assert standard_error < 0.01
    assert abs(rate - grammar.entropy_rate()) < 4 * standard_error


def test_any_15_words_tell_the_state(grammar: Grammar) -> None:
    """For all windows there are: follow every pair of distinct states that the same n words can
    lead to, until no pair is left."""
    num_states = len(grammar.states)
    index = {state: number for number, state in enumerate(grammar.states)}
    steps = np.full((len(grammar.words) + 1, num_states), -1)
    for step, symbol in zip(steps, [*grammar.words, END], strict=True):
        for state, row in grammar.table.items():
            if symbol in row:
                step[index[state]] = index[row[symbol][1]]

    pairs_after_one = []  # a pair (i, j) is the number i * num_states + j
    for step in steps:
        reached = np.unique(step[step >= 0])
        first, second = np.meshgrid(reached, reached)
        pairs_after_one.append((first * num_states + second)[first < second])
    pairs, num_words = np.unique(np.concatenate(pairs_after_one)), 1
    while len(pairs):
        first, second = np.divmod(pairs, num_states)
        pairs_after = []
        for step in steps:
            both = (step[first] >= 0) & (step[second] >= 0) & (step[first] != step[second])
            pairs_after.append(step[first][both] * num_states + step[second][both])
        pairs, num_words = np.unique(np.concatenate(pairs_after)), num_words + 1
        assert num_words <= 15


def test_a_window_of_20_words_tells_the_state(grammar: Grammar, stream: list[Symbol]) -> None:
    generator = np.random.default_rng(1)
    for start in generator.integers(0, len(stream) - 20, 500):
        assert len(grammar.belief(stream[start : start + 20])) == 1


def test_document_depends_on_seed_and_number_only(documents: list[str]) -> None:
    assert generate_documents("small", 10, seed=0) == documents[:10]
    assert not set(generate_documents("small", 50, seed=1)) & set(documents[:50])


def test_unknown_grammar_lists_what_exists() -> None:
    with pytest.raises(UserError, match="grammar:small") as caught:
        build_grammar("smal")
    assert caught.value.field == "corpus.path"
    assert caught.value.value == "grammar:smal"
