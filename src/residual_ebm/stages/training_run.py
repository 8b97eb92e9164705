"""What the training stages share: a run of `train` in its place, and architectures by name."""

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError, StrictDataclassFieldValidationError
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from residual_ebm.config import TrainingConfig
from residual_ebm.errors import UserError
from residual_ebm.files.run_directory import RunDirectory, resume_folder
from residual_ebm.models.compiled import compiled_training
from residual_ebm.models.loading import context_length, train_every_embedding
from residual_ebm.models.quick_attention import quick_backward
from residual_ebm.models.training import History, train
from residual_ebm.stages.learning_rates import choose_learning_rate
from residual_ebm.stages.training_log import training_log

# Read by transformers from the model's name, not from the architecture a recipe gives.
_OWN_KEYS = {"model_type"}
# What transformers and torch raise, depending on the model, for sizes that do not go together.
_IMPOSSIBLE = (
    TypeError,
    ValueError,
    LookupError,
    RuntimeError,
    ArithmeticError,
    AttributeError,
    AssertionError,
)


def train_in_run(
    run_dir: RunDirectory,
    stage: str,
    result: Path,
    module: nn.Module,
    config: TrainingConfig,
    *,
    block_length: int,
    tokens_per_item: int | None,
    **arguments: Any,
) -> History:
    """`train`, with its resume state beside `result` and its numbers among those of the run; a
    learning rate is chosen first where there is a choice. `tokens_per_item` says how much a network
    reads for one item of a batch, None where that varies."""
    folder, name = resume_folder(result), result.name
    trials: list[dict[str, Any]] = []
    # Shapes that vary would be compiled again and again, and differently after an interruption.
    num_tokens = config.steps * config.batch_size * (tokens_per_item or 0)
    dropout = arguments.get("dropout", True)
    attention = quick_backward(module, block_length)
    with attention, compiled_training(module, num_tokens, dropout=dropout):
        if config.other_learning_rates:
            config, trials = choose_learning_rate(
                run_dir, stage, name, module, config, folder / "trials", **arguments
            )
        log = training_log(run_dir, stage, name)
        history = train(module, config, folder=folder, log=log, label=name, **arguments)
    history.learning_rate, history.trials = config.learning_rate, trials
    return history


def impossible_architecture(
    field: str, architecture: dict[str, Any], error: Exception
) -> UserError:
    """Settings that are right one by one and do not go together."""
    sizes = ", ".join(f"{key} {value}" for key, value in architecture.items())
    reason = str(error.__cause__ or error)
    return UserError(field, f"{{{sizes}}}", f"cannot be built ({reason}); change it")


def build_model(
    auto_class: Any, config: Any, field: str, architecture: dict[str, Any]
) -> PreTrainedModel:
    """A model with new weights; some sizes are only checked when its layers are made."""
    try:
        model: PreTrainedModel = auto_class.from_config(config)
    except _IMPOSSIBLE as error:
        raise impossible_architecture(field, architecture, error) from None
    train_every_embedding(model)
    return model


def check_context(model: PreTrainedModel, num_tokens: int, field: str, source: str) -> None:
    """A pretrained model must be able to read a whole block."""
    context = context_length(model.config)
    if context is not None and context < num_tokens:
        raise UserError(
            field,
            source,
            f"has a context of {context}, but blocks have {num_tokens} tokens; lower block.length",
        )


def _check_setting(model_type: str, key: str, value: Any, field: str) -> None:
    """Transformers checks types one by one, so that a wrong one can be named."""
    if key.startswith("num_") and isinstance(value, int) and value < 1:
        raise UserError(f"{field}.{key}", value, "must be at least 1")
    try:
        AutoConfig.for_model(model_type, **{key: value})
    except StrictDataclassFieldValidationError as error:
        reason = str(error.__cause__ or error)
        raise UserError(f"{field}.{key}", value, f"cannot be used: {reason}") from None
    except (*_IMPOSSIBLE, StrictDataclassError):
        return  # wrong only beside the defaults of the others


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
        if key in fixed:
            raise UserError(f"{field}.{key}", value, "comes from the tokenizer; remove it")
        if key not in _OWN_KEYS and not hasattr(known, key):
            raise UserError(f"{field}.{key}", value, f"{model_type} has no such setting; remove it")
        if key not in _OWN_KEYS:
            _check_setting(model_type, key, value, field)
    arguments = {key: value for key, value in architecture.items() if key not in _OWN_KEYS}
    try:
        config = AutoConfig.for_model(model_type, **arguments, **fixed)
    except (*_IMPOSSIBLE, StrictDataclassError) as error:
        raise impossible_architecture(field, architecture, error) from None
    context = context_length(config)
    if context is not None and context < min_length:
        raise UserError(
            f"{field}.max_position_embeddings",
            config.max_position_embeddings,
            f"blocks have {min_length} tokens; raise it to that or more",
        )
    return config
