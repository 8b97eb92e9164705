"""Residual energy-based models for text generation.

P(x | prefix) = P_LM(x | prefix) exp(-E(prefix, x)) / Z(prefix)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residual_ebm.errors import UserError
    from residual_ebm.estimation.importance import effective_sample_size
    from residual_ebm.estimation.nce import nce_loss
    from residual_ebm.estimation.partition import log_partition_bounds
    from residual_ebm.models.energy import EnergyModel
    from residual_ebm.models.joint import JointModel
    from residual_ebm.models.language_model import LanguageModel

__version__ = "0.1.0"

_HOMES = {
    "UserError": "errors",
    "EnergyModel": "models.energy",
    "JointModel": "models.joint",
    "LanguageModel": "models.language_model",
    "effective_sample_size": "estimation.importance",
    "log_partition_bounds": "estimation.partition",
    "nce_loss": "estimation.nce",
}

__all__ = [
    "EnergyModel",
    "JointModel",
    "LanguageModel",
    "UserError",
    "__version__",
    "effective_sample_size",
    "log_partition_bounds",
    "nce_loss",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `rebm recipes` should not wait for torch and transformers.
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'residual_ebm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"residual_ebm.{_HOMES[name]}"), name)
