"""A grammar whose true probabilities are known: sampling, exact filtering, entropy.

A grammar is a unifilar probabilistic automaton with restarts. In state s the next symbol w has
probability P(w | s), and (s, w) determines the next state, so along known states

    log P(w_1 ... w_n | s_0) = sum_t log P(w_t | s_{t-1}),    s_t = next(s_{t-1}, w_t).

Where the state is not known, as for a window cut out of a stream of documents, it is filtered:
the belief b(s) starts at the stationary distribution of the stream and follows Bayes' rule,

    P(w) = sum_s b(s) P(w | s),    b'(s') = sum_{s: next(s, w) = s'} b(s) P(w | s) / P(w),

which keeps log P(continuation | prefix) exact. So the gap between a language model and the truth,
the quantity that a residual energy is to learn, can be computed instead of estimated.
"""

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import scipy.sparse
import scipy.sparse.linalg

END = None  # end-of-text: a symbol of the automaton that is not text
Symbol = str | None
Table = Mapping[Hashable, Mapping[Symbol, tuple[float, Hashable]]]
Belief = Mapping[Hashable, float]  # probabilities of the possible states

_DRAWS_AT_ONCE = 128  # about a document


@dataclass(frozen=True, eq=False)
class Grammar:
    """`table[state][symbol]` is (probability, next state); end-of-text leads back to `start`."""

    table: Table
    start: Hashable

    def __post_init__(self) -> None:
        for state, row in self.table.items():
            total = sum(probability for probability, _ in row.values())
            assert abs(total - 1) < 1e-9, f"probabilities in state {state} add up to {total}"
            assert all(probability > 0 for probability, _ in row.values()), state
            assert all(following in self.table for _, following in row.values()), state
            assert END not in row or row[END][1] == self.start, state

    @cached_property
    def states(self) -> tuple[Hashable, ...]:
        return tuple(self.table)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """All terminals, sorted, without end-of-text."""
        symbols = {symbol for row in self.table.values() for symbol in row}
        return tuple(sorted(symbol for symbol in symbols if symbol is not END))

    @cached_property
    def stationary(self) -> Belief:
        """How often each state occurs in an endless stream of documents."""
        index = {state: number for number, state in enumerate(self.states)}
        # Expected visits within one document solve visits = start + step @ visits, where `step`
        # leaves out end-of-text. Documents are independent, so by renewal the stream spends its
        # time in proportion to them.
        system = scipy.sparse.eye_array(len(index), format="lil")
        for state, row in self.table.items():
            for symbol, (probability, following) in row.items():
                if symbol is not END:
                    system[index[following], index[state]] -= probability
        start = np.zeros(len(index))
        start[index[self.start]] = 1.0
        visits = scipy.sparse.linalg.spsolve(system.tocsc(), start)
        weights = zip(self.states, (visits / visits.sum()).tolist(), strict=True)
        return {state: weight for state, weight in weights if weight > 0}  # the reachable ones

    @cached_property
    def _inverse_cdf(self) -> dict[Hashable, tuple[list[float], list[tuple[Symbol, Hashable]]]]:
        """For each state: the inner edges of the inverse CDF, and what lies between them."""
        inverse_cdf = {}
        for state, row in self.table.items():
            cumulative = list(accumulate(probability for probability, _ in row.values()))
            outcomes = [(symbol, following) for symbol, (_, following) in row.items()]
            # The last edge is 1 up to rounding; without it every uniform finds an outcome.
            inverse_cdf[state] = (cumulative[:-1], outcomes)
        return inverse_cdf

    def sample_document(self, generator: np.random.Generator) -> str:
        """One document: words separated by single spaces, without its end-of-text."""
        state, words = self.start, list[str]()
        while True:
            for uniform in generator.random(_DRAWS_AT_ONCE).tolist():
                edges, outcomes = self._inverse_cdf[state]
                symbol, state = outcomes[bisect(edges, uniform)]
                if symbol is END:
                    return " ".join(words)
                words.append(symbol)

    def belief(self, given: Sequence[Symbol], *, from_start: bool = False) -> Belief:
        """P(state | given) of the possible states; empty if `given` is impossible.

        `given` starts anywhere in a stationary stream, or at a document's start (`from_start`).
        """
        belief: Belief = {self.start: 1.0} if from_start else self.stationary
        for word in given:
            _, belief = self._follow(belief, word)
        return belief

    def log_prob(
        self, words: Sequence[Symbol], *, given: Sequence[Symbol] = (), from_start: bool = False
    ) -> np.ndarray:
        """log P(word_t | given, words_<t) in nats, for each of `words`; END is end-of-text.

        Where `given` starts is as for `belief`. From the first impossible word on, all are -inf.
        """
        belief = self.belief(given, from_start=from_start)
        if not belief:
            raise ValueError("log_prob: the given words are impossible under the grammar")
        log_prob = np.full(len(words), -np.inf)
        for position, word in enumerate(words):
            probability, belief = self._follow(belief, word)
            if not belief:
                break
            log_prob[position] = math.log(probability)
        return log_prob

    def entropy_rate(self) -> float:
        """Nats per symbol of the stationary stream, end-of-text counted as a symbol."""
        return -sum(
            weight * probability * math.log(probability)
            for state, weight in self.stationary.items()
            for probability, _ in self.table[state].values()
        )

    def _follow(self, belief: Belief, word: Symbol) -> tuple[float, Belief]:
        """P(word) under this belief, and the belief after it (empty if the word is impossible)."""
        joint: dict[Hashable, float] = defaultdict(float)
        for state, weight in belief.items():
            row = self.table[state]
            if word in row:
                probability, following = row[word]
                joint[following] += weight * probability
        total = sum(joint.values())
        return total, {state: weight / total for state, weight in joint.items()}
