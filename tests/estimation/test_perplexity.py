"""Rows of the table against cases whose partition function is known."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from residual_ebm.estimation.bootstrap import Interval
from residual_ebm.estimation.flags import flags
from residual_ebm.estimation.perplexity import (
    JointPerplexity,
    Prefixes,
    base_perplexity,
    joint_log_prob,
    joint_perplexity,
    sample_counts,
    summarise_prefix,
)

RESAMPLING = {"num_resamples": 500, "seed": 3}
NUM_SAMPLES = 256


def make_prefixes(num_prefixes: int = 40) -> Prefixes:
    draw = np.random.default_rng(0)
    return Prefixes(
        -40 + draw.normal(size=num_prefixes) * 4,
        draw.integers(8, 17, num_prefixes),
        np.arange(num_prefixes) // 2,
    )


def make_row(
    log_weight_PN: np.ndarray, real_log_weight_P: np.ndarray, prefixes: Prefixes
) -> JointPerplexity:
    summaries = [
        summarise_prefix(torch.from_numpy(log_weight_N), float(real))
        for log_weight_N, real in zip(log_weight_PN, real_log_weight_P, strict=True)
    ]
    return joint_perplexity(prefixes, summaries, **RESAMPLING)


def test_zero_energy_is_the_base_model_and_nothing_flags_it() -> None:
    prefixes = make_prefixes()
    base = base_perplexity(prefixes, **RESAMPLING)
    row = make_row(np.zeros((40, NUM_SAMPLES)), np.zeros(40), prefixes)
    assert row.lower == pytest.approx(base.value, rel=1e-9)
    assert row.upper == pytest.approx(base.value, rel=1e-9)
    assert row.resampled == pytest.approx(base.value, rel=1e-9)
    assert row.published == pytest.approx(base.published, rel=1e-9)
    assert row.difference_from_base == pytest.approx(Interval(0.0, 0.0), abs=1e-9)
    assert abs(row.log_partition_mean) < 1e-9
    assert row.log_partition_spread < 1e-9
    assert abs(row.gap) < 1e-9
    assert row.effective_sample_size == pytest.approx(NUM_SAMPLES)
    assert row.share_past_pareto_k == 0
    assert flags(row, base.value) == []


def test_a_constant_in_the_energy_moves_log_z_and_nothing_else() -> None:
    prefixes = make_prefixes()
    draw = np.random.default_rng(1)
    log_weight_PN, real_P = draw.normal(size=(40, NUM_SAMPLES)), draw.normal(size=40)
    row = make_row(log_weight_PN, real_P, prefixes)
    moved = make_row(log_weight_PN - 5, real_P - 5, prefixes)
    assert moved.log_partition_mean == pytest.approx(row.log_partition_mean - 5)
    for name in (
        "lower",
        "upper",
        "resampled",
        "gap",
        "effective_sample_size",
        "log_partition_spread",
    ):
        assert getattr(moved, name) == pytest.approx(getattr(row, name)), name
    assert moved.published == pytest.approx(row.published)


def test_bounds_bracket_a_known_partition_function() -> None:
    """Normal log-weights of spread s have log Z = s^2 / 2."""
    prefixes = make_prefixes()
    spread = 0.8
    draw = np.random.default_rng(2)
    log_weight_PN = draw.normal(size=(40, 4096)) * spread
    real_P = draw.normal(size=40) + spread**2
    row = make_row(log_weight_PN, real_P, prefixes)
    log_prob_P = prefixes.lm_log_prob_P + real_P - spread**2 / 2
    exact = math.exp(-log_prob_P.sum() / prefixes.num_tokens_P.sum())
    # 40 x 4096 draws leave log Z uncertain by about 0.002 on average over prefixes.
    assert row.lower * (1 - 5e-4) < exact < row.upper * (1 + 5e-4)
    assert row.gap == pytest.approx((real_P - spread**2 / 2).mean(), abs=0.01)
    assert row.log_partition_mean == pytest.approx(spread**2 / 2, abs=0.01)


def test_the_upper_bound_of_log_z_gives_the_upper_perplexity() -> None:
    prefixes = make_prefixes()
    draw = np.random.default_rng(3)
    row = make_row(draw.normal(size=(40, 16)) * 2, draw.normal(size=40), prefixes)
    assert row.lower < row.upper
    assert row.published.low < row.lower
    assert row.published.high > row.upper
    assert [at.num_samples for at in row.bounds_at] == [4, 8, 16]
    widths = [at.upper - at.lower for at in row.bounds_at]
    assert widths[0] > widths[1] > widths[2] > 0


def test_counts_are_a_quarter_a_half_and_all() -> None:
    assert sample_counts(1000) == (250, 500, 1000)


def test_real_text_that_outweighs_every_proposal_is_counted() -> None:
    log_weight_N = torch.linspace(-1, 1, 64, dtype=torch.float64)
    assert summarise_prefix(log_weight_N, 1.5).outweighs
    assert not summarise_prefix(log_weight_N, 1.0).outweighs


def test_log_prob_subtracts_each_bound() -> None:
    prefixes = make_prefixes(1)
    summary = summarise_prefix(torch.tensor([0.0, 1.0] * 8), 0.7)
    found = summary.log_partition[16]
    lower_P, upper_P, resampled_P = joint_log_prob(
        prefixes.lm_log_prob_P, [summary.log_weight], [found]
    )
    unnormalised = prefixes.lm_log_prob_P[0] + 0.7
    assert lower_P[0] == pytest.approx(unnormalised - found.lower)
    assert upper_P[0] == pytest.approx(unnormalised - found.upper)
    counted = math.log((8 * 1 + 8 * math.e + math.exp(0.7)) / 17)
    assert resampled_P[0] == pytest.approx(unnormalised - counted)


def test_what_is_resampled_gains_at_most_the_log_of_the_number_of_proposals() -> None:
    """However sure the energy is of real text that no proposal is like."""
    prefixes = make_prefixes()
    row = make_row(np.zeros((40, NUM_SAMPLES)), np.full(40, 50.0), prefixes)
    assert row.gap == pytest.approx(math.log(NUM_SAMPLES + 1), rel=1e-6)
    base = base_perplexity(prefixes, **RESAMPLING).value
    shorter = 40 * math.log(NUM_SAMPLES + 1) / prefixes.num_tokens_P.sum()
    assert row.resampled == pytest.approx(base * math.exp(-shorter), rel=1e-6)
    assert row.resampled_difference.low <= row.resampled - base <= row.resampled_difference.high
    assert row.upper < 0.2 * row.resampled  # where the joint model's bounds are flattered


@pytest.fixture
def healthy() -> JointPerplexity:
    prefixes = make_prefixes()
    draw = np.random.default_rng(4)
    log_weight_PN = draw.normal(size=(40, NUM_SAMPLES)) * 0.5
    return make_row(log_weight_PN, np.full(40, 1.0), prefixes)


def test_a_healthy_row_has_no_flags(healthy: JointPerplexity) -> None:
    assert flags(healthy, healthy.upper * 1.1) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"share_past_pareto_k": 0.3}, "heavy weights"),
        ({"median_effective_sample_size": 2.0}, "few effective samples"),
        ({"share_outweighed": 0.2}, "out of reach"),
    ],
)
def test_each_sign_of_trouble_is_said(
    healthy: JointPerplexity, change: dict[str, Any], word: str
) -> None:
    found = flags(replace(healthy, **change), healthy.upper * 1.1)
    assert len(found) == 1
    assert found[0].startswith(word)


@pytest.mark.parametrize(
    ("num_samples", "effective", "is_few"),
    [
        (2000, 39, True),
        (2000, 41, False),
        (100, 9, True),
        (100, 11, False),
        (8, 3, True),
        (8, 5, False),
    ],
)
def test_ten_effective_samples_are_too_few_of_any_number(
    healthy: JointPerplexity, num_samples: int, effective: float, is_few: bool
) -> None:
    """And 2 % of many; of eight there can be no ten, so half of them do."""
    last = replace(healthy.bounds_at[-1], num_samples=num_samples)
    row = replace(healthy, bounds_at=[last], median_effective_sample_size=effective)
    assert bool(flags(row, healthy.upper * 1.1)) == is_few


def test_a_row_that_still_moves_is_flagged(healthy: JointPerplexity) -> None:
    base = healthy.upper * 1.1
    first = replace(healthy.bounds_at[0], upper=healthy.upper - 0.3 * (base - healthy.upper))
    moving = replace(healthy, bounds_at=[first, *healthy.bounds_at[1:]])
    assert [flag.partition(":")[0] for flag in flags(moving, base)] == ["still moving"]


def test_a_few_easy_prefixes_do_not_hide_that_most_have_no_samples() -> None:
    """Of 40 prefixes 30 have one sample that outweighs all others: the mean is high, most fail."""
    log_weight_PN = np.zeros((40, NUM_SAMPLES))
    log_weight_PN[10:, 0] = 30.0
    row = make_row(log_weight_PN, np.full(40, 1.0), make_prefixes())
    assert row.effective_sample_size > 0.2 * NUM_SAMPLES
    assert row.median_effective_sample_size == pytest.approx(1, abs=1e-3)
    assert "few effective samples" in [flag.partition(":")[0] for flag in flags(row, row.upper)]
