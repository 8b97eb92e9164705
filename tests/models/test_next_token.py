"""The joint model's next token, against enumeration of everything that could follow."""

import pytest
import torch
import toys
from torch import Tensor

from residual_ebm.config import ContinuationMode
from residual_ebm.errors import UserError
from residual_ebm.models.joint import JointModel
from residual_ebm.models.next_token import NextTokens, next_tokens


def exact_next(joint: JointModel, mode: ContinuationMode, given: list[int]) -> Tensor:
    """P(v | prefix, given) of every token."""
    every = toys.everything(mode)
    log_joint_N = every.log_prob_N - joint.energy(every.ids_NT, every.length_N).double()
    start = toys.PREFIX_LENGTH
    place = start + len(given)
    same_N = (every.ids_NT[:, start:place] == torch.tensor(given)).all(-1)
    mass_V = torch.zeros(joint.language_model.vocabulary_size, dtype=torch.float64)
    mass_V.index_add_(0, every.ids_NT[same_N, place], log_joint_N[same_N].exp())
    return mass_V / mass_V.sum()


@pytest.mark.parametrize("mode", ["fixed", "until_end"])
@pytest.mark.parametrize("given", [[], [5], [4, 3]], ids=str)
@pytest.mark.parametrize("name", ["heat", "bit"])
def test_the_distribution_matches_enumeration(
    name: str, given: list[int], mode: ContinuationMode
) -> None:
    joint = toys.joint_model(name, mode)
    exact_V = exact_next(joint, mode, given)
    found = next_tokens(
        joint,
        torch.tensor(toys.prompt_ids()),
        torch.tensor(given, dtype=torch.int64),
        num_samples=2000,
        seed=3,
    )
    chances = dict(found.best_of_joint(100))
    assert set(chances) == set(range(joint.language_model.vocabulary_size))
    # The error of a share is at most that of all the logs it is made of.
    slack = 4 * found.error_G.max().item() + 1e-4
    for token, chance in chances.items():
        assert chance == pytest.approx(exact_V[token].item(), rel=2 * slack, abs=1e-6)
    if len(given) == toys.NUM_NEW - 1:
        assert (found.error_G == 0).all()
    # The energies matter: the LM's own distribution is another one.
    lm = dict(found.best_of_lm(100))
    assert max(abs(lm[token] - exact_V[token].item()) for token in lm) > 0.02


def test_the_best_few_are_normalised_among_themselves() -> None:
    found = NextTokens(
        torch.tensor([7, 8, 9]),
        torch.tensor([0.5, 0.3, 0.2]).double().log(),
        torch.tensor([0.1, 1.0, 2.0]).double().log(),
        torch.zeros(3),
    )
    assert found.best_of_lm(2) == [(7, pytest.approx(0.625)), (8, pytest.approx(0.375))]
    # 0.05, 0.3 and 0.4 before normalising.
    assert found.best_of_joint(2) == [(9, pytest.approx(4 / 7)), (8, pytest.approx(3 / 7))]
    assert sum(chance for _, chance in found.best_of_joint(9)) == pytest.approx(1)


def test_candidates_are_the_likeliest_of_the_language_model() -> None:
    joint = toys.joint_model()
    prompt = torch.tensor(toys.prompt_ids())
    nothing = torch.empty(0, dtype=torch.int64)
    every = next_tokens(joint, prompt, nothing, num_samples=2)
    few = next_tokens(joint, prompt, nothing, num_candidates=3, num_samples=2)
    assert few.token_G.tolist() == every.token_G[:3].tolist()
    assert (every.lm_log_prob_G.diff() <= 0).all()


def test_the_seed_decides() -> None:
    joint, prompt = toys.joint_model(), torch.tensor(toys.prompt_ids())
    nothing = torch.empty(0, dtype=torch.int64)
    one, again, other = (
        next_tokens(joint, prompt, nothing, num_samples=8, seed=seed).log_a_G for seed in (0, 0, 1)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_nothing_follows_the_horizon() -> None:
    with pytest.raises(UserError, match="the horizon is 3 tokens"):
        next_tokens(toys.joint_model(), torch.tensor(toys.prompt_ids()), torch.tensor([5, 3, 6]))
    with pytest.raises(UserError, match="num_samples = 1"):
        next_tokens(
            toys.joint_model(),
            torch.tensor(toys.prompt_ids()),
            torch.empty(0, dtype=torch.int64),
            num_samples=1,
        )
