"""An encoder's attention by our kernel gives the states that its own attention gives, or is not
taken.

Shapes: B blocks, L tokens.
"""

from typing import Any

import kernels
import pytest
import torch
import toys
from encoders import LEFT, LENGTHS, TAKEN, batch, encoder, error, states
from torch import Tensor

from residual_ebm.models import encoder_attention
from residual_ebm.models.both_ways import make_bidirectional
from residual_ebm.models.encoder_attention import attends_by_kernel, kernel_attention
from residual_ebm.models.packed_attention import attend_both_ways

kernel = kernels.kernel
needs_kernel = pytest.mark.usefixtures("kernel")


@pytest.fixture
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of rows that the kernel is given, call by call."""
    request.getfixturevalue("kernel")
    calls: list[list[int]] = []

    def watched(*given: Any) -> Tensor:
        calls.append(given[3].tolist())
        return attend_both_ways(*given)

    monkeypatch.setattr(encoder_attention, "attend_both_ways", watched)
    return calls


@pytest.mark.parametrize("model_type", TAKEN)
@pytest.mark.parametrize("lengths", [LENGTHS, (30, 30)], ids=["padded", "not padded"])
def test_every_family_is_as_near_to_float32_as_by_its_own_attention(
    model_type: str, lengths: tuple[int, ...], asked: list[list[int]]
) -> None:
    ids_BL, mask_BL = batch(lengths)
    exact = states(encoder(model_type, torch.float32), ids_BL, mask_BL)
    model = encoder(model_type, torch.bfloat16)
    assert attends_by_kernel(model)
    own = error(states(model, ids_BL, mask_BL), exact)
    asked.clear()
    with kernel_attention(model):
        by_kernel = error(states(model, ids_BL, mask_BL), exact)
        assert asked == [list(lengths)] * 2
        asked.clear()
        states(model, ids_BL, None)
        assert asked == [[max(lengths)] * len(lengths)] * 2
    assert own > 0
    assert by_kernel < 1.3 * own
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("model_type", LEFT)
@pytest.mark.usefixtures("kernel")
def test_models_with_attention_of_their_own_keep_it(model_type: str) -> None:
    model = encoder(model_type, torch.bfloat16)
    own = model.config._attn_implementation
    assert not attends_by_kernel(model)
    assert model.config._attn_implementation == own


def test_a_context_too_short_for_a_trial_is_left_to_the_model(asked: list[list[int]]) -> None:
    assert not attends_by_kernel(encoder("bert", torch.bfloat16, max_position_embeddings=6))
    assert not asked


def test_heads_that_the_kernel_does_not_take_are_left_to_the_model(asked: list[list[int]]) -> None:
    assert not attends_by_kernel(encoder("bert", torch.bfloat16, num_attention_heads=8))
    assert not asked


def test_float32_is_left_to_the_model(asked: list[list[int]]) -> None:
    assert not attends_by_kernel(encoder("bert", torch.float32))
    assert not asked


@needs_kernel
@pytest.mark.parametrize(
    "planted", [lambda out: out.flip(1), lambda out: out[:1].expand_as(out)], ids=["order", "row"]
)
def test_a_model_that_fails_its_trial_is_left_alone(
    planted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        encoder_attention,
        "attend_both_ways",
        lambda *given: planted(attend_both_ways(*given)).contiguous(),
    )
    assert not attends_by_kernel(encoder("bert", torch.bfloat16))


@needs_kernel
def test_a_trial_leaves_the_model_as_it_was() -> None:
    model = encoder("bert", torch.bfloat16).train()
    state = torch.get_rng_state()
    assert attends_by_kernel(model)
    assert all(part.training for part in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("hole", [(0, 0), (0, 5)], ids=["in front", "in the middle"])
def test_holes_in_a_row_go_to_the_models_own_attention(
    hole: tuple[int, int], asked: list[list[int]]
) -> None:
    model = encoder("bert", torch.bfloat16)
    assert attends_by_kernel(model)
    ids_BL, mask_BL = batch(LENGTHS)
    mask_BL[hole] = False
    expected = states(model, ids_BL, mask_BL)
    asked.clear()
    with kernel_attention(model):
        torch.testing.assert_close(states(model, ids_BL, mask_BL), expected)
    assert not asked


def test_a_causal_model_is_read_left_to_right_by_torch_and_both_ways_by_the_kernel(
    asked: list[list[int]],
) -> None:
    model = toys.causal_model("llama", head_dim=16).bfloat16().model
    ids_BL, mask_BL = batch(LENGTHS)
    ids_BL %= 7
    expected = states(model, ids_BL, mask_BL)
    with kernel_attention(model):
        torch.testing.assert_close(states(model, ids_BL, mask_BL), expected)
    assert not attends_by_kernel(model)
    assert not asked
    assert make_bidirectional(model)
    encoder_attention._tried.clear()
    assert attends_by_kernel(model)
    expected = states(model, ids_BL, mask_BL)
    asked.clear()
    with kernel_attention(model):
        outcome = states(model, ids_BL, mask_BL)
    assert asked == [list(LENGTHS)] * 2
    assert error(outcome, expected) < 0.1


@needs_kernel
@torch.inference_mode()
def test_scores_that_are_changed_are_refused() -> None:
    query = torch.ones(1, 2, 4, 16).bfloat16()
    length_B = torch.tensor([4])
    with pytest.raises(ValueError, match="position_bias"):
        encoder_attention._attend(
            torch.nn.Module(), query, query, query, length_B, position_bias=query
        )
    with pytest.raises(ValueError, match="no lengths"):
        encoder_attention._attend(torch.nn.Module(), query, query, query, None)
