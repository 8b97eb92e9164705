"""Which tokens a masked-language model guesses: the 80 / 10 / 10 rule and what is never touched.

Shapes: B texts, L tokens of a text.
"""

import numpy as np
import pytest
import torch
import toys
from torch import Tensor

from residual_ebm.models.masking import IGNORED, MaskedTokens, mask_tokens


def hide(
    ids_BL: Tensor, mask_BL: Tensor | None = None, probability: float = 0.15, seed: int = 0
) -> MaskedTokens:
    if mask_BL is None:
        mask_BL = torch.ones_like(ids_BL)
    tokenizer = toys.bpe_tokenizer()
    return mask_tokens(ids_BL, mask_BL, tokenizer, probability, np.random.default_rng(seed))


def random_ids(num_texts: int = 400, length: int = 100) -> Tensor:
    """Ordinary tokens only: 0 and 1 are end-of-text and the mask."""
    draw = np.random.default_rng(1)
    return torch.from_numpy(draw.integers(2, len(toys.bpe_tokenizer()), (num_texts, length)))


@pytest.mark.parametrize("probability", [0.15, 0.4])
def test_of_the_chosen_tokens_80_become_the_mask_10_random_10_stay(probability: float) -> None:
    ids_BL = random_ids()
    seen_BL, target_BL = hide(ids_BL, probability=probability)
    chosen_BL = target_BL != IGNORED
    chosen = int(chosen_BL.sum())

    def near(share: float, expected: float, count: int) -> bool:
        return abs(share - expected) < 4 * (expected * (1 - expected) / count) ** 0.5

    assert near(chosen / ids_BL.numel(), probability, ids_BL.numel())
    is_mask_BL = seen_BL == toys.bpe_tokenizer().mask_token_id
    is_same_BL = seen_BL == ids_BL
    vocabulary = len(toys.bpe_tokenizer())
    # A random token is the mask, or the token itself, once in a vocabulary.
    assert near(int((chosen_BL & is_mask_BL).sum()) / chosen, 0.8 + 0.1 / vocabulary, chosen)
    assert near(int((chosen_BL & is_same_BL).sum()) / chosen, 0.1 + 0.1 / vocabulary, chosen)
    replaced = seen_BL[chosen_BL & ~is_mask_BL & ~is_same_BL]
    assert near(len(replaced) / chosen, 0.1 * (1 - 2 / vocabulary), chosen)
    assert len(replaced.unique()) > 0.5 * vocabulary
    assert 0 <= int(replaced.min()) <= int(replaced.max()) < vocabulary


def test_targets_are_the_hidden_tokens_and_the_rest_is_untouched() -> None:
    ids_BL = random_ids()
    before_BL = ids_BL.clone()
    seen_BL, target_BL = hide(ids_BL)
    chosen_BL = target_BL != IGNORED
    assert torch.equal(ids_BL, before_BL)
    assert torch.equal(target_BL[chosen_BL], ids_BL[chosen_BL])
    assert torch.equal(seen_BL[~chosen_BL], ids_BL[~chosen_BL])
    assert torch.nn.CrossEntropyLoss().ignore_index == IGNORED


def test_padding_and_special_tokens_are_never_guessed() -> None:
    ids_BL = random_ids()
    mask_BL = (torch.arange(100) < torch.arange(400)[:, None] % 100 + 1).long()
    tokenizer = toys.bpe_tokenizer()
    ids_BL[:, ::7] = tokenizer.eos_token_id
    ids_BL[:, 3::11] = tokenizer.mask_token_id
    special_BL = torch.isin(ids_BL, torch.tensor(tokenizer.all_special_ids))
    seen_BL, target_BL = hide(ids_BL, mask_BL, probability=0.9)
    untouchable_BL = (mask_BL == 0) | special_BL
    assert untouchable_BL.any()
    assert (target_BL[untouchable_BL] == IGNORED).all()
    assert torch.equal(seen_BL[untouchable_BL], ids_BL[untouchable_BL])
    share = (target_BL[~untouchable_BL] != IGNORED).float().mean().item()
    assert share == pytest.approx(0.9, abs=0.02)


def test_at_least_one_token_is_hidden() -> None:
    ids_BL = random_ids(2, 5)
    ids_BL[0] = toys.END
    mask_BL = torch.tensor([[1] * 5, [0, 0, 1, 1, 0]])
    for seed in range(20):
        _, target_BL = hide(ids_BL, mask_BL, probability=1e-12, seed=seed)
        assert (target_BL != IGNORED).nonzero().tolist() == [[1, 2]]


def test_nothing_is_hidden_where_nothing_may_be() -> None:
    ids_BL = torch.full((2, 5), toys.END)
    seen_BL, target_BL = hide(ids_BL, probability=0.9)
    assert torch.equal(seen_BL, ids_BL)
    assert (target_BL == IGNORED).all()


def test_the_choice_is_a_function_of_its_generator() -> None:
    ids_BL = random_ids(10)
    one, again, other = (hide(ids_BL, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.ids_BL, again.ids_BL)
    assert torch.equal(one.target_BL, again.target_BL)
    assert not torch.equal(one.target_BL, other.target_BL)
