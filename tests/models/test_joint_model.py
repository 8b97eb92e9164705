"""P_LM exp(-E) / Z against enumeration: partition function, perplexity, samples.

Shapes: N proposals or continuations, T tokens, S draws, B blocks.
"""

import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import Tensor

from residual_ebm.config import ContinuationMode
from residual_ebm.errors import UserError
from residual_ebm.estimation.partition import bounds_on_disjoint_subsets
from residual_ebm.models.joint import JointModel
from residual_ebm.models.language_model import Samples
from residual_ebm.models.samplers import ScoredSet

TEXTS = ["ba do gi ba lu", "gi gi lu", "do ba ba do lu gi ba do gi lu", "lu lu ba gi do ba gi"]
each_mode = pytest.mark.parametrize("mode", toys.MODES)
each_energy = pytest.mark.parametrize("name", toys.ENERGIES)


def zero_model(name: str, mode: ContinuationMode = "fixed") -> JointModel:
    return JointModel(toys.language_model(), toys.fresh_energy(name, mode))


def shifted_model(name: str, mode: ContinuationMode, constant: float) -> JointModel:
    energy = toys.trained_energy(name, mode)
    with torch.no_grad():
        energy.network.scalar.bias.add_(constant)
    return JointModel(toys.language_model(), energy)


def prefix_ids() -> Tensor:
    return torch.tensor(toys.prompt_ids())


@each_energy
@each_mode
def test_zero_energy_is_the_language_model_itself(name: str, mode: ContinuationMode) -> None:
    joint = zero_model(name, mode)
    scored = joint.propose(prefix_ids(), 500, seed=0)
    lower, upper = scored.log_partition()
    assert lower.item() == pytest.approx(0, abs=1e-9)
    assert upper.item() == pytest.approx(0, abs=1e-9)
    assert scored.effective_sample_size == 500
    report = joint.perplexity(TEXTS, num_samples=64)
    assert report.joint.lower == pytest.approx(report.base.value, rel=1e-9)
    assert report.joint.upper == pytest.approx(report.base.value, rel=1e-9)
    assert report.joint.published == pytest.approx(report.base.published)
    assert report.joint.gap == pytest.approx(0, abs=1e-9)
    assert report.flags == []


def test_zero_energy_resamples_uniformly() -> None:
    scored = zero_model("heat").propose(prefix_ids(), 40, seed=0)
    counts_N = np.bincount(scored.draw(seed=1, num_draws=20_000), minlength=40)
    assert toys.chi_square_p(counts_N, torch.ones(40)) > 1e-3
    assert sorted(counts_N)[0] > 350


@each_energy
@each_mode
def test_a_constant_in_the_energy_moves_log_z_and_nothing_else(
    name: str, mode: ContinuationMode
) -> None:
    joint, constant = toys.joint_model(name, mode), 4.0
    shifted = shifted_model(name, mode, constant)
    before, after = (model.propose(prefix_ids(), 300, seed=0) for model in (joint, shifted))
    for old, new in zip(before.log_partition(), after.log_partition(), strict=True):
        assert new.item() == pytest.approx(old.item() - constant, abs=1e-4)
    assert torch.equal(before.draw(0, 500), after.draw(0, 500))
    assert after.effective_sample_size == pytest.approx(before.effective_sample_size, rel=1e-4)
    old_report, new_report = (model.perplexity(TEXTS, 64) for model in (joint, shifted))
    assert new_report.joint.lower == pytest.approx(old_report.joint.lower, rel=1e-4)
    assert new_report.joint.upper == pytest.approx(old_report.joint.upper, rel=1e-4)
    assert new_report.joint.gap == pytest.approx(old_report.joint.gap, abs=1e-3)
    assert [shifted.sample(toys.PROMPT, 32, seed=seed).text for seed in range(5)] == [
        joint.sample(toys.PROMPT, 32, seed=seed).text for seed in range(5)
    ]


@each_mode
def test_the_energies_of_proposals_are_those_of_their_blocks(mode: ContinuationMode) -> None:
    every = toys.everything(mode)
    for name in toys.ENERGIES:
        joint = toys.joint_model(name, mode)
        scored = joint.propose(every.prefix_P, 300, seed=0)
        number_N = every.number_of(scored.proposals.ids_NT)
        energy_N = joint.energy(every.ids_NT, every.length_N)
        assert torch.allclose(scored.energy_N, energy_N[number_N], atol=1e-4)
        assert torch.equal(scored.log_weight_N, -scored.energy_N.double())
        assert torch.allclose(scored.proposals.log_prob_N, every.log_prob_N[number_N], atol=1e-4)


@each_mode
@pytest.mark.parametrize("num_given", [1, 2])
def test_given_tokens_of_a_continuation_count_in_its_energy(
    mode: ContinuationMode, num_given: int
) -> None:
    """HeaT takes the states of what it draws from the decoder and those of given tokens from one
    pass; other energies read the whole block."""
    every = toys.everything(mode)
    given = torch.tensor([5, 3][:num_given])
    context = torch.cat([every.prefix_P, given])
    for name in toys.ENERGIES:
        joint = toys.joint_model(name, mode)
        scored = joint.propose(context, 200, seed=0, num_tokens=toys.NUM_NEW - num_given)
        new_NC = torch.cat([given.expand(200, -1), scored.proposals.ids_NT], dim=1)
        energy_N = joint.energy(every.ids_NT, every.length_N)
        expected_N = energy_N[every.number_of(new_NC)]
        assert torch.allclose(scored.energy_N, expected_N, atol=1e-4), name
        assert expected_N.std() > 0.01


def test_heat_reads_no_block_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = toys.joint_model("heat")
    monkeypatch.setattr(joint.energy_model, "energy", None)
    assert len(joint.propose(prefix_ids(), 600, seed=0).energy_N) == 600  # two chunks


def resampled(scored: ScoredSet, every: toys.Everything, num_draws: int) -> np.ndarray:
    return every.counts(scored.proposals.ids_NT[scored.draw(0, num_draws)])


@each_mode
def test_draws_from_a_set_follow_its_weights(mode: ContinuationMode) -> None:
    """The set holds every continuation once, so that the only chance is that of the draw."""
    every, joint = toys.everything(mode), toys.joint_model("bit", mode)
    energy_N = joint.energy(every.ids_NT, every.length_N)
    proposals = Samples(
        every.ids_NT[:, toys.PREFIX_LENGTH :],
        every.length_N - toys.PREFIX_LENGTH,
        every.log_prob_N,
        every.log_prob_N,
        None,
    )
    scored = ScoredSet(proposals, energy_N)
    weight_N = (-energy_N.double()).softmax(0)
    assert toys.chi_square_p(resampled(scored, every, 20_000), weight_N) > 1e-3
    assert not torch.equal(scored.draw(0, 50), scored.draw(1, 50))
    assert torch.equal(scored.draw(0, 5), scored.draw(0, 50)[:5])


@pytest.mark.parametrize(
    ("mode", "cut"),
    [("fixed", {}), ("until_end", {}), ("fixed", {"top_k": 3}), ("until_end", {"top_p": 0.8})],
    ids=str,
)
def test_joint_samples_follow_the_target_they_state(
    mode: ContinuationMode, cut: dict[str, float]
) -> None:
    every, joint = toys.everything(mode), toys.joint_model("bit", mode)
    base_N = toys.truncated_log_prob(joint.language_model, every, **cut)  # type: ignore[arg-type]
    log_weight_N = -joint.energy(every.ids_NT, every.length_N).double()
    target_N = (base_N + log_weight_N).softmax(0)
    rows = []
    for seed in range(400):
        sample = joint.sample(toys.PROMPT, 64, seed=seed, **cut)  # type: ignore[arg-type]
        rows.append([*sample.ids_T.tolist(), *[toys.END] * (toys.NUM_NEW - len(sample.ids_T))])
    counts_N = every.counts(torch.tensor(rows))
    assert toys.chi_square_p(counts_N, target_N) > 1e-3
    # Neither without the energy, nor with the other truncation.
    assert toys.chi_square_p(counts_N, base_N.exp()) < 1e-3
    if cut:
        assert toys.chi_square_p(counts_N, (every.log_prob_N + log_weight_N).softmax(0)) < 1e-3
    (name, value), *_ = [*cut.items(), ("", 0)]
    assert sample.target == f"P_LM{f'[{name}={value}]' if cut else ''} exp(-E) / Z"


def test_a_target_names_every_cut() -> None:
    scored = toys.joint_model().propose(prefix_ids(), 8, seed=0, top_k=3, top_p=0.9)
    assert scored.target == "P_LM[top_k=3, top_p=0.9] exp(-E) / Z"


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.9}], ids=str)
def test_truncated_proposals_have_no_partition_function(cut: dict[str, float]) -> None:
    scored = toys.joint_model().propose(prefix_ids(), 32, seed=0, **cut)  # type: ignore[arg-type]
    (name, value), *_ = cut.items()
    with pytest.raises(UserError, match=rf"truncation = {name}={value}.*need samples of P_LM"):
        scored.log_partition()


def exact_log_z(every: toys.Everything, joint: JointModel) -> tuple[float, float]:
    """log Z, and the standard deviation of the weights relative to Z."""
    log_weight_N = -joint.energy(every.ids_NT, every.length_N).double()
    log_z = (every.log_prob_N + log_weight_N).logsumexp(0)
    second = (every.log_prob_N + 2 * (log_weight_N - log_z)).logsumexp(0).exp()
    return float(log_z), math.sqrt(float(second) - 1)


@each_mode
@each_energy
def test_bounds_bracket_the_enumerated_log_z(name: str, mode: ContinuationMode) -> None:
    every, joint = toys.everything(mode), toys.joint_model(name, mode)
    log_z, spread = exact_log_z(every, joint)
    scored = joint.propose(every.prefix_P, 8000, seed=3)
    error = 4 * spread / math.sqrt(8000)
    lower, upper = (float(bound) for bound in scored.log_partition())
    assert log_z - error < lower <= upper < log_z + error
    # With few samples the two expectations lie apart, on either side.
    few = bounds_on_disjoint_subsets(scored.log_weight_N, 8)
    assert few.lower < log_z < few.upper


def exact_perplexity(joint: JointModel, texts: list[str]) -> tuple[float, float, float]:
    """Base and joint perplexity by enumeration, and one standard error of log Z per token."""
    blocks = joint.blocks_of(texts)
    start, mode = joint.block.prefix_length, joint.block.continuation
    base = total = variance = 0.0
    for row, length in enumerate(blocks.length_B.tolist()):
        prefix = blocks.ids_BT[row, :start].tolist()
        every = toys.enumerate_continuations(joint.language_model, prefix, toys.NUM_NEW, mode)
        number = every.number_of(torch.from_numpy(blocks.ids_BT[row : row + 1, start:]))[0]
        assert every.length_N[number] == length
        log_z, spread = exact_log_z(every, joint)
        energy = joint.energy(every.ids_NT[number][None], every.length_N[number][None])
        base += float(every.log_prob_N[number])
        total += float(every.log_prob_N[number]) - float(energy[0]) - log_z
        variance += spread**2
    num_tokens = int((blocks.length_B - start).sum())
    return (
        math.exp(-base / num_tokens),
        math.exp(-total / num_tokens),
        math.sqrt(variance) / num_tokens,
    )


@each_mode
@pytest.mark.parametrize("name", ["heat", "bit"])
def test_perplexity_brackets_the_exact_one(name: str, mode: ContinuationMode) -> None:
    joint = toys.joint_model(name, mode)
    base, exact, error = exact_perplexity(joint, TEXTS)
    report = joint.perplexity(TEXTS, num_samples=1600, seed=0)
    assert report.num_prefixes == (4 if mode == "fixed" else 5)
    assert report.base.value == pytest.approx(base, rel=1e-5)
    slack = 4 * error / math.sqrt(1600) * exact
    assert exact - slack < report.joint.lower <= report.joint.upper < exact + slack
    assert report.joint.published.low <= exact <= report.joint.published.high
    assert [bound.num_samples for bound in report.joint.bounds_at] == [400, 800, 1600]
    assert abs(exact - base) > 3 * slack, "the energy changes too little for this to be a test"


def test_every_prefix_of_a_perplexity_has_its_own_proposals() -> None:
    # The same document twice: its two prefixes are equal, their proposals are not.
    joint = toys.joint_model("bit", "until_end")
    seen: list[Tensor] = []
    propose: Callable[..., ScoredSet] = joint.propose

    class Recorder(JointModel):
        def propose(self, *args: object, **arguments: object) -> ScoredSet:
            assert arguments["out_of"] == 2 * 64
            seen.append(propose(*args, **arguments).proposals.ids_NT)
            return propose(*args, **arguments)

        def score(self, *args: Any, **arguments: Any) -> Any:
            assert arguments["out_of"] == 2 * 64  # real text is rounded as proposals are
            return super().score(*args, **arguments)

    recorder = Recorder(joint.language_model, joint.energy_model)
    recorder.perplexity(["ba do gi lu", "ba do gi lu"], 64)
    assert len(seen) == 2
    assert not torch.equal(seen[0], seen[1])


@each_mode
def test_fewer_tokens_are_the_beginning_of_the_full_draw(mode: ContinuationMode) -> None:
    joint = toys.joint_model("bit", mode)
    ended = Counter[bool]()
    for seed in range(25):
        full = joint.sample(toys.PROMPT, 64, seed=seed)
        ended[len(full.ids_T) < toys.NUM_NEW] += 1
        for num_tokens in (1, 2, 3):
            cut = joint.sample(toys.PROMPT, 64, seed=seed, num_tokens=num_tokens)
            assert torch.equal(cut.ids_T, full.ids_T[:num_tokens])
            # Weighed and resampled as whole continuations; the log-prob is of what is shown.
            assert cut.energy == full.energy
            shown = torch.cat([joint.encode_prompt(toys.PROMPT), cut.ids_T])[None]
            log_prob = joint.language_model.log_prob(shown, shown.shape[1] - len(cut.ids_T)).sum()
            assert cut.lm_log_prob == pytest.approx(float(log_prob), abs=1e-4)
            assert torch.equal(cut.scored.energy_N, full.scored.energy_N)
            assert cut.scored.proposals.ids_NT.shape[1] == toys.NUM_NEW
    assert bool(ended[True]) == (mode == "until_end")


@each_mode
def test_a_sample_says_what_it_is(mode: ContinuationMode) -> None:
    every, joint = toys.everything(mode), toys.joint_model("heat", mode)
    for seed in range(10):
        sample = joint.sample(toys.PROMPT, 64, seed=seed)
        padded = [*sample.ids_T.tolist(), *[toys.END] * (toys.NUM_NEW - len(sample.ids_T))]
        number = every.number_of(torch.tensor([padded]))[0]
        assert len(sample.ids_T) == int(every.length_N[number]) - toys.PREFIX_LENGTH
        energy = joint.energy(every.ids_NT[number][None], every.length_N[number][None])
        assert sample.energy == pytest.approx(float(energy[0]), abs=1e-4)
        assert sample.lm_log_prob == pytest.approx(float(every.log_prob_N[number]), abs=1e-4)
        words = toys.word_tokenizer().decode(sample.ids_T.tolist(), skip_special_tokens=True)
        assert sample.text == words
        assert 1 <= sample.effective_sample_size <= sample.num_proposals == 64
        assert sample.flags == []


def test_a_seed_gives_the_same_sample_again() -> None:
    joint = toys.joint_model()
    texts = [joint.sample(toys.PROMPT, 16, seed=seed).text for seed in range(8)]
    assert texts == [joint.sample(toys.PROMPT, 16, seed=seed).text for seed in range(8)]
    assert len(set(texts)) > 3


@each_energy
@pytest.mark.parametrize("prompt", ["ba", "ba do", "ba do gi lu ba"])
def test_another_length_of_prompt_is_flagged(name: str, prompt: str) -> None:
    joint = toys.joint_model(name)
    sample = joint.sample(prompt, 16)
    assert len(sample.ids_T) == toys.NUM_NEW
    length = len(prompt.split())
    flag = sample.flags[0]
    assert f"prompt has {length} tokens" in flag
    assert "prefixes of 3" in flag
    # It still is a continuation of this prompt.
    ids_T = torch.cat([joint.encode_prompt(prompt), sample.ids_T])
    log_prob_1C = joint.language_model.log_prob(ids_T[None], length)
    assert sample.lm_log_prob == pytest.approx(float(log_prob_1C.double().sum()), abs=1e-4)


def refused(call: Callable[[JointModel], object], name: str = "heat") -> UserError:
    with pytest.raises(UserError) as caught:
        call(toys.joint_model(name))
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("prompt", ["", "   ", "\n\t"])
def test_an_empty_prompt_is_refused(prompt: str) -> None:
    error = refused(lambda joint: joint.sample(prompt))
    assert (error.field, error.value) == ("prompt", repr(prompt))
    assert "give some text" in error.remedy


def test_a_prompt_that_is_not_text_is_refused() -> None:
    error = refused(lambda joint: joint.sample("ba \udcff"))
    assert (error.field, error.value) == ("prompt", r"'ba \udcff'")
    assert "UTF-8" in error.remedy


@each_energy
def test_a_prompt_longer_than_the_context_is_refused(name: str) -> None:
    longest = toys.CONTEXT - toys.NUM_NEW
    toys.joint_model(name).sample("ba " * longest, 4)
    too_long = "ba " * (longest + 1)
    for error in (
        refused(lambda joint: joint.sample(too_long, 4), name),
        refused(lambda joint: joint.encode_prompt(too_long), name),
    ):
        assert error.field == "prompt"
        assert str(error.value).startswith("33 tokens")
        assert "context of 32; shorten" in error.remedy


@pytest.mark.parametrize("num_tokens", [0, -1, toys.NUM_NEW + 1])
def test_more_tokens_than_the_energy_knows_are_refused(num_tokens: int) -> None:
    error = refused(lambda joint: joint.sample(toys.PROMPT, 16, num_tokens=num_tokens))
    assert (error.field, error.value) == ("num_tokens", num_tokens)
    assert "1 to 3 tokens" in error.remedy


@pytest.mark.parametrize("num_proposals", [0, -5])
def test_no_proposals_are_refused(num_proposals: int) -> None:
    error = refused(lambda joint: joint.sample(toys.PROMPT, num_proposals))
    assert (error.field, error.value) == ("num_proposals", num_proposals)
    assert "at least 1" in error.remedy


@pytest.mark.parametrize("num_samples", [0, 1, 7])
def test_too_few_samples_for_bounds_are_refused(num_samples: int) -> None:
    error = refused(lambda joint: joint.perplexity(TEXTS, num_samples))
    assert (error.field, error.value) == ("num_samples", num_samples)
    assert "8 or more" in error.remedy
    toys.joint_model().perplexity(TEXTS, 8)


@each_mode
@pytest.mark.parametrize("texts", [[], [""], ["ba do"]], ids=str)
def test_text_too_short_for_a_block_is_refused(mode: ContinuationMode, texts: list[str]) -> None:
    with pytest.raises(UserError, match=r"text = .* tokens: too short for one block of 3 \+ 3"):
        toys.joint_model("heat", mode).perplexity(texts, 16)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, None), (None, 1.5)])
def test_senseless_truncation_is_refused(top_k: int | None, top_p: float | None) -> None:
    error = refused(lambda joint: joint.sample(toys.PROMPT, 16, top_k=top_k, top_p=top_p))
    assert error.field == ("top_k" if top_k is not None else "top_p")


def test_scores_of_blocks_do_not_depend_on_the_batch() -> None:
    joint = toys.joint_model("bit_bpe", "until_end")
    blocks = joint.blocks_of(TEXTS)
    whole = joint.score(blocks)
    for one, other in zip(whole, joint.score(blocks, batch_size=1), strict=True):
        assert one.dtype == np.float64
        assert np.allclose(one, other, atol=1e-4)


def test_unknown_words_are_flagged_and_an_end_of_text_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joint = toys.joint_model("unit", "until_end")
    lm = joint.language_model
    unknown, end = int(lm.tokenizer.unk_token_id), lm.end_of_text
    assert any("does not know" in flag for flag in joint.prompt_flags(torch.tensor([unknown])))
    assert not any("does not know" in flag for flag in joint.prompt_flags(torch.tensor([end])))
    # As SmolLM2 has it: every byte is known, and the unknown token is the end of a text.
    monkeypatch.setattr(lm, "tokenizer", SimpleNamespace(unk_token_id=end))
    assert not any("does not know" in flag for flag in joint.prompt_flags(torch.tensor([end])))
