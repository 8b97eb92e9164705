"""Laws of the automaton on toys that can be enumerated."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import scipy.stats

from residual_ebm.files.automaton import END, Grammar, Symbol, Table

# After an "x" the state may be A or C: a window has to be filtered to tell them apart.
TOY: Table = {
    "A": {"x": (0.5, "A"), "y": (0.3, "B"), END: (0.2, "A")},
    "B": {"x": (0.6, "C"), "y": (0.4, "B")},
    "C": {"x": (0.1, "C"), "z": (0.2, "B"), END: (0.7, "A")},
}
# A language of three documents.
FINITE: Table = {
    0: {"a": (0.7, 1), "d": (0.3, 2)},
    1: {"b": (0.6, 2), "c": (0.4, 2)},
    2: {END: (1.0, 0)},
}


def transition_matrix(table: Table) -> np.ndarray:
    states = list(table)
    matrix = np.zeros((len(states), len(states)))
    for state, row in table.items():
        for probability, following in row.values():
            matrix[states.index(state), states.index(following)] += probability
    return matrix


def probability_from(table: Table, state: object, symbols: tuple[Symbol, ...]) -> float:
    probability = 1.0
    for symbol in symbols:
        step, state = table[state].get(symbol, (0.0, state))
        probability *= step
    return probability


def stream_probability(grammar: Grammar, symbols: tuple[Symbol, ...]) -> float:
    """Of a window anywhere in the stream: over all states it may have started in."""
    return sum(
        weight * probability_from(grammar.table, state, symbols)
        for state, weight in grammar.stationary.items()
    )


@pytest.mark.parametrize("table", [TOY, FINITE], ids=["toy", "finite"])
def test_stationary_distribution_is_left_alone_by_a_step(table: Table) -> None:
    grammar = Grammar(table, next(iter(table)))
    assert tuple(grammar.stationary) == grammar.states
    stationary = np.array(list(grammar.stationary.values()))
    assert stationary.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(stationary @ transition_matrix(table), stationary, atol=1e-12)


def test_states_that_no_document_reaches_are_never_believed_in() -> None:
    grammar = Grammar({**FINITE, "island": {"e": (0.5, "island"), END: (0.5, 0)}}, 0)
    assert grammar.stationary == pytest.approx(Grammar(FINITE, 0).stationary)
    assert grammar.log_prob(["e"])[0] == -np.inf


def test_words_are_the_terminals() -> None:
    assert Grammar(TOY, "A").words == ("x", "y", "z")


@pytest.mark.parametrize("num_given", [0, 1, 2, 3])
def test_filter_equals_enumeration_over_start_states(num_given: int) -> None:
    grammar = Grammar(TOY, "A")
    total = 0.0
    for symbols in itertools.product(["x", "y", "z", END], repeat=4):
        given, words = symbols[:num_given], symbols[num_given:]
        expected, condition = (stream_probability(grammar, part) for part in (symbols, given))
        total += expected
        if condition == 0:
            with pytest.raises(ValueError, match="impossible"):
                grammar.log_prob(words, given=given)
            continue
        log_prob = grammar.log_prob(words, given=given)
        assert log_prob.shape == (len(words),)
        assert math.exp(log_prob.sum()) == pytest.approx(expected / condition, abs=1e-14)
        for t in range(len(words) - 1):  # per word too, not in total only
            before = stream_probability(grammar, given + words[:t])
            if before > 0:
                ratio = stream_probability(grammar, given + words[: t + 1]) / before
                assert math.exp(log_prob[t]) == pytest.approx(ratio, abs=1e-14)
    assert total == pytest.approx(1, abs=1e-12)


def test_from_start_knows_the_state() -> None:
    grammar = Grammar(TOY, "A")
    symbols: tuple[Symbol, ...] = ("y", "x", END, "x", "y")
    expected = probability_from(TOY, "A", symbols)
    assert math.exp(grammar.log_prob(symbols, from_start=True).sum()) == pytest.approx(expected)
    split = grammar.log_prob(symbols[2:], given=symbols[:2], from_start=True)
    np.testing.assert_allclose(split, grammar.log_prob(symbols, from_start=True)[2:])
    # "z" cannot start a document, though it can start a window.
    assert grammar.log_prob(["z"], from_start=True)[0] == -np.inf
    assert np.isfinite(grammar.log_prob(["z"])[0])


def test_belief_is_a_distribution_and_follows_the_words() -> None:
    grammar = Grammar(TOY, "A")
    assert grammar.belief([]) == grammar.stationary
    uncertain = grammar.belief(["x"])
    assert set(uncertain) == {"A", "C"}
    assert sum(uncertain.values()) == pytest.approx(1)
    assert grammar.belief(["x", "z"]) == {"B": 1.0}
    assert grammar.belief(["z", "z"]) == {}


@pytest.mark.parametrize("impossible", ["z", "unheard-of"])
def test_from_the_first_impossible_word_on_all_are_minus_infinity(impossible: str) -> None:
    log_prob = Grammar(TOY, "A").log_prob(["x", "y", impossible, "x", "x"])
    assert np.isfinite(log_prob).tolist() == [True, True, False, False, False]
    assert (log_prob[2:] == -np.inf).all()


def test_no_words_have_no_log_prob() -> None:
    assert Grammar(TOY, "A").log_prob([], given=["x"]).shape == (0,)


def test_entropy_rate_is_document_entropy_over_document_length() -> None:
    document_probabilities = [0.7 * 0.6, 0.7 * 0.4, 0.3]
    document_entropy = -sum(p * math.log(p) for p in document_probabilities)
    num_symbols = 0.7 * 3 + 0.3 * 2  # end-of-text is one
    rate = Grammar(FINITE, 0).entropy_rate()
    assert rate == pytest.approx(document_entropy / num_symbols, abs=1e-12)


def test_sampled_documents_have_the_frequencies_of_the_table() -> None:
    grammar = Grammar(TOY, "A")
    generator = np.random.default_rng(0)
    num_documents = 20_000
    counts = Counter(grammar.sample_document(generator) for _ in range(num_documents))
    common = ["", "x", "x x", "y x", "y y x", "x y x", "y x x", "y x z x"]
    expected = [probability_from(TOY, "A", (*text.split(), END)) for text in common]
    observed = [counts[text] for text in common]
    observed.append(num_documents - sum(observed))
    expected.append(1 - sum(expected))
    result = scipy.stats.chisquare(observed, np.multiply(expected, num_documents))
    assert result.pvalue > 1e-3


def test_documents_longer_than_one_batch_of_draws() -> None:
    grammar = Grammar({0: {"x": (0.999, 0), END: (0.001, 0)}}, 0)
    generator = np.random.default_rng(0)
    lengths = [len(grammar.sample_document(generator).split()) for _ in range(300)]
    # Geometric with mean 999: five standard errors.
    assert abs(np.mean(lengths) - 999) < 5 * 1000 / math.sqrt(300)


@pytest.mark.parametrize(
    "table",
    [
        {0: {"a": (0.5, 0), END: (0.4, 0)}},
        {0: {"a": (1.0, 0), END: (0.0, 0)}},
        {0: {"a": (0.5, 7), END: (0.5, 0)}},
        {0: {"a": (0.5, 1), END: (0.5, 0)}, 1: {END: (1.0, 1)}},
    ],
    ids=["sum", "zero", "unknown state", "no restart"],
)
def test_broken_tables_are_refused(table: Table) -> None:
    with pytest.raises(AssertionError):
        Grammar(table, 0)
