"""The joint model token by token: every A_t against enumeration (section 3.2, equation 5).

Shapes: S = steps + 1 links of the chain, C steps, N continuations, T tokens of a block.
"""

import math
from typing import NamedTuple

import pytest
import torch
import toys
from torch import Tensor

from residual_ebm.config import ContinuationMode
from residual_ebm.errors import UserError
from residual_ebm.models.joint import JointModel
from residual_ebm.models.per_step import exact_last_link, step_chain

NUM_SAMPLES = 2000
# New tokens; in until_end mode the last two end before the horizon.
BLOCKS: list[tuple[ContinuationMode, list[int]]] = [
    ("fixed", [5, 3, 6]),
    ("fixed", [4, 0, 3]),
    ("until_end", [5, 3, 6]),
    ("until_end", [4, 3, 0]),
    ("until_end", [4, 0]),
    ("until_end", [0]),
]


class ExactChain(NamedTuple):
    log_a_S: Tensor
    error_S: Tensor  # one standard error of an estimate of log A_t
    lm_log_prob_C: Tensor


def exact_chain(joint: JointModel, mode: ContinuationMode, new: list[int]) -> ExactChain:
    """A_t = sum over all x that begin with x_<=t of P_LM(x | x_<=t) exp(-E(x))."""
    every = toys.everything(mode)
    log_weight_N = -joint.energy(every.ids_NT, every.length_N).double()
    start = toys.PREFIX_LENGTH
    padded = torch.tensor([*new, *[toys.END] * (toys.NUM_NEW - len(new))])
    number = int(every.number_of(padded[None])[0])
    log_a, error = [], []
    for step in range(len(new) + 1):
        same_N = (every.ids_NT[:, start : start + step] == padded[:step]).all(-1)
        # Of x_<=t itself, which all of them share.
        given = every.log_prob_NC[number, :step].sum()
        log_share = every.log_prob_N[same_N] - given
        assert log_share.exp().sum().item() == pytest.approx(1, abs=1e-4)
        log_a.append((log_share + log_weight_N[same_N]).logsumexp(0))
        second = (log_share + 2 * (log_weight_N[same_N] - log_a[-1])).logsumexp(0).exp()
        error.append(math.sqrt(max(float(second) - 1, 0) / NUM_SAMPLES))
    return ExactChain(
        torch.stack(log_a), torch.tensor(error), every.log_prob_NC[number, : len(new)]
    )


@pytest.mark.parametrize(("mode", "new"), BLOCKS, ids=str)
@pytest.mark.parametrize("name", ["heat", "bit"])
def test_every_link_matches_enumeration(name: str, mode: ContinuationMode, new: list[int]) -> None:
    joint = toys.joint_model(name, mode)
    chain = step_chain(joint, torch.tensor([*toys.prompt_ids(), *new]), NUM_SAMPLES, seed=1)
    exact = exact_chain(joint, mode, new)
    assert chain.lower_S.shape == chain.upper_S.shape == (len(new) + 1,)
    slack_S = 4 * exact.error_S + 1e-4
    assert (exact.log_a_S - slack_S < chain.lower_S).all()
    assert (chain.lower_S <= chain.upper_S).all()
    assert (chain.upper_S < exact.log_a_S + slack_S).all()
    # The links are far enough apart that one could not pass for another.
    assert (exact.log_a_S.diff().abs() > slack_S[1:] + slack_S[:-1]).any()
    # The last one is -E of the block itself: exact, no estimate.
    assert chain.lower_S[-1] == chain.upper_S[-1]
    assert chain.lower_S[-1].item() == pytest.approx(exact.log_a_S[-1].item(), abs=1e-4)
    assert torch.allclose(chain.lm_log_prob_C, exact.lm_log_prob_C, atol=1e-5)


@pytest.mark.parametrize(("mode", "new"), BLOCKS, ids=str)
def test_the_steps_telescope_to_the_joint_log_prob(mode: ContinuationMode, new: list[int]) -> None:
    joint = toys.joint_model("bit", mode)
    ids_T = torch.tensor([*toys.prompt_ids(), *new])
    chain, exact = step_chain(joint, ids_T, NUM_SAMPLES, seed=2), exact_chain(joint, mode, new)
    for log_a_S in (chain.lower_S, chain.upper_S):
        steps_C = chain.lm_log_prob_C + log_a_S[1:] - log_a_S[:-1]
        whole = chain.lm_log_prob_C.sum() + chain.lower_S[-1] - log_a_S[0]
        assert steps_C.sum().item() == pytest.approx(whole.item(), abs=1e-9)
    lower_C, upper_C = chain.log_prob_bounds()
    assert (lower_C <= upper_C).all()
    # Each bound is a numerator over the other denominator.
    sums = chain.lm_log_prob_C.sum() + chain.lower_S[-1]
    assert lower_C.sum() <= sums - chain.upper_S[0] <= sums - chain.lower_S[0] <= upper_C.sum()
    exact_C = exact.lm_log_prob_C + exact.log_a_S.diff()
    slack_C = 4 * (exact.error_S[1:] ** 2 + exact.error_S[:-1] ** 2).sqrt() + 1e-4
    assert (lower_C - slack_C < exact_C).all()
    assert (exact_C < upper_C + slack_C).all()
    joint_log_prob = exact.lm_log_prob_C.sum() + exact.log_a_S[-1] - exact.log_a_S[0]
    assert exact_C.sum().item() == pytest.approx(joint_log_prob.item(), abs=1e-6)


def test_zero_energy_leaves_every_step_as_it_is() -> None:
    joint = JointModel(toys.language_model(), toys.fresh_energy("heat"))
    chain = step_chain(joint, torch.tensor([*toys.prompt_ids(), 5, 3, 6]), 16, seed=0)
    for bound_C in chain.log_prob_bounds():
        assert torch.allclose(bound_C, chain.lm_log_prob_C, atol=1e-9)


@pytest.mark.parametrize("mode", ["fixed", "until_end"])
@pytest.mark.parametrize("name", ["heat", "unit", "bit", "bit_bpe"])
def test_the_last_step_by_enumeration(name: str, mode: ContinuationMode) -> None:
    joint, new = toys.joint_model(name, mode), [5, 3, 6]
    exact = exact_chain(joint, mode, new)
    expected = exact.lm_log_prob_C[-1] + exact.log_a_S[-1] - exact.log_a_S[-2]
    ids_T = torch.tensor([*toys.prompt_ids(), *new])
    log_a = exact_last_link(joint, ids_T)
    assert log_a == pytest.approx(exact.log_a_S[-2].item(), abs=1e-4)
    found = step_chain(joint, ids_T, 16, seed=0).last_step_from(log_a)
    assert found == pytest.approx(expected.item(), abs=1e-4)


def test_the_last_steps_of_a_chain_are_those_of_the_whole_one() -> None:
    joint = toys.joint_model("bit", "fixed")
    ids_T = torch.tensor([*toys.prompt_ids(), 5, 3, 6])
    whole, last = (step_chain(joint, ids_T, 50, seed=0, num_steps=count) for count in (None, 2))
    assert len(last.lm_log_prob_C) == 2
    for name, value in vars(last).items():
        assert torch.equal(value, getattr(whole, name)[-len(value) :]), name
    assert len(step_chain(joint, ids_T, 50, seed=0, num_steps=9).lm_log_prob_C) == 3


def test_each_estimated_link_has_its_diagnostics() -> None:
    joint = toys.joint_model("bit", "fixed")
    chain = step_chain(joint, torch.tensor([*toys.prompt_ids(), 5, 3, 6]), 400, seed=0)
    assert chain.effective_sample_size_C.shape == chain.pareto_k_C.shape == (3,)
    assert (chain.effective_sample_size_C > 1).all()
    assert (chain.effective_sample_size_C < 400).all()
    # Of the effective size follows the standard error of a mean of weights.
    error_C = (1 / chain.effective_sample_size_C - 1 / 400).sqrt()
    assert torch.allclose(chain.error_S[:-1], error_C, rtol=0.05)


def test_only_a_whole_block_has_a_last_step_to_enumerate() -> None:
    joint = toys.joint_model("heat", "until_end")
    with pytest.raises(UserError, match="only the last of 6 tokens"):
        exact_last_link(joint, torch.tensor([*toys.prompt_ids(), 4, 0]))


def test_published_intervals_hold_the_truth_as_often_as_they_say() -> None:
    joint, new = toys.joint_model("bit"), [5, 3, 6]
    ids_T = torch.tensor([*toys.prompt_ids(), *new])
    exact = exact_chain(joint, "fixed", new)
    exact_C = exact.lm_log_prob_C + exact.log_a_S.diff()
    held = []
    for seed in range(120):
        low_C, high_C = step_chain(joint, ids_T, 200, seed=seed).published()
        held.append((low_C <= exact_C + 1e-6) & (exact_C <= high_C + 1e-6))
    share_C = torch.stack(held).double().mean(0)
    assert (share_C > 0.88).all()  # 95 %, less three and a half standard errors
    # The bounds alone do not: they close in on each other faster than on the truth.
    bare_C = torch.zeros(len(new))
    for seed in range(40):
        lower_C, upper_C = step_chain(joint, ids_T, 200, seed=seed).log_prob_bounds()
        bare_C += (lower_C <= exact_C) & (exact_C <= upper_C)
    assert (bare_C / 40 < 0.8).any()


def test_a_chain_is_a_function_of_its_seed() -> None:
    joint, ids_T = toys.joint_model(), torch.tensor([*toys.prompt_ids(), 5, 3, 6])
    one, again, other = (step_chain(joint, ids_T, 64, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.lower_S, again.lower_S)
    assert not torch.equal(one.lower_S[:-1], other.lower_S[:-1])
