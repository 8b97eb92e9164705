"""What the training stages share: where numbers and resume states go, and architectures by name."""

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from transformers import AutoConfig

from residual_ebm.errors import UserError
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.models.training import TrainingLog

# Read by transformers from the model's name, not from the architecture a recipe gives.
_OWN_KEYS = {"model_type"}


def resume_folder(result: Path) -> Path:
    """Beside the folder of the finished model; gone once that exists."""
    return result.with_name(f"{result.name}.training")


def training_log(run_dir: RunDirectory, stage: str, model: str) -> TrainingLog:
    """Numbers go to metrics.jsonl and to TensorBoard event files."""
    writers: dict[str, SummaryWriter] = {}

    def rewind(step: int) -> None:
        run_dir.forget_metrics_after(stage, model, step)
        folder = run_dir.tensorboard / f"{stage}-{model}"
        writers["events"] = SummaryWriter(str(folder), purge_step=step + 1)

    def write(step: int, values: dict[str, float]) -> None:
        run_dir.log_metrics(stage, model, step, values)
        for name, value in values.items():
            writers["events"].add_scalar(name, value, step)
        writers["events"].flush()

    return TrainingLog(write, rewind)


def build_architecture(
    architecture: dict[str, Any], field: str, min_length: int, **fixed: Any
) -> Any:
    """A transformers configuration; a key its model type does not know is refused."""
    model_type = architecture.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{field}.model_type", model_type, "name a transformers model, e.g. llama")
    try:
        known = AutoConfig.for_model(model_type)
    except ValueError:
        raise UserError(
            f"{field}.model_type", model_type, "unknown to transformers; try llama, gpt2 or bert"
        ) from None
    for key, value in architecture.items():
        if key not in _OWN_KEYS and not hasattr(known, key):
            raise UserError(f"{field}.{key}", value, f"{model_type} has no such setting; remove it")
    arguments = {key: value for key, value in architecture.items() if key not in _OWN_KEYS}
    config = AutoConfig.for_model(model_type, **arguments, **fixed)
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and context < min_length:
        raise UserError(
            f"{field}.max_position_embeddings",
            context,
            f"blocks have {min_length} tokens; raise it to that or more",
        )
    return config
