"""Energies: a function of a block's own tokens, and of nothing else.

`heat`, `unit` and `bit` read the language model's ids; `bit_bpe` reads decoded text with another
vocabulary.

Shapes: B blocks, T tokens of a block, N continuations.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from residual_ebm.config import ContinuationMode
from residual_ebm.errors import UserError
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.energy_inputs import (
    TextBridge,
    TextInputs,
    block_mask,
    decode_blocks,
    same_vocabulary,
)
from residual_ebm.models.energy_networks import TransformerEnergy, masked_mean
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.models.loading import load_tokenizer

each_energy = pytest.mark.parametrize("name", toys.ENERGIES)
CLOSE = 1e-4  # float32, energies of standard deviation 1
WINDOWED = ("gemma3_text", "mistral")


def energy_model(name: str, mode: ContinuationMode = "until_end") -> EnergyModel:
    energy = toys.joint_model(name, mode).energy_model
    assert isinstance(energy, EnergyModel)
    return energy


def all_blocks(mode: ContinuationMode = "until_end") -> tuple[Tensor, Tensor]:
    every = toys.everything(mode)
    return every.ids_NT, every.length_N


@each_energy
def test_the_toy_energies_do_depend_on_the_block(name: str) -> None:
    for mode in toys.MODES:
        ids_NT, length_N = all_blocks(mode)
        energy_N = energy_model(name, mode).energy(ids_NT, length_N)
        assert energy_N.shape == (len(ids_NT),)
        assert energy_N.dtype == torch.float32
        assert energy_N.std().item() == pytest.approx(1, abs=1e-3)
        assert len(energy_N.unique()) > 0.9 * len(ids_NT)


@each_energy
def test_a_batch_of_one_has_the_energies_of_a_batch_of_many(name: str) -> None:
    ids_NT, length_N = all_blocks()
    energy = energy_model(name)
    many_N = energy.energy(ids_NT, length_N, batch_size=1000)
    for batch_size in (1, 7, 64):
        some_N = energy.energy(ids_NT[:100], length_N[:100], batch_size=batch_size)
        assert torch.allclose(some_N, many_N[:100], atol=CLOSE)
    order_N = torch.randperm(len(ids_NT), generator=torch.Generator().manual_seed(0))
    shuffled_N = energy.energy(ids_NT[order_N], length_N[order_N])
    assert torch.allclose(shuffled_N, many_N[order_N], atol=CLOSE)


@each_energy
def test_a_length_that_hides_nothing_changes_nothing(name: str) -> None:
    ids_NT, _ = all_blocks("fixed")
    energy = energy_model(name, "fixed")
    full_N = torch.full((len(ids_NT),), toys.BLOCK_LENGTH)
    assert torch.allclose(energy.energy(ids_NT), energy.energy(ids_NT, full_N), atol=CLOSE)


@each_energy
def test_tokens_after_the_end_never_change_the_energy(name: str) -> None:
    ids_NT, length_N = all_blocks()
    energy = energy_model(name)
    before_N = energy.energy(ids_NT, length_N)
    padding_NT = torch.arange(toys.BLOCK_LENGTH) >= length_N[:, None]
    assert padding_NT.any(-1).sum() >= 7
    for token in range(7):
        other_NT = torch.where(padding_NT, token, ids_NT)
        assert torch.allclose(energy.energy(other_NT, length_N), before_N, atol=1e-6)
    # The end itself is seen: the same ids, one token longer.
    longer_N = energy.energy(ids_NT, (length_N + 1).clamp(max=toys.BLOCK_LENGTH))
    assert ((longer_N - before_N).abs() > 1e-3)[padding_NT.any(-1)].all()


@each_energy
def test_padded_or_not_the_energies_are_the_same(name: str) -> None:
    ids_NT, length_N = all_blocks()
    energy = energy_model(name)
    padded_N = energy.energy(ids_NT, length_N)
    for length in length_N.unique().tolist():
        rows = length_N == length
        alone_N = energy.energy(ids_NT[rows, :length])
        assert torch.allclose(alone_N, padded_N[rows], atol=CLOSE)


def test_heat_masks_padding_as_if_it_were_not_there() -> None:
    # The network itself, asked for a shorter continuation.
    ids_NT, length_N = all_blocks()
    energy = energy_model("heat")
    padded_N = energy.energy(ids_NT, length_N)
    for num_new in (1, 2):
        rows = length_N == toys.PREFIX_LENGTH + num_new
        short_NT = ids_NT[rows, : toys.PREFIX_LENGTH + num_new]
        with torch.inference_mode():
            features = energy.language_model.features(short_NT, toys.PREFIX_LENGTH)
            mask_BC = torch.ones(len(short_NT), num_new, dtype=torch.bool)
            alone_N = energy.network(features, mask_BC)
        assert torch.allclose(alone_N, padded_N[rows], atol=CLOSE)


@each_energy
def test_changing_any_token_can_change_the_energy(name: str) -> None:
    energy = energy_model(name, "fixed")
    block_T = torch.tensor([[*toys.prompt_ids(), 5, 3, 6]])
    for place in (-1, -2, -3, toys.PREFIX_LENGTH - 1, 0):
        changed = []
        for token in range(7):
            other_T = block_T.clone()
            other_T[0, place] = token
            changed.append(round(energy.energy(other_T).item(), 4))
        assert len(set(changed)) == 7, place


@each_energy
def test_an_end_inside_a_block_is_seen_and_so_is_its_place(name: str) -> None:
    energy = energy_model(name, "fixed")
    prefix = toys.prompt_ids()
    blocks = [[5, 3, 6], [5, 0, 6], [0, 5, 6], [5, 6, 0], [0, 0, 6], [5, 0, 0], [0, 0, 0]]
    energy_B = energy.energy(torch.tensor([[*prefix, *new] for new in blocks]))
    assert len({round(value, 4) for value in energy_B.tolist()}) == len(blocks)


def test_decoded_text_holds_the_separator_of_the_other_tokenizer() -> None:
    ids_BT = torch.tensor([[3, 4, 0, 5, 0], [0, 0, 3, 2, 1], [3, 4, 5, 6, 3]])
    texts = decode_blocks(toys.word_tokenizer(), ids_BT, None, "[SEP]")
    assert texts == [
        "ba do[SEP]gi[SEP]",
        "[SEP][SEP]ba <|unknown|> <|mask|>",
        "ba do gi lu ba",
    ]
    cut = decode_blocks(toys.word_tokenizer(), ids_BT, torch.tensor([2, 3, 4]), "[SEP]")
    assert cut == ["ba do", "[SEP][SEP]ba", "ba do gi lu"]


def test_the_separator_is_one_token_of_the_other_vocabulary() -> None:
    bridge = TextBridge(toys.word_tokenizer(), toys.bpe_tokenizer(), None)
    assert not bridge.same
    inputs = bridge(torch.tensor([[3, 0, 4], [3, 3, 3]]), torch.tensor([3, 1]))
    tokenizer = toys.bpe_tokenizer()
    lengths = inputs.mask_BL.sum(-1).tolist()
    assert tokenizer.decode(inputs.ids_BL[0, : lengths[0]]) == "ba<|endoftext|>do"
    assert (inputs.ids_BL[0, : lengths[0]] == tokenizer.sep_token_id).sum() == 1
    assert tokenizer.decode(inputs.ids_BL[1, : lengths[1]]) == "ba"


def test_the_same_vocabulary_is_read_as_it_is() -> None:
    assert same_vocabulary(toys.word_tokenizer(), toys.word_tokenizer())
    assert not same_vocabulary(toys.word_tokenizer(), toys.bpe_tokenizer())
    ids_NT, length_N = all_blocks()
    inputs = TextBridge(toys.word_tokenizer(), toys.word_tokenizer(), None)(ids_NT, length_N)
    assert torch.equal(inputs.ids_BL, ids_NT)
    assert torch.equal(inputs.mask_BL.sum(-1), length_N)


def test_a_mean_counts_only_what_is_not_padding() -> None:
    hidden_BLH = torch.tensor([[[1.0], [3.0], [100.0]], [[2.0], [4.0], [6.0]]])
    mean_BH = masked_mean(hidden_BLH, torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert mean_BH.tolist() == [[2.0], [4.0]]


def stored_truncation(folder: Path) -> PreTrainedTokenizerFast:
    """The BPE tokenizer, saved with a truncation and a padding of its own as MiniLM's is."""
    toys.bpe_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    stored["padding"] = {
        "strategy": {"Fixed": 40},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    path.write_text(json.dumps(stored))
    return load_tokenizer(str(folder), "energy")


def test_stored_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    tokenizer = stored_truncation(tmp_path)
    assert tokenizer.backend_tokenizer.truncation is None
    assert tokenizer.backend_tokenizer.padding is None
    text = "ba do gi lu lu lu"
    for encode in (lambda: tokenizer(text)["input_ids"], lambda: tokenizer.encode(text)):
        assert encode() == toys.bpe_tokenizer().encode(text)
    stored = toys.fresh_energy("bit_bpe")
    energy = EnergyModel.from_backbone(
        toys.bert(toys.bpe_tokenizer()), tokenizer, stored.info, stored.language_model
    )
    energy.network.scalar.load_state_dict(energy_model("bit_bpe").network.scalar.state_dict())
    ids_NT, length_N = all_blocks()
    energy_N = energy.energy(ids_NT, length_N)
    assert torch.equal(energy_N, energy_model("bit_bpe").energy(ids_NT, length_N))
    last = [energy.energy(torch.tensor([[3, 4, 3, 4, 4, token]])).item() for token in range(7)]
    assert len(set(last)) == 7


@each_energy
def test_a_fresh_energy_is_exactly_zero(name: str) -> None:
    ids_NT, length_N = all_blocks()
    assert torch.equal(toys.fresh_energy(name).energy(ids_NT, length_N), torch.zeros(len(ids_NT)))


@each_energy
def test_a_saved_energy_is_the_same_energy(name: str, tmp_path: Path) -> None:
    ids_NT, length_N = all_blocks()
    energy = energy_model(name)
    energy.save_pretrained(tmp_path / "energy", {"steps": 3})
    loaded = EnergyModel.from_pretrained(
        tmp_path / "energy", toys.language_model(), precision="float32"
    )
    expected_N = energy.energy(ids_NT, length_N)
    assert torch.allclose(loaded.energy(ids_NT, length_N), expected_N, atol=1e-6)
    assert loaded.info == energy.info
    assert loaded.num_parameters == energy.num_parameters
    assert not loaded.network.training
    assert json.loads((tmp_path / "energy/training.json").read_text()) == {"steps": 3}


@each_energy
def test_an_energy_loaded_in_bfloat16_is_nearly_the_same(name: str, tmp_path: Path) -> None:
    energy_model(name).save_pretrained(tmp_path / "energy")
    loaded = EnergyModel.from_pretrained(
        tmp_path / "energy", toys.language_model(), precision="bfloat16"
    )
    assert {parameter.dtype for parameter in loaded.network.parameters()} == {torch.bfloat16}
    ids_NT, length_N = all_blocks()
    rounded_N, exact_N = (e.energy(ids_NT, length_N) for e in (loaded, energy_model(name)))
    assert rounded_N.dtype == torch.float32
    error_N = rounded_N - exact_N
    # A common shift cancels in Z; the rest must be small next to the standard deviation of 1.
    assert (error_N - error_N.mean()).abs().mean() < 0.1


@each_energy
def test_an_energy_is_refused_by_another_language_model(name: str, tmp_path: Path) -> None:
    energy_model(name).save_pretrained(tmp_path / "energy")
    other = LanguageModel(toys.causal_model(seed=7), toys.word_tokenizer(), "another")
    with pytest.raises(UserError, match="trained against another language model"):
        EnergyModel.from_pretrained(tmp_path / "energy", other, precision="float32")


@each_energy
def test_an_altered_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "energy"
    energy_model(name).save_pretrained(folder)
    files = [path for path in sorted(folder.iterdir()) if path.name != "manifest.json"]
    assert {"energy.json", "energy_head.safetensors"} <= {path.name for path in files}
    for path in files:
        whole = path.read_bytes()
        flipped = bytes([*whole[:-2], whole[-2] ^ 1, whole[-1]])
        for content in (flipped, whole[:-1], None):
            path.unlink() if content is None else path.write_bytes(content)
            with pytest.raises(UserError) as caught:
                EnergyModel.from_pretrained(folder, toys.language_model(), precision="float32")
            assert path.name in str(caught.value)
        path.write_bytes(whole)
    EnergyModel.from_pretrained(folder, toys.language_model(), precision="float32")


def test_a_folder_that_is_no_energy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not an energy: it has no energy\.json"):
        EnergyModel.from_pretrained(tmp_path, toys.language_model())


@each_energy
def test_gradients_reach_the_network_and_never_the_language_model(name: str) -> None:
    energy = toys.trained_energy(name, "until_end")
    ids_NT, length_N = all_blocks()
    weight_N = torch.linspace(-1, 1, len(ids_NT))
    (energy(ids_NT, length_N) * weight_N).sum().backward()
    for parameter_name, parameter in energy.network.named_parameters():
        assert parameter.grad is not None, parameter_name
    # The first layer and the last.
    for weight in (next(iter(energy.network.parameters())), energy.network.scalar.weight):
        assert weight.grad is not None
        assert weight.grad.abs().max() > 1e-4
    own = {id(parameter) for parameter in energy.network.parameters()}
    for parameter in energy.language_model.model.parameters():
        assert id(parameter) not in own
        assert parameter.requires_grad
        assert parameter.grad is None


@each_energy
def test_a_step_along_the_gradient_lowers_the_energy(name: str) -> None:
    energy = toys.fresh_energy(name)
    ids_NT, _ = all_blocks("fixed")
    good, bad = ids_NT[:50], ids_NT[50:]
    optimizer = torch.optim.Adam(energy.network.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        (energy(good).mean() - energy(bad).mean()).backward()
        optimizer.step()
    assert energy.energy(good).mean() < energy.energy(bad).mean() - 0.1


def test_heat_sees_the_same_language_model_under_autocast() -> None:
    energy = toys.trained_energy("heat")
    ids_NT, _ = all_blocks("fixed")
    seen = []
    energy.network.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    exact_N = energy(ids_NT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded_N = energy(ids_NT)
    outside, inside = seen
    for name in outside._fields:
        assert torch.equal(getattr(inside, name), getattr(outside, name)), name
        assert not getattr(inside, name).is_inference()
    # The head itself is rounded, but not the last product.
    assert rounded_N.dtype == torch.float32
    assert not torch.equal(rounded_N, exact_N)
    assert (rounded_N - exact_N).abs().mean() < 0.1


@each_energy
def test_training_an_energy_leaves_the_dropout_of_the_language_model_off(name: str) -> None:
    energy = toys.fresh_energy(name)
    assert not energy.network.training
    energy.network.train()
    assert not energy.language_model.model.training


def test_a_block_too_long_for_the_energy_is_refused() -> None:
    energy = energy_model("bit")
    assert isinstance(energy.network, TransformerEnergy)
    context = energy.network.backbone.config.max_position_embeddings
    with pytest.raises(UserError, match=f"at most {context}"):
        energy.energy(torch.full((1, context + 1), 3))


@pytest.mark.parametrize("name", ["bit", "bit_bpe"])
def test_a_context_too_short_for_real_blocks_is_refused_beforehand(name: str) -> None:
    energy = energy_model(name)
    assert isinstance(energy.network, TransformerEnergy)
    context = energy.network.backbone.config.max_position_embeddings
    bridge = energy._bridge
    assert bridge is not None
    ids_1T = torch.full((1, context + 1), 3)
    with pytest.raises(UserError, match=f"e.source = x: has a context of {context}, but a block"):
        bridge.check_context(ids_1T, torch.tensor([context + 1]), "e.source", "x")
    bridge.check_context(ids_1T[:, :6], torch.tensor([6]), "e.source", "x")


def test_a_sample_too_long_in_the_energys_tokens_loses_its_beginning_only() -> None:
    energy = energy_model("bit_bpe")
    assert isinstance(energy.network, TransformerEnergy)
    context = energy.network.backbone.config.max_position_embeddings
    block_T = torch.full((context + 1,), 3)
    other_start, other_end = block_T.clone(), block_T.clone()
    other_start[0], other_end[-1] = 5, 5
    plain, start, end = energy.energy(torch.stack([block_T, other_start, other_end])).tolist()
    assert plain == start
    assert plain != end


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_block_without_a_prefix_is_refused_by_heat(length: int) -> None:
    assert length <= toys.NUM_NEW
    with pytest.raises(UserError, match="prefix"):
        energy_model("heat").energy(torch.full((1, length), 3))


@pytest.mark.parametrize("blocks_per_prefix", [3, 6])  # one row, and two
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "qwen3", *WINDOWED])
def test_a_prefix_read_once_gives_the_same_energies_and_gradients(
    model_type: str, attention: str, blocks_per_prefix: int
) -> None:
    # A window as long as a block: several blocks in a row are longer.
    window = {"sliding_window": 7} if model_type in WINDOWED else {}
    backbone = toys.causal_model(model_type, **window).base_model
    backbone.set_attn_implementation(attention)
    network = TransformerEnergy(backbone)
    torch.nn.init.normal_(network.scalar.weight)
    draw = torch.Generator().manual_seed(0)
    prefix_GP = torch.randint(0, 7, (6 // blocks_per_prefix, 4), generator=draw)
    own_BC = torch.randint(0, 7, (6, 3), generator=draw)
    ids_BL = torch.cat([prefix_GP.repeat_interleave(blocks_per_prefix, 0), own_BC], dim=1)
    inputs = TextInputs(ids_BL, block_mask(ids_BL, torch.tensor([7, 5, 6, 7, 7, 5])))
    weight_B = torch.randn(6, generator=draw)

    def learnt(energy_B: Tensor) -> list[Tensor]:
        (energy_B * weight_B).sum().backward()
        gradients = [
            weight.grad.clone() for weight in network.parameters() if weight.grad is not None
        ]
        network.zero_grad()
        return [energy_B.detach(), *gradients]

    plain = learnt(network(inputs))
    packed = learnt(network.of_packed(inputs, 4, blocks_per_prefix))
    assert len(packed) == len(plain) > 5
    for one, other in zip(packed, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "calls"), [("unit", ["of_packed"]), ("bit", [])])
def test_only_a_causal_network_reads_a_prefix_once(
    monkeypatch: pytest.MonkeyPatch, name: str, calls: list[str]
) -> None:
    ids_NT, length_N = all_blocks()
    energy = energy_model(name)
    seen: list[str] = []
    of_packed = TransformerEnergy.of_packed

    def noting(*arguments: Any) -> Tensor:
        seen.append("of_packed")
        return of_packed(*arguments)

    monkeypatch.setattr(TransformerEnergy, "of_packed", noting)
    rows = slice(0, 12)
    shared = energy(ids_NT[rows], length_N[rows], blocks_per_prefix=4)
    assert seen == calls
    torch.testing.assert_close(shared, energy(ids_NT[rows], length_N[rows]), rtol=1e-4, atol=1e-4)
