"""E(block): an energy network with everything needed to apply it to blocks of the LM's ids.

An energy belongs to the P_LM it was trained against: -E estimates log P_data - log P_LM, which
means nothing for another P_LM. Its folder remembers that LM's fingerprint and loading checks it.

Shapes: B blocks, T tokens of a block.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerFast

from residual_ebm.config import ContinuationMode, EnergyKind, HeadConfig, Precision, Recipe
from residual_ebm.errors import UserError
from residual_ebm.files.storage import (
    check_manifest,
    fingerprint,
    new_folder,
    read_json,
    write_json,
)
from residual_ebm.models.device import DTYPES, resolve_precision
from residual_ebm.models.energy_batches import encoder_batches, rows_at_once
from residual_ebm.models.energy_inputs import FULL_REGISTERS, TextBridge, TextInputs
from residual_ebm.models.energy_networks import HeadEnergy, TransformerEnergy
from residual_ebm.models.language_model import LanguageModel, TokenFeatures, continuation_mask
from residual_ebm.models.layer_states import check_layers
from residual_ebm.models.loading import context_length, load_pretrained, load_tokenizer
from residual_ebm.models.prefix_steps import can_share_prefix
from residual_ebm.models.quick_attention import quick_scoring
from residual_ebm.models.shared_prefix import prefix_batches
from residual_ebm.progress import QUIET, Progress

INFO = "energy.json"
_HEAD = "energy_head.safetensors"


@dataclass(frozen=True)
class EnergyInfo:
    """What an energy was trained on; outside of it results are flagged or refused."""

    name: str
    kind: EnergyKind | Literal["sum"]
    language_model: str  # fingerprint
    prefix_length: int
    block_length: int
    continuation: ContinuationMode
    head: dict[str, Any] | None = None


def energy_info(
    recipe: Recipe, name: str, kind: EnergyKind | Literal["sum"], language_model: LanguageModel
) -> EnergyInfo:
    """Of an energy that a recipe makes for a language model."""
    return EnergyInfo(
        name=name,
        kind=kind,
        language_model=language_model.fingerprint,
        prefix_length=recipe.block.prefix_length,
        block_length=recipe.block.length,
        continuation=recipe.block.continuation,
    )


class EnergyModel:
    """An energy over blocks of one language model's token ids; low is good."""

    def __init__(
        self,
        network: TransformerEnergy | HeadEnergy,
        info: EnergyInfo,
        language_model: LanguageModel,
        tokenizer: PreTrainedTokenizerFast | None = None,
    ) -> None:
        self.network = network.to(language_model.device).eval()
        self.info = info
        self.language_model = language_model
        self.tokenizer = tokenizer
        self.fingerprint = ""  # of the folder it came from
        self._bridge: TextBridge | None = None
        if isinstance(network, TransformerEnergy):
            assert tokenizer is not None
            self._bridge = TextBridge(
                language_model.tokenizer, tokenizer, context_length(network.backbone.config)
            )

    @classmethod
    def from_backbone(
        cls,
        backbone: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        info: EnergyInfo,
        language_model: LanguageModel,
    ) -> "EnergyModel":
        """UniT from a causal backbone, BiT from a bidirectional one; the scalar layer is new."""
        return cls(TransformerEnergy(backbone), info, language_model, tokenizer)

    @classmethod
    def new_head(
        cls, head: HeadConfig, info: EnergyInfo, language_model: LanguageModel
    ) -> "EnergyModel":
        """HeaT on top of a language model."""
        check_layers(language_model.model, head.layers, info.name)
        info = replace(info, head=head.model_dump())
        num_tokens = info.block_length - info.prefix_length
        network = HeadEnergy(language_model.hidden_size, num_tokens, head)
        return cls(network, info, language_model)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, language_model: LanguageModel, *, precision: Precision = "auto"
    ) -> "EnergyModel":
        """Load an energy for the language model it was trained against."""
        folder = Path(folder)
        if not (folder / INFO).is_file():
            raise UserError("energy", str(folder), f"is not an energy: it has no {INFO}")
        check_manifest(folder)
        info = EnergyInfo(**read_json(folder / INFO))
        if info.language_model != language_model.fingerprint:
            raise UserError(
                "energy",
                str(folder),
                "was trained against another language model; -E means nothing for this one: load"
                " the language model of the same run, or train the energy again",
            )
        if info.head is not None:
            energy = cls.new_head(HeadConfig(**info.head), info, language_model)
            energy.network.load_state_dict(load_file(folder / _HEAD))
        else:
            backbone = load_pretrained(AutoModel, str(folder), "energy", dtype=torch.float32)
            tokenizer = load_tokenizer(str(folder), "energy")
            energy = cls.from_backbone(backbone, tokenizer, info, language_model)
            energy.network.scalar.load_state_dict(load_file(folder / _HEAD))
        energy.network.to(DTYPES[resolve_precision(precision, language_model.device.type)])
        energy.fingerprint = fingerprint(folder)
        return energy

    def save_pretrained(self, folder: Path, training: dict[str, Any] | None = None) -> None:
        """An ordinary Hugging Face checkpoint of the backbone, and the energy's own files;
        `training` is what became of its training."""
        with new_folder(folder) as temporary:
            if isinstance(self.network, TransformerEnergy):
                assert self.tokenizer is not None
                self.network.backbone.save_pretrained(temporary)
                self.tokenizer.save_pretrained(temporary)
                weights = self.network.scalar.state_dict()
            else:
                weights = self.network.state_dict()
            save_file(
                {name: value.contiguous() for name, value in weights.items()}, temporary / _HEAD
            )
            write_json(temporary / INFO, asdict(self.info))
            write_json(temporary / "training.json", training or {})

    @property
    def state_layers(self) -> list[int]:
        """Layers of P_LM that are read beside the last one."""
        return list((self.info.head or {}).get("layers", []))

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())

    def __call__(
        self,
        ids_BT: Tensor,
        length_B: Tensor | None = None,
        prefix_length: int | None = None,
        *,
        blocks_per_prefix: int = 1,
    ) -> Tensor:
        """Energies with their graph, for training; positives and negatives take this one path.

        So many blocks that follow each other share a prefix: a causal network reads it once.
        """
        device = self.language_model.device
        if isinstance(self.network, HeadEnergy):
            if prefix_length is None:
                prefix_length = self.info.prefix_length
            self._check_continuation(ids_BT.shape[1], prefix_length)
            features = self.language_model.features(ids_BT, prefix_length, self.state_layers)
            mask_BC = continuation_mask(ids_BT, prefix_length, length_B).to(device)
            if torch.is_grad_enabled():
                # Inference tensors may not be saved for backward: of a frozen LM a copy is enough.
                features = TokenFeatures(*(part.clone() for part in features))
            return self.of_features(features, mask_BC)
        assert self._bridge is not None
        inputs = TextInputs(*(part.to(device) for part in self._bridge(ids_BT, length_B)))
        if blocks_per_prefix > 1 and self._reads_a_prefix_once(ids_BT.shape[1]):
            prefix_length = prefix_length or self.info.prefix_length
            if prefix_length < inputs.ids_BL.shape[1]:
                return self.network.of_packed(inputs, prefix_length, blocks_per_prefix)
        return cast(Tensor, self.network(inputs))

    def tokens_read(self, block_length: int, blocks_per_prefix: int) -> int | None:
        """How many tokens the network reads of a prefix and its continuations; None where texts
        of another vocabulary make that vary."""
        if self._bridge is not None and not self._bridge.same:
            return None
        repeated = 0
        if self._reads_a_prefix_once(block_length):
            repeated = (blocks_per_prefix - 1) * self.info.prefix_length
        return blocks_per_prefix * block_length - repeated

    def _reads_a_prefix_once(self, length: int) -> bool:
        return (
            self.info.kind == "unit"
            and self._bridge is not None
            and self._bridge.same
            and isinstance(self.network, TransformerEnergy)
            and can_share_prefix(self.network.backbone, length)
        )

    def of_features(self, features: TokenFeatures, mask_BC: Tensor) -> Tensor:
        """HeaT's energies of what P_LM computed."""
        assert isinstance(self.network, HeadEnergy)
        return cast(Tensor, self.network(features, mask_BC))

    def _check_continuation(self, num_tokens: int, prefix_length: int) -> None:
        """HeaT reads what follows the prefix: at least a token, at most its horizon."""
        horizon = self.info.block_length - self.info.prefix_length
        if not (prefix_length >= 1 and 1 <= num_tokens - prefix_length <= horizon):
            raise UserError(
                "block",
                f"{num_tokens} tokens with a prefix of {prefix_length}",
                f"this energy reads a prefix of 1 or more, then 1 to {horizon} tokens",
            )

    @torch.inference_mode()
    def energy(
        self,
        ids_BT: Tensor,
        length_B: Tensor | None = None,
        *,
        prefix_length: int | None = None,
        batch_size: int = 64,
        out_of: int | None = None,
        progress: Progress = QUIET,
    ) -> Tensor:
        """Energies of blocks, float32; `length_B` counts a block's tokens without padding, and
        `prefix_length` is for prefixes of another length than the energy was trained on. Who has
        many blocks and hands over some at a time may say `out_of` how many: a network that is to
        read much is made ready for it, which takes seconds."""
        energy_B = torch.empty(len(ids_BT), device=self.language_model.device)
        attention: AbstractContextManager[int] = nullcontext(FULL_REGISTERS)
        if self.info.kind == "bit":
            assert isinstance(self.network, TransformerEnergy)
            num_blocks = len(ids_BT) if out_of is None else out_of
            attention = quick_scoring(self.network, num_blocks * ids_BT.shape[1])
        with progress.bar("scoring", len(ids_BT)) as bar, attention as lengths_of:
            batches = self._batches(ids_BT, length_B, prefix_length, batch_size, lengths_of)
            for rows, part in batches:
                energy_B[rows] = part.float()
                bar.advance(len(part))
        return energy_B

    def _batches(
        self,
        ids_BT: Tensor,
        length_B: Tensor | None,
        prefix_length: int | None,
        batch_size: int,
        lengths_of: int,
    ) -> Iterator[tuple[Any, Tensor]]:
        """Energies of some blocks at a time, with where they belong."""
        device = self.language_model.device
        if self._bridge is not None and not self._bridge.same and len(ids_BT):
            for rows_B, inputs in encoder_batches(
                self._bridge, ids_BT, length_B, batch_size, device, lengths_of
            ):
                yield rows_B, self.network(TextInputs(*(part.to(device) for part in inputs)))
            return
        prefix_length = prefix_length or self.info.prefix_length
        num_blocks, length = ids_BT.shape
        batches: Iterable[slice]
        if self.info.kind == "bit":
            size = rows_at_once(batch_size, length, device)
            batches = (slice(start, start + size) for start in range(0, num_blocks, size))
        else:  # these gain from prefixes that blocks have in common
            batches = prefix_batches(ids_BT, prefix_length, batch_size)
        for rows in batches:
            lengths = None if length_B is None else length_B[rows]
            if self._reads_a_prefix_once(length):
                assert self._bridge is not None
                assert isinstance(self.network, TransformerEnergy)
                inputs = self._bridge(ids_BT[rows], lengths)
                inputs = TextInputs(*(part.to(device) for part in inputs))
                yield rows, self.network.after_prefix(inputs, prefix_length)
            else:
                yield rows, self(ids_BT[rows], lengths, prefix_length)
