"""What resampling writes, against every set of proposals that could be drawn."""

import itertools
import math

import numpy as np
import pytest
import torch

from residual_ebm.errors import UserError
from residual_ebm.estimation.importance import resample
from residual_ebm.estimation.resampled import resampled_log_partition

LM_PROB_K = np.array([0.5, 0.3, 0.15, 0.05])  # of all texts there are
SPREADS = (0.0, 0.7, 3.0, 12.0)  # of the log-weights: from none to one text with nearly all of Z


def log_weights(spread: float) -> np.ndarray:
    return spread * np.array([0.0, -0.4, 0.3, 1.5])


def resampled_prob(log_weight_K: np.ndarray, num_proposals: int) -> np.ndarray:
    """Of each text to be kept of `num_proposals`, by writing down every set of proposals."""
    prob_K = np.zeros(len(LM_PROB_K))
    for drawn in itertools.product(range(len(LM_PROB_K)), repeat=num_proposals):
        texts = list(drawn)
        share = np.exp(log_weight_K[texts] - np.logaddexp.reduce(log_weight_K[texts]))
        np.add.at(prob_K, texts, LM_PROB_K[texts].prod() * share)
    return prob_K


def expected_bound(log_weight_K: np.ndarray, num_samples: int) -> np.ndarray:
    """E[log P_LM + log w - log Z'] of each text, over every set of samples."""
    bound_K = np.zeros(len(LM_PROB_K))
    for drawn in itertools.product(range(len(LM_PROB_K)), repeat=num_samples):
        log_weight_N = log_weight_K[list(drawn)]
        prob = LM_PROB_K[list(drawn)].prod()
        for text, log_weight in enumerate(log_weight_K):
            log_partition = resampled_log_partition(log_weight_N, float(log_weight))
            bound_K[text] += prob * (math.log(LM_PROB_K[text]) + log_weight - log_partition)
    return bound_K


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("num_samples", [2, 4])
def test_it_bounds_what_is_written_at_every_n(spread: float, num_samples: int) -> None:
    log_weight_K = log_weights(spread)
    prob_K = resampled_prob(log_weight_K, num_samples + 1)
    assert prob_K.sum() == pytest.approx(1)  # a model of its own
    bound_K = expected_bound(log_weight_K, num_samples)
    assert (bound_K <= np.log(prob_K) + 1e-12).all()
    if spread == 0:
        np.testing.assert_allclose(bound_K, np.log(LM_PROB_K))


@pytest.mark.parametrize("spread", SPREADS[1:])
def test_it_tends_to_the_joint_model_from_below(spread: float) -> None:
    log_weight_K = log_weights(spread)
    joint_K = LM_PROB_K * np.exp(log_weight_K)
    joint_K /= joint_K.sum()
    draw = np.random.default_rng(0)
    index_N = draw.choice(len(LM_PROB_K), p=LM_PROB_K, size=40_000)
    found_K = [
        math.log(prob) + weight - resampled_log_partition(log_weight_K[index_N], float(weight))
        for prob, weight in zip(LM_PROB_K, log_weight_K, strict=True)
    ]
    np.testing.assert_allclose(found_K, np.log(joint_K), atol=0.03)
    few = (joint_K * expected_bound(log_weight_K, 4)).sum()
    assert few < (joint_K * np.log(joint_K)).sum()


@pytest.mark.parametrize("spread", SPREADS)
def test_no_energy_makes_it_claim_more_than_there_is(spread: float) -> None:
    """Over text of any distribution its gain on P_LM is at most KL(text || P_LM), where the bounds
    of the joint model may claim anything: the energy that knows the text claims it nearly whole."""
    draw = np.random.default_rng(1)
    for _ in range(5):
        text_K = draw.dirichlet(np.ones(4))
        kl = (text_K * np.log(text_K / LM_PROB_K)).sum()
        for log_weight_K in (log_weights(spread), spread * np.log(text_K / LM_PROB_K)):
            gain = (text_K * (expected_bound(log_weight_K, 4) - np.log(LM_PROB_K))).sum()
            assert gain <= kl + 1e-12


def test_the_sampler_writes_it() -> None:
    """Frequencies of `resample` with five proposals a draw."""
    log_weight_K = log_weights(3.0)
    draw = np.random.default_rng(2)
    index_DN = draw.choice(4, p=LM_PROB_K, size=(20_000, 5))
    uniform_D = torch.from_numpy(draw.random(20_000))
    kept_D = [
        index_N[int(resample(torch.from_numpy(log_weight_K[index_N]), one[None]))]
        for index_N, one in zip(index_DN, uniform_D, strict=True)
    ]
    frequency_K = np.bincount(kept_D, minlength=4) / len(kept_D)
    np.testing.assert_allclose(frequency_K, resampled_prob(log_weight_K, 5), atol=0.015)
    # With so few proposals it is not the joint model.
    joint_K = LM_PROB_K * np.exp(log_weight_K)
    assert abs(frequency_K - joint_K / joint_K.sum()).max() > 0.1


def test_subsets_are_averaged_and_heavy_weights_do_not_overflow() -> None:
    log_weight_N = np.array([1.0, -2.0, 800.0, 799.0, 5.0])
    halves = [resampled_log_partition(log_weight_N[i : i + 2], 3.0) for i in (0, 2)]
    assert resampled_log_partition(log_weight_N, 3.0, 2) == pytest.approx(np.mean(halves))
    assert halves[1] == pytest.approx(800 + math.log(1 + math.exp(-1)) - math.log(3))
    with pytest.raises(UserError, match="subset_size"):
        resampled_log_partition(log_weight_N, 3.0, 6)
