"""Drawing tokens: the inverse CDF at its ends and borders, truncation, and the decoder as a whole.

Shapes: N rows, V vocabulary, U uniforms, C new tokens, P tokens of a prefix.
"""

import numpy as np
import pytest
import torch
import toys
from torch import Tensor

from residual_ebm.config import ContinuationMode
from residual_ebm.errors import UserError
from residual_ebm.models import prefix_steps
from residual_ebm.models.decoding import (
    UNTRUNCATED,
    Decoded,
    Truncation,
    decode,
    draw_token,
    truncate,
)
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.models.vocabulary import inverse_cdf, summarise, top_tokens
from residual_ebm.randomness import uniform

SIZES = [1, 2, 255, 256, 257, 511, 512, 513, 600]
TOTAL = 1024


def left_by(log_prob_NV: Tensor, truncation: Truncation) -> Tensor:
    """What truncation leaves, over the whole vocabulary."""
    index_NK, kept_NK = truncate(log_prob_NV, summarise(log_prob_NV), truncation)
    return torch.full_like(log_prob_NV, -torch.inf).scatter(1, index_NK, kept_NK)


def mass_rows(vocabulary: int) -> list[Tensor]:
    """Whole numbers that add up to TOTAL, with zeros at the ends and around the chunk borders."""
    draw = np.random.default_rng(vocabulary)
    index_V = np.arange(vocabulary)
    borders = {0, vocabulary // 2, 254, 255, 256, 257, 511, 512, vocabulary - 1} & set(index_V)
    allowed = [index_V >= 0]
    for place in sorted(borders):
        allowed += [index_V == place, index_V != place, index_V >= place, index_V <= place]
    for start in range(0, vocabulary, 256):
        inside_V = (index_V >= start) & (index_V < start + 256)
        allowed += [inside_V, ~inside_V]
    weights = [mask_V * draw.gamma(0.3, size=vocabulary) for mask_V in allowed if mask_V.any()]
    return [torch.tensor(draw.multinomial(TOTAL, w / w.sum())).float() for w in weights]


def plain_search(mass_V: Tensor, uniform_U: Tensor) -> Tensor:
    """One cumulative sum in float64; the first token above u x total, or the last with mass."""
    cdf_V = mass_V.double().cumsum(0)
    first_U = torch.searchsorted(cdf_V, uniform_U * cdf_V[-1], right=True)
    return first_U.clamp(max=int(mass_V.nonzero()[-1, 0]))


def draw_many(mass_V: Tensor, uniform_U: Tensor) -> Tensor:
    return inverse_cdf(mass_V.expand(len(uniform_U), -1), uniform_U)


@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize("scale", [1 / TOTAL, 1.0, 1e-30, 1 / 3], ids=str)
def test_zero_mass_is_never_drawn_at_either_end(vocabulary: int, scale: float) -> None:
    ends_U = torch.tensor([0.0, 5e-324, 2**-53, 1 - 2**-53, 1.0], dtype=torch.float64)
    for mass_V in mass_rows(vocabulary):
        token_U = draw_many(mass_V * scale, ends_U)
        with_mass = mass_V.nonzero()[:, 0]
        assert token_U.tolist() == [with_mass[0]] * 3 + [with_mass[-1]] * 2


def test_a_token_too_light_to_move_the_sum_is_no_way_out() -> None:
    # 1 + 1e-40 = 1: the CDF reaches its end before the last token with mass, also across chunks.
    prob_V = torch.zeros(600)
    prob_V[3], prob_V[4], prob_V[599] = 1.0, 1e-40, 1e-40
    for u in (0.0, 0.5, 1 - 2**-53, 1.0):
        assert draw_many(prob_V, torch.tensor([u], dtype=torch.float64)).tolist() == [3]


@pytest.mark.parametrize("vocabulary", SIZES)
def test_two_levels_find_what_a_plain_search_finds(vocabulary: int) -> None:
    # At every step of the CDF exactly, where one token ends and the next begins.
    step_U = torch.arange(TOTAL + 1, dtype=torch.float64) / TOTAL
    for mass_V in mass_rows(vocabulary):
        assert torch.equal(draw_many(mass_V, step_U), plain_search(mass_V, step_U))
    draw = np.random.default_rng(0)
    for prob_V in torch.from_numpy(draw.dirichlet(np.full(vocabulary, 0.1), 20)).float():
        uniform_U = torch.from_numpy(draw.random(500))
        assert torch.equal(draw_many(prob_V, uniform_U), plain_search(prob_V, uniform_U))


def test_tokens_lighter_than_the_rounding_of_float32_are_still_drawn() -> None:
    # 1 + 1e-8 is 1 in float32: sums of that type would never leave the first token.
    mass_V = torch.full((600,), 1e-8)
    mass_V[0] = 1.0
    between_U = 1 - (torch.arange(599, dtype=torch.float64) + 0.5) * 1e-8 / (1 + 599e-8)
    assert draw_many(mass_V, between_U).tolist() == list(range(599, 0, -1))


@pytest.mark.parametrize("vocabulary", SIZES)
def test_each_token_gets_its_share_of_the_uniforms(vocabulary: int) -> None:
    between_U = (torch.arange(TOTAL, dtype=torch.float64) + 0.5) / TOTAL
    for mass_V in mass_rows(vocabulary):
        count_V = torch.bincount(draw_many(mass_V / 7, between_U), minlength=vocabulary)
        assert torch.equal(count_V.float(), mass_V)


def test_every_row_has_its_own_distribution_and_uniform() -> None:
    prob_NV = torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(300), 50)).float()
    uniform_N = torch.linspace(0, 1, 50, dtype=torch.float64)
    alone = [int(inverse_cdf(prob_NV[i : i + 1], uniform_N[i : i + 1])) for i in range(50)]
    assert inverse_cdf(prob_NV, uniform_N).tolist() == alone
    assert len(set(alone)) > 40


def random_log_prob(num_rows: int = 30, vocabulary: int = 20) -> Tensor:
    logits_NV = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (num_rows, vocabulary)))
    return logits_NV.float().log_softmax(-1)


@pytest.mark.parametrize("top_k", [1, 3, 19])
def test_top_k_keeps_the_k_likeliest_and_normalises(top_k: int) -> None:
    log_prob_NV = random_log_prob()
    kept_NV = left_by(log_prob_NV, Truncation(top_k=top_k))
    assert (kept_NV.isfinite().sum(-1) == top_k).all()
    for before_V, after_V in zip(log_prob_NV.double(), kept_NV.double(), strict=True):
        likeliest = before_V.argsort(descending=True)[:top_k]
        expected = before_V[likeliest] - before_V[likeliest].logsumexp(0)
        assert torch.allclose(after_V[likeliest], expected, atol=1e-6)


def test_top_k_keeps_exactly_k_of_equally_likely_tokens() -> None:
    log_prob_NV = torch.zeros(2, 10).log_softmax(-1)
    kept_NV = left_by(log_prob_NV, Truncation(top_k=4))
    assert kept_NV.isfinite().sum(-1).tolist() == [4, 4]
    assert torch.allclose(kept_NV.exp().sum(-1), torch.ones(2))


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_with_that_mass(top_p: float) -> None:
    log_prob_NV = random_log_prob()
    kept_NV = left_by(log_prob_NV, Truncation(top_p=top_p))
    for before_V, after_V in zip(log_prob_NV.double(), kept_NV.double(), strict=True):
        sorted_V, order_V = before_V.exp().sort(descending=True)
        size = 1
        while float(sorted_V[:size].sum()) < top_p:
            size += 1
        assert set(after_V.isfinite().nonzero()[:, 0].tolist()) == set(order_V[:size].tolist())
        expected = before_V[order_V[:size]] - sorted_V[:size].sum().log()
        assert torch.allclose(after_V[order_V[:size]], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation(top_p=0.49), [1]),
        (Truncation(top_p=0.51), [1, 3]),  # the token that crosses p is kept
        (Truncation(top_p=0.74), [1, 3]),
        (Truncation(top_p=0.76), [0, 1, 3]),
        (Truncation(top_p=0.89), [0, 1, 2, 3]),
        # p counts the mass of what top-k left: 2/3 and 1/3.
        (Truncation(top_k=2, top_p=0.66), [1]),
        (Truncation(top_k=2, top_p=0.67), [1, 3]),
    ],
    ids=str,
)
def test_what_truncation_keeps(truncation: Truncation, kept: list[int]) -> None:
    prob_V = torch.tensor([0.13, 0.5, 0.12, 0.25])
    left_V = left_by(prob_V.log()[None], truncation)[0].exp()
    assert left_V.nonzero()[:, 0].tolist() == kept
    assert torch.allclose(left_V[kept], prob_V[kept] / prob_V[kept].sum())


@pytest.mark.parametrize("top_k", [20, 21, 10_000])
@pytest.mark.parametrize("top_p", [None, 1.0])
def test_nothing_to_cut_off_changes_nothing(top_k: int, top_p: float | None) -> None:
    log_prob_NV = random_log_prob(vocabulary=20)
    kept_NV = left_by(log_prob_NV, Truncation(top_k, top_p))
    assert torch.allclose(kept_NV, log_prob_NV, atol=1e-6)


def test_a_truncation_describes_itself_unless_it_cuts_nothing_off() -> None:
    assert UNTRUNCATED.describe() is None
    assert Truncation(top_p=1.0).describe() is None
    assert Truncation(top_k=5).describe() == {"top_k": 5}
    assert Truncation(top_p=0.9).describe() == {"top_p": 0.9}
    assert Truncation(top_k=5, top_p=0.9).describe() == {"top_k": 5, "top_p": 0.9}
    assert Truncation(top_k=5, top_p=1.0).describe() == {"top_k": 5}


@pytest.mark.parametrize("top_k", [0, -3])
def test_top_k_below_one_is_refused(top_k: int) -> None:
    with pytest.raises(UserError, match=f"top_k = {top_k}: must be at least 1"):
        Truncation(top_k=top_k)


@pytest.mark.parametrize("top_p", [0.0, -0.1, 1.01, float("nan")])
def test_top_p_outside_its_range_is_refused(top_p: float) -> None:
    with pytest.raises(UserError, match=f"top_p = {top_p}: must be above 0 and at most 1"):
        Truncation(top_p=top_p)


@pytest.mark.parametrize("vocabulary", [5, 256, 700, 3001])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_top_tokens_are_the_largest_of_all(vocabulary: int, count: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(vocabulary + count)
    logits_NV = torch.randn(50, vocabulary, generator=draw).to(dtype)
    logits_NV[0, : vocabulary - count] = -torch.inf  # hardly more than are wanted
    found_NK, index_NK = top_tokens(logits_NV, summarise(logits_NV), count)
    assert torch.equal(found_NK, logits_NV.gather(1, index_NK))
    assert torch.equal(found_NK, logits_NV.sort(dim=-1, descending=True).values[:, :count])
    assert all(len(set(row)) == count for row in index_NK.tolist())


def test_more_top_tokens_than_there_are() -> None:
    logits_NV = torch.randn(2, 7)
    values, tokens = top_tokens(logits_NV, summarise(logits_NV), 100)
    assert values.shape == tokens.shape == (2, 7)


def test_fewer_tokens_that_can_come_than_are_kept() -> None:
    """The last chunk is padded; what pads it must not be drawn, nor stand for another token."""
    logits_NV = torch.full((400, 3001), -torch.inf)
    logits_NV[:, 3000], logits_NV[:, 7] = 0.0, 1.0
    uniform_N = torch.linspace(0, 1, 400, dtype=torch.float64)
    drawn = draw_token(logits_NV, uniform_N, Truncation(top_k=5))
    assert set(drawn.token_N.tolist()) == {7, 3000}
    share = (drawn.token_N == 7).double().mean().item()
    assert share == pytest.approx(torch.tensor(1.0).sigmoid().item(), abs=0.01)


def test_a_token_carries_both_its_log_probs() -> None:
    logits_NV = random_log_prob(500) + 3.0
    uniform_N = torch.linspace(0, 1, 500, dtype=torch.float64)
    token_N, log_prob_N, proposal_N, _ = draw_token(logits_NV, uniform_N, Truncation(top_k=2))
    log_prob_NV = logits_NV.double().log_softmax(-1)
    best_N2, index_N2 = log_prob_NV.topk(2, dim=-1)
    assert (index_N2 == token_N[:, None]).any(-1).all()
    expected_N = log_prob_NV.gather(1, token_N[:, None])[:, 0]
    assert torch.allclose(log_prob_N.double(), expected_N, atol=1e-5)
    assert torch.allclose(proposal_N.double(), expected_N - best_N2.logsumexp(-1), atol=1e-5)


def test_log_probs_of_bfloat16_logits_are_not_rounded_again() -> None:
    logits_NV = random_log_prob(500).bfloat16()
    uniform_N = torch.linspace(0, 1, 500, dtype=torch.float64)
    token_N, log_prob_N, proposal_N, _ = draw_token(logits_NV, uniform_N, UNTRUNCATED)
    expected_N = logits_NV.double().log_softmax(-1).gather(1, token_N[:, None])[:, 0]
    assert torch.allclose(log_prob_N.double(), expected_N, atol=1e-6)
    assert torch.equal(proposal_N, log_prob_N)


def decode_prompt(
    lm: LanguageModel,
    prefix_P: Tensor,
    num_samples: int,
    num_tokens: int,
    mode: ContinuationMode,
    truncation: Truncation = UNTRUNCATED,
) -> Decoded:
    return decode(
        lm.model,
        prefix_P[None],
        samples_per_prefix=num_samples,
        num_tokens=num_tokens,
        uniform_at=lambda step: torch.from_numpy(uniform(9, 0, step, 0, num_samples)),
        truncation=truncation,
        end_of_text=toys.END if mode == "until_end" else None,
        padding=toys.END,
    )


@pytest.mark.parametrize("mode", toys.MODES)
@pytest.mark.parametrize("model_type", toys.ARCHITECTURES)
def test_decoded_frequencies_are_those_of_the_language_model(
    model_type: str, mode: ContinuationMode
) -> None:
    lm = toys.language_model(model_type)
    every = toys.enumerate_continuations(lm, toys.prompt_ids(), toys.NUM_NEW, mode)
    decoded = decode_prompt(lm, every.prefix_P, 10_000, toys.NUM_NEW, mode)
    assert toys.chi_square_p(every.counts(decoded.ids_NC), every.log_prob_N.exp()) > 1e-3
    # The test has teeth: a uniform distribution would not pass.
    uniform_N = torch.full((len(every),), 1 / len(every), dtype=torch.float64)
    assert toys.chi_square_p(every.counts(decoded.ids_NC), uniform_N) < 1e-6


@pytest.mark.parametrize("truncation", [Truncation(top_k=2), Truncation(top_p=0.7)], ids=str)
def test_truncated_frequencies_are_those_of_the_truncated_model(truncation: Truncation) -> None:
    lm, every = toys.language_model(), toys.everything("fixed")
    proposal_N = toys.truncated_log_prob(lm, every, truncation.top_k, truncation.top_p)
    decoded = decode_prompt(lm, every.prefix_P, 10_000, toys.NUM_NEW, "fixed", truncation)
    number_N = every.number_of(decoded.ids_NC)
    assert toys.chi_square_p(every.counts(decoded.ids_NC), proposal_N.exp()) > 1e-3
    drawn_N = decoded.proposal_log_prob_NC.double().sum(-1)
    assert torch.allclose(drawn_N, proposal_N[number_N], atol=1e-4)
    log_prob_N = decoded.log_prob_NC.double().sum(-1)
    assert torch.allclose(log_prob_N, every.log_prob_N[number_N], atol=1e-4)


@torch.inference_mode()
def ancestral_sampling(
    lm: LanguageModel, prefix_P: Tensor, num_samples: int, num_tokens: int, mode: ContinuationMode
) -> tuple[Tensor, Tensor]:
    """No cache, no batch tricks: the whole sequence again for every token. New ids, lengths."""
    ids_NT = prefix_P.repeat(num_samples, 1)
    length_N = torch.full((num_samples,), num_tokens)
    for step in range(num_tokens):
        prob_NV = lm.model(ids_NT, use_cache=False).logits[:, -1].double().softmax(-1)
        uniform_N = torch.from_numpy(uniform(9, 0, step, 0, num_samples))
        token_N = (prob_NV.cumsum(-1) <= uniform_N[:, None]).sum(-1)
        if mode == "until_end":
            token_N = torch.where(length_N <= step, toys.END, token_N)
            ended_N = (token_N == toys.END) & (length_N > step)
            length_N = torch.where(ended_N, step + 1, length_N)
        ids_NT = torch.cat([ids_NT, token_N[:, None]], dim=1)
    return ids_NT[:, len(prefix_P) :], length_N


@pytest.mark.parametrize("mode", toys.MODES)
@pytest.mark.parametrize("model_type", toys.ARCHITECTURES)
def test_the_decoder_draws_what_plain_ancestral_sampling_draws(
    model_type: str, mode: ContinuationMode
) -> None:
    lm = toys.language_model(model_type)
    # A prefix longer than the windows of gemma and mistral.
    prefix_P = torch.tensor([3, 4, 5, 6, 3, 5, 4])
    new_ids_NC, length_N = ancestral_sampling(lm, prefix_P, 300, 8, mode)
    decoded = decode_prompt(lm, prefix_P, 300, 8, mode)
    assert torch.equal(decoded.ids_NC, new_ids_NC)
    assert torch.equal(decoded.length_N, length_N)
    assert len(new_ids_NC.unique(dim=0)) > 100


@pytest.mark.parametrize("mode", toys.MODES)
def test_what_a_finished_row_holds(mode: ContinuationMode) -> None:
    decoded = decode_prompt(toys.language_model(), torch.tensor([3, 4, 3]), 300, 6, mode)
    position_C = torch.arange(6)
    is_end_NC = decoded.ids_NC == toys.END
    after_NC = position_C >= decoded.length_N[:, None]
    assert (decoded.log_prob_NC[~after_NC] < 0).all()
    if mode == "fixed":
        assert (decoded.length_N == 6).all()
        assert is_end_NC[:, :-1].any(), "no continuation crosses the end of a document"
        return
    assert is_end_NC[after_NC].all()
    assert (decoded.log_prob_NC[after_NC] == 0).all()
    assert (decoded.proposal_log_prob_NC[after_NC] == 0).all()
    # End-of-text belongs to the continuation, and only as its last token.
    first_N = torch.where(is_end_NC.any(-1), is_end_NC.int().argmax(-1) + 1, 6)
    assert torch.equal(decoded.length_N, first_N)
    assert {1, 2, 6} <= set(decoded.length_N.tolist())


def test_decoding_may_stop_early_when_every_row_has_ended() -> None:
    steps = []

    def zero(step: int) -> Tensor:
        steps.append(step)
        return torch.zeros(4)  # the first token with mass: end-of-text

    lm = toys.language_model()
    decoded = decode(
        lm.model,
        torch.tensor([[3, 4, 3]]),
        samples_per_prefix=4,
        num_tokens=6,
        uniform_at=zero,
        end_of_text=toys.END,
    )
    assert steps == [0]
    assert decoded.length_N.tolist() == [1] * 4
    assert decoded.ids_NC.tolist() == [[toys.END] * 6] * 4


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text"])
def test_prefixes_may_be_read_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    lm = toys.language_model(model_type)
    prefix_GP = torch.randint(3, 7, (5, 4), generator=torch.Generator().manual_seed(0))

    def decoded() -> Decoded:
        return decode(
            lm.model,
            prefix_GP,
            samples_per_prefix=3,
            num_tokens=4,
            uniform_at=lambda step: torch.from_numpy(uniform(0, 0, step, 0, 15)),
        )

    together = decoded()
    monkeypatch.setattr(prefix_steps, "_PREFIX_TOKENS_AT_ONCE", 8)  # two prefixes
    apart = decoded()
    assert torch.equal(apart.ids_NC, together.ids_NC)
    torch.testing.assert_close(apart.log_prob_NC, together.log_prob_NC, rtol=1e-4, atol=1e-5)
