"""HeaT from kept states, and from states of the decoder, is HeaT from the blocks themselves."""

import pytest
import torch
import toys

from residual_ebm.config import ContinuationMode
from residual_ebm.models import kept_features
from residual_ebm.models.decoding import UNTRUNCATED
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.kept_features import KeptFeatures
from residual_ebm.models.language_model import continuation_mask
from residual_ebm.progress import QUIET


def heat(mode: ContinuationMode) -> EnergyModel:
    energy = toys.fresh_energy("heat", mode)
    torch.nn.init.normal_(energy.network.scalar.weight, generator=torch.Generator().manual_seed(0))
    return energy


@pytest.mark.parametrize("mode", toys.MODES)
@pytest.mark.parametrize("batch_size", [2, 5, 100])
def test_kept_states_give_the_same_energies(mode: ContinuationMode, batch_size: int) -> None:
    energy = heat(mode)
    draw = torch.Generator().manual_seed(0)
    ids_NT = torch.randint(0, 7, (12, toys.BLOCK_LENGTH), generator=draw)
    length_N = torch.full((12,), toys.BLOCK_LENGTH)
    if mode == "until_end":
        length_N = torch.randint(
            toys.PREFIX_LENGTH + 1, toys.BLOCK_LENGTH + 1, (12,), generator=draw
        )
    kept = KeptFeatures(energy, ids_NT, length_N)
    kept.compute(batch_size, QUIET)
    chosen = torch.tensor([7, 0, 11, 7])
    expected = energy(ids_NT[chosen], length_N[chosen])
    assert expected.std() > 0.01
    torch.testing.assert_close(kept(chosen), expected, rtol=1e-4, atol=1e-5)
    assert kept(chosen).requires_grad


def test_too_many_blocks_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = toys.language_model()
    monkeypatch.setattr(kept_features, "_MAX_BYTES", 10 * 3 * lm.hidden_size * 4)
    assert KeptFeatures.fit(lm, 10, 3)
    assert not KeptFeatures.fit(lm, 11, 3)


@pytest.mark.parametrize("mode", toys.MODES)
def test_states_of_the_decoder_give_the_same_energies(mode: ContinuationMode) -> None:
    energy = heat(mode)
    lm = toys.language_model()
    prefix_GP = torch.tensor([[3, 4, 3], [5, 6, 4]])
    decoded, features = lm.sample_chunk_with_features(
        prefix_ids_GP=prefix_GP,
        prefix_numbers=[0, 1],
        first_sample=0,
        num_samples=40,
        num_tokens=toys.NUM_NEW,
        seed=0,
        truncation=UNTRUNCATED,
        stop_at_end=mode == "until_end",
    )
    mask_NC = continuation_mask(decoded.ids_NC, 0, decoded.length_N)
    ids_NT = torch.cat([prefix_GP.repeat_interleave(40, 0), decoded.ids_NC], 1)
    expected = energy(ids_NT, toys.PREFIX_LENGTH + decoded.length_N)
    with torch.inference_mode():
        held = energy.of_features(features, mask_NC)
    assert expected.std() > 0.01
    torch.testing.assert_close(held, expected.detach(), rtol=1e-4, atol=1e-4)
    if mode == "until_end":
        assert (decoded.length_N < toys.NUM_NEW).any()
