"""Coverage of published intervals: on languages where it can be told beforehand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from residual_ebm.estimation.coverage import ExactPrefix, _share, coverage, true_perplexity

OPTIONS = {"num_documents": 20, "num_replicates": 60, "num_resamples": 200, "seed": 0}


def prefix(document: int, probability_K: list[float], log_weight_K: list[float]) -> ExactPrefix:
    """The first continuation is the real one, and the only one that the language has."""
    log_prob_K = np.log(np.array(probability_K))
    weight_K = np.array(log_weight_K, dtype=np.float64)
    return ExactPrefix(document, 2, float(log_prob_K[0]), weight_K[0], log_prob_K, weight_K, 0.0)


def test_the_truth_by_hand() -> None:
    """Z = 0.5 x 2 + 0.5 x 1 = 1.5, so P = 0.5 x 2 / 1.5 = 2/3 of two tokens; 1/4 of the other."""
    one = prefix(0, [0.5, 0.5], [math.log(2), 0.0])
    other = prefix(1, [0.25, 0.75], [0.0, 0.0])
    assert one.log_partition == pytest.approx(math.log(1.5))
    assert one.log_prob == pytest.approx(math.log(2 / 3))
    assert true_perplexity([one, other]) == pytest.approx((3 / 2 * 4) ** (1 / 4))
    # Twice the energy: weights 4 and 1, Z = 2.5.
    assert one.scaled(2).log_prob == pytest.approx(math.log(2 / 2.5))


def light(num_prefixes: int) -> list[ExactPrefix]:
    draw = np.random.default_rng(0)
    found = []
    for number in range(num_prefixes):
        probability_K = draw.dirichlet(np.ones(30))
        found.append(prefix(number, list(probability_K), list(draw.normal(0, 0.5, 30))))
    return found


def test_light_weights_are_covered_without_a_warning() -> None:
    found = coverage(light(200), 256, **OPTIONS)
    assert found.covered > 0.85
    assert abs(found.covered - found.covered_with_known_partition) < 0.1
    for kind in ("heavy weights", "few effective samples"):
        assert (found.warnings[kind].when_covered or 0) < 0.15
    assert abs(found.lower_bias) < 0.01
    assert abs(found.upper_bias) < 0.01
    assert found.effective_sample_size > 100
    assert 0 < found.between_bounds <= 1


def test_the_same_documents_whatever_the_number_of_samples() -> None:
    """With log Z known the samples do not matter, so neither may their number."""
    prefixes = light(40)
    few, many = (coverage(prefixes, count, **OPTIONS) for count in (8, 64))
    assert few.covered_with_known_partition == many.covered_with_known_partition
    other = coverage(prefixes, 8, **{**OPTIONS, "seed": 1})
    assert other.lower_bias != few.lower_bias


def test_bounds_of_equal_weights_are_the_truth() -> None:
    """They meet in it; moved away from it by a wrong weight of the real text they never hold it."""
    same = [prefix(number, [0.25, 0.75], [1.0, 1.0]) for number in range(10)]
    found = coverage(same, 16, **OPTIONS)
    assert (found.lower_bias, found.upper_bias) == pytest.approx((0, 0), abs=1e-12)
    rare = [prefix(number, [0.9999, 0.0001], [0.0, 14.0]) for number in range(10)]
    assert coverage(rare, 16, **OPTIONS).between_bounds < 0.2


def test_a_flag_is_counted_over_all_estimates() -> None:
    found = coverage([one.scaled(3) for one in light(60)], 16, **OPTIONS)
    for warned in found.warnings.values():
        parts = [
            share * of
            for share, of in (
                (warned.when_covered, found.covered),
                (warned.when_missed, 1 - found.covered),
            )
            if share is not None
        ]
        assert warned.overall == pytest.approx(sum(parts))


def test_what_no_sample_shows_no_diagnostic_sees() -> None:
    """A continuation of one in ten thousand holds nearly all of Z, and samples do not find it: the
    weights that are seen are all alike, so k-hat and the effective sample size are content."""
    rare = [
        prefix(number, [0.5, 0.4999, 0.0001], [0.0, 0.0, 14.0 + number / 100])
        for number in range(100)
    ]
    found = coverage(rare, 32, **OPTIONS)
    assert found.covered < 0.5
    assert found.covered_with_known_partition > 0.8
    assert found.lower_bias < -1  # a perplexity far too low
    for kind in ("heavy weights", "few effective samples"):
        assert found.warnings[kind].when_missed == 0


def test_a_difference_is_wrong_where_no_weight_is_seen_and_a_gap_is_true_even_there() -> None:
    """The rare continuation is worth 0.0001 e^14 = 120 of Z = 121, so the joint model is 4.8 nats
    worse than P_LM; samples that do not see it say the same. The gap claims no more than
    KL(data || P_LM) = log 2."""
    found = coverage(light(200), 256, **OPTIONS)
    assert found.covered_difference > 0.85
    assert found.gap_holds == 1
    rare = [
        prefix(number, [0.5, 0.4999, 0.0001], [0.0, 0.0, 14.0 + number / 100])
        for number in range(100)
    ]
    found = coverage(rare, 32, **OPTIONS)
    assert found.covered_difference < 0.5
    assert found.gap_holds == 1


@pytest.mark.parametrize(("true_log_prob", "holds"), [(-1.2, 0.0), (-0.1, 1.0), (math.nan, None)])
def test_a_gap_is_held_against_the_language_itself(
    true_log_prob: float, holds: float | None
) -> None:
    """P_LM gives the real one a quarter, the energy makes it 10 / 13 for many samples: a gain of
    log(40 / 13) = 1.12, where the language, if it has other texts as well, has room for less."""
    prefixes = [
        replace(prefix(number, [0.25, 0.75], [math.log(10), 0.0]), true_log_prob=true_log_prob)
        for number in range(10)
    ]
    assert coverage(prefixes, 256, **OPTIONS).gap_holds == holds


def test_a_gap_that_is_0_is_never_overstated() -> None:
    """All weights are alike: joint model and language model are one, and every estimate says so."""
    same = [prefix(number, [0.25, 0.75], [1.0, 1.0]) for number in range(10)]
    found = coverage(same, 16, **OPTIONS)
    assert found.gap_holds == found.covered_difference == 1


def test_heavy_weights_that_are_seen_are_flagged() -> None:
    """Weights of a wide log-normal: a few samples dominate, and their tail can be fitted."""
    draw = np.random.default_rng(1)
    heavy = [
        prefix(number, list(np.full(2000, 1 / 2000)), list(draw.normal(0, 3, 2000)))
        for number in range(60)
    ]
    found = coverage(heavy, 256, **OPTIONS)
    assert found.share_past_pareto_k > 0.5
    warned = found.warnings["heavy weights"]
    assert {warned.when_covered, warned.when_missed} <= {1.0, None}
    assert found.warnings["any"] == warned
    # ESS is about 8 of 256: above 2 %, below ten.
    assert found.effective_sample_size < 10
    assert found.warnings["few effective samples"].overall > 0.9


def test_a_share_of_nothing_is_none() -> None:
    assert _share([True, False], [True, True], True) == 0.5
    assert _share([True, False], [True, True], False) is None


def test_the_bias_shrinks_as_samples_grow() -> None:
    prefixes = [one.scaled(4) for one in light(100)]
    few, many = (coverage(prefixes, count, **OPTIONS) for count in (8, 512))
    assert few.lower_bias < many.lower_bias <= 0.005
    assert abs(many.upper_bias) < abs(few.upper_bias)


def test_it_is_a_function_of_its_seed() -> None:
    prefixes = light(30)
    one, again = (coverage(prefixes, 16, **OPTIONS) for _ in range(2))
    assert one == again
    assert coverage(prefixes, 16, **{**OPTIONS, "seed": 1}) != one
