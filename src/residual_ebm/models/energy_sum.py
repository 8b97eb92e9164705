"""Several energies added: what is read of a run by the name of an energy may be one, or a sum.

log P - log P_LM = -E, so energies of one language model add up to an energy of it.

Shapes: B blocks, T tokens of a block, M energies.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residual_ebm.config import Precision
from residual_ebm.errors import UserError
from residual_ebm.estimation.weighted_sum import WeightedSum
from residual_ebm.files.storage import check_manifest, checksum, new_folder, read_json, write_json
from residual_ebm.models.energy import INFO, EnergyInfo, EnergyModel
from residual_ebm.models.language_model import LanguageModel

_SUM = "sum.json"


class EnergySum:
    """An energy that is a weighted sum of others."""

    def __init__(
        self, info: EnergyInfo, members: Sequence[EnergyModel], weights: WeightedSum
    ) -> None:
        self.info = info
        self.members = list(members)
        self.weights = weights
        self.language_model = members[0].language_model
        self.fingerprint = ""

    @classmethod
    def from_pretrained(
        cls, folder: Path, language_model: LanguageModel, *, precision: Precision = "auto"
    ) -> "EnergySum":
        """The members lie beside the sum, and must be those it was made of."""
        check_manifest(folder)
        parts = read_json(folder / _SUM, has="members")
        members = []
        for part in parts["members"]:
            path = folder.parent / part["name"]
            member = EnergyModel.from_pretrained(path, language_model, precision=precision)
            if member.fingerprint != part["fingerprint"]:
                raise UserError(
                    "energy",
                    str(path),
                    f"is not what {folder.name} was made of; delete {folder} and run again",
                )
            members.append(member)
        weight_M = np.array([part["weight"] for part in parts["members"]])
        info = EnergyInfo(**read_json(folder / INFO))
        made = cls(info, members, WeightedSum(weight_M, parts["constant"]))
        made.fingerprint = checksum(folder / _SUM)
        return made

    def save_pretrained(self, folder: Path, training: dict[str, Any] | None = None) -> None:
        with new_folder(folder) as temporary:
            write_json(temporary / INFO, asdict(self.info))
            parts = [
                {
                    "name": member.info.name,
                    "weight": float(weight),
                    "fingerprint": member.fingerprint,
                }
                for member, weight in zip(self.members, self.weights.weight_M, strict=True)
            ]
            write_json(temporary / _SUM, {"members": parts, "constant": self.weights.constant})
            write_json(temporary / "training.json", training or {})

    @property
    def num_parameters(self) -> int:
        return sum(member.num_parameters for member in self.members)

    def energy(self, ids_BT: Tensor, length_B: Tensor | None = None, **options: Any) -> Tensor:
        """Energies of blocks, float32; the options are those of `EnergyModel.energy`."""
        energies = [member.energy(ids_BT, length_B, **options) for member in self.members]
        return self.of_members(torch.stack(energies, dim=1))

    def of_members(self, energy_BM: Tensor) -> Tensor:
        added_B = self.weights(energy_BM.double().cpu().numpy())
        return torch.from_numpy(added_B).float().to(energy_BM.device)


Energy = EnergyModel | EnergySum


def load_energy(
    folder: Path, language_model: LanguageModel, *, precision: Precision = "auto"
) -> Energy:
    """The energy in a folder of a run, or the sum of energies."""
    kind = EnergySum if (folder / _SUM).is_file() else EnergyModel
    return kind.from_pretrained(folder, language_model, precision=precision)
