"""Logits less a guess of their largest: the same distribution, rounded more finely.

Shapes: B rows, T tokens, C new tokens, V vocabulary.
"""

from collections.abc import Callable

import pytest
import torch
import toys
from torch import Tensor
from transformers import PreTrainedModel

from residual_ebm.models import last_layer, packed_linear, prefix_steps
from residual_ebm.models.decoding import UNTRUNCATED
from residual_ebm.models.language_model import LanguageModel, TokenFeatures
from residual_ebm.models.last_layer import ends_in_a_plain_layer, relative_logits
from residual_ebm.models.ralm import RalmForCausalLM

# What is added to every logit: bfloat16 has steps of an eighth there.
HIGH = 24.0


@pytest.fixture(params=["few", "many"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """Of few rows a guess is added to the logits; of many, it is one more number of each."""
    monkeypatch.setattr(packed_linear, "has_tiles", lambda: False)
    if request.param == "few":
        return last_layer._LessAGuess
    monkeypatch.setattr(last_layer, "FROM_ROWS", 0)
    if not packed_linear._works():
        pytest.skip("no layout for bfloat16 here")
    return last_layer._OfMany


def taken_by(model: PreTrainedModel) -> type:
    return type(vars(model.get_output_embeddings())["forward"])


def high_model(vocabulary: int) -> PreTrainedModel:
    """In bfloat16, with logits that are all far from zero, as trained models often have them."""
    model = toys.causal_model(vocab_size=vocabulary).bfloat16()
    last = model.get_output_embeddings()
    weight_VH = 0.3 * torch.randn(last.weight.shape, generator=torch.Generator().manual_seed(0))
    weight_VH[:, 0] = 1.0
    last.weight.data = weight_VH.bfloat16()

    def lift(_layer: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        first_H = torch.zeros(weight_VH.shape[1], dtype=torch.bfloat16)
        first_H[0] = HIGH
        return (inputs[0] + first_H,)

    last.register_forward_pre_hook(lift)
    return model


def exact_log_prob(model: PreTrainedModel, features: TokenFeatures, ids_BC: Tensor) -> Tensor:
    """Of the very same states, by a last layer in float64."""
    weight_VH = model.get_output_embeddings().weight.double()
    logits_BCV = features.hidden_BCH.double() @ weight_VH.T
    return logits_BCV.log_softmax(-1).gather(-1, ids_BC[..., None])[..., 0]


def drawn(lm: LanguageModel) -> tuple[TokenFeatures, Tensor]:
    decoded, features = lm.sample_chunk_with_features(
        prefix_ids_GP=torch.tensor([toys.prompt_ids()]),
        prefix_numbers=[0],
        first_sample=0,
        num_samples=64,
        num_tokens=6,
        seed=0,
        truncation=UNTRUNCATED,
        stop_at_end=False,
    )
    return features, decoded.ids_NC


def scored(lm: LanguageModel) -> tuple[TokenFeatures, Tensor]:
    ids_BT = torch.randint(0, 7, (64, 9), generator=torch.Generator().manual_seed(0))
    return lm.features(ids_BT, 3), ids_BT[:, 3:]


@pytest.mark.parametrize("ask", [drawn, scored])
@pytest.mark.parametrize("vocabulary", [7, 1000])  # every token is asked, or some
@torch.inference_mode()
def test_log_probs_are_hardly_rounded_by_the_last_layer(
    ask: Callable[[LanguageModel], tuple[TokenFeatures, Tensor]],
    vocabulary: int,
    kind: type,
) -> None:
    model = high_model(vocabulary)
    with relative_logits(model):
        assert taken_by(model) is kind
    features, ids_BC = ask(LanguageModel(model, toys.word_tokenizer()))
    logits = features.hidden_BCH.double() @ model.get_output_embeddings().weight.double().T
    assert float(logits.amax(-1).median()) > HIGH
    error_BC = (features.log_prob_BC.double() - exact_log_prob(model, features, ids_BC)).abs()
    plain_BCV = (features.hidden_BCH @ model.get_output_embeddings().weight.T).float()
    plain_BC = plain_BCV.log_softmax(-1).gather(-1, ids_BC[..., None])[..., 0].double()
    plain_error_BC = (plain_BC - exact_log_prob(model, features, ids_BC)).abs()
    assert float(plain_error_BC.mean()) > 0.01
    assert float(error_BC.mean()) < float(plain_error_BC.mean()) / 4


def test_states_of_the_trial_are_not_among_those_of_samples() -> None:
    features, ids_BC = drawn(LanguageModel(toys.causal_model().bfloat16(), toys.word_tokenizer()))
    assert features.hidden_BCH.shape[:2] == ids_BC.shape


@torch.inference_mode()
def test_within_rows_are_shifted_and_behind_it_the_model_is_as_it_was(kind: type) -> None:
    model = toys.causal_model().bfloat16()
    ids_BT = torch.tensor([[3, 4, 5]])
    before_BTV = model(ids_BT).logits
    with relative_logits(model):
        assert taken_by(model) is kind
        shift_BTV = (model(ids_BT).logits - before_BTV).float()
        with relative_logits(model):  # within itself
            assert torch.equal((model(ids_BT).logits - before_BTV).float(), shift_BTV)
        assert torch.equal((model(ids_BT).logits - before_BTV).float(), shift_BTV)
    assert torch.equal(model(ids_BT).logits, before_BTV)
    with pytest.raises(IndexError), relative_logits(model):
        model(torch.tensor([[99]]))
    assert float(shift_BTV.std(-1).max()) < 0.1 * float(shift_BTV.abs().mean())
    assert torch.equal(model(ids_BT).logits, before_BTV)


@pytest.mark.parametrize(
    "model",
    [
        toys.causal_model(),  # float32: nothing to gain
        toys.causal_model("gemma2", final_logit_softcapping=3.0).bfloat16(),
        toys.causal_model("gptj").bfloat16(),  # a last layer with a bias
    ],
    ids=["float32", "capped", "biased"],
)
@torch.inference_mode()
def test_other_models_are_left_alone(model: PreTrainedModel) -> None:
    ids_BT = torch.tensor([[3, 4, 5]])
    before_BTV = model(ids_BT).logits
    with relative_logits(model):
        assert torch.equal(model(ids_BT).logits, before_BTV)


def test_a_layer_that_somebody_else_has_taken_over_is_left_alone() -> None:
    model = toys.causal_model().bfloat16()
    last = model.get_output_embeddings()
    theirs = last.forward = lambda hidden: hidden.new_zeros(*hidden.shape[:-1], 7)
    with relative_logits(model):
        assert last.forward is theirs
    assert last.forward is theirs


def test_both_factors_of_a_ralm_are_relative(kind: type) -> None:
    base, residual = (toys.causal_model(seed=seed).bfloat16() for seed in (0, 1))
    ralm = RalmForCausalLM.of(base, residual).eval()
    ids_BT = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        before_BTV = ralm(ids_BT).logits.log_softmax(-1)
        with relative_logits(ralm):
            assert [taken_by(part) for part in ralm.parts] == [kind, kind]
            within_BTV = ralm(ids_BT).logits.log_softmax(-1)
    torch.testing.assert_close(within_BTV, before_BTV, atol=0.3, rtol=0.02)
    assert not any("forward" in vars(part.get_output_embeddings()) for part in ralm.parts)


@pytest.mark.parametrize("with_features", [False, True])
def test_a_model_is_tried_with_logits_as_they_are(
    with_features: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a trial allows depends on how large logits are."""
    lm = LanguageModel(toys.causal_model().bfloat16(), toys.word_tokenizer())
    taken_over: list[bool] = []
    plain = prefix_steps._try

    def watched(model: PreTrainedModel, way: prefix_steps.Way) -> bool:
        taken_over.append("forward" in vars(model.get_output_embeddings()))
        return plain(model, way)

    monkeypatch.setattr(prefix_steps, "_try", watched)
    if with_features:
        drawn(lm)
    else:
        lm.sample(torch.tensor(toys.prompt_ids()), 2, 3, seed=0)
    assert taken_over == [False]


@torch.inference_mode()
def test_factors_may_have_a_last_layer_in_common(kind: type) -> None:
    base, residual = (toys.causal_model(seed=seed).bfloat16() for seed in (0, 1))
    residual.set_output_embeddings(base.get_output_embeddings())
    ralm = RalmForCausalLM.of(base, residual).eval()
    assert len({id(part.get_output_embeddings()) for part in ralm.parts}) == 1
    with relative_logits(ralm):
        assert taken_by(ralm.parts[0]) is kind
    assert "forward" not in vars(ralm.parts[0].get_output_embeddings())


def test_the_guess_is_the_largest_of_those_asked(kind: type) -> None:
    """Of a vocabulary of which all are asked, so that the largest logit left is zero."""
    model = toys.causal_model().bfloat16()
    ids_BT = torch.tensor([[3, 4, 5], [6, 3, 3]])
    with torch.inference_mode(), relative_logits(model):
        assert taken_by(model) is kind
        largest_BT = model(ids_BT).logits.float().amax(-1)
    assert float(largest_BT.abs().max()) < 0.1
    with torch.inference_mode():
        assert float(model(ids_BT).logits.float().amax(-1).abs().min()) > 1


class _OtherProduct(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_last_layer_with_a_product_of_its_own_is_not_plain() -> None:
    model = toys.causal_model()
    before = model.get_output_embeddings()
    other = _OtherProduct(before.in_features, before.out_features, bias=False)
    other.weight = before.weight
    model.set_output_embeddings(other)
    assert not ends_in_a_plain_layer(model)


def test_models_that_scale_or_cap_their_logits_do_not_end_in_a_plain_layer() -> None:
    assert ends_in_a_plain_layer(toys.causal_model())
    assert not ends_in_a_plain_layer(toys.causal_model("gemma2", final_logit_softcapping=3.0))
    assert not ends_in_a_plain_layer(toys.causal_model("gptj"))


@torch.inference_mode()
def test_a_layer_that_cannot_be_taken_over_leaves_the_others_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ralm = RalmForCausalLM.of(*(toys.causal_model(seed=seed).bfloat16() for seed in (0, 1)))
    taken: list[Tensor] = []

    def no_room(weight_VH: Tensor) -> object:
        taken.append(weight_VH)
        if len(taken) == 2:
            raise MemoryError
        return lambda hidden: hidden

    monkeypatch.setattr(last_layer, "_LessAGuess", no_room)
    with pytest.raises(MemoryError), relative_logits(ralm.eval()):
        pass
    assert not any("forward" in vars(part.get_output_embeddings()) for part in ralm.parts)
