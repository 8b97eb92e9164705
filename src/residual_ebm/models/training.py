"""One training loop for every loss: Adam, warm-up and cosine decay, clipping, resume to the bit.

What happens at a step depends on the seed and the step's number alone, so a run that is killed and
started again from its last checkpoint ends with the same weights as one that never stopped.
"""

import functools
import hashlib
import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor, nn

from residual_ebm.config import Precision, TrainingConfig
from residual_ebm.errors import UserError
from residual_ebm.files.storage import write_bytes
from residual_ebm.models.device import DTYPES, resolve_precision
from residual_ebm.models.quick_dropout import QuickDropout
from residual_ebm.progress import Progress
from residual_ebm.randomness import generator, torch_seed
from residual_ebm.stopping import when_asked_to_stop

_STATE = "state.safetensors"
DIVERGED = "training.learning_rate"  # the field to blame when a loss is no number
_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
_LOGGED_STEPS = 100  # lines a training leaves in metrics.jsonl, besides validations


@dataclass
class History:
    """Where a training stands; saved with the weights."""

    step: int = 0
    best_step: int = 0
    best_loss: float = math.inf
    validations: list[dict[str, float]] = field(default_factory=list)
    stopped_early: bool = False
    learning_rate: float | None = None
    trials: list[dict[str, Any]] = field(default_factory=list)  # of other learning rates

    def summary(self) -> dict[str, Any]:
        """What is worth keeping once the weights are saved."""
        return {
            "validations": self.validations,
            "best_step": self.best_step,
            "stopped_early": self.stopped_early,
            "learning_rate": self.learning_rate,
            "trials": self.trials,
        }

    def stale(self) -> int:
        """Validations since the best one."""
        return sum(entry["step"] > self.best_step for entry in self.validations)


@dataclass(frozen=True)
class TrainingLog:
    """Where numbers go: `write(step, values)`, and `rewind(step)` when a run resumes there."""

    write: Callable[[int, dict[str, float]], None]
    rewind: Callable[[int], None]


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """Linear warm-up, then half a cosine down to zero; `step` counts from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def batch_indices(
    num_items: int, batch_size: int, step: int, seed: int, purpose: str
) -> np.ndarray:
    """The items of a step: a new permutation each epoch, every item once in it."""
    taken: list[int] = []
    position = step * batch_size
    while len(taken) < batch_size:
        epoch, offset = divmod(position + len(taken), num_items)
        order = _epoch_order(num_items, seed, purpose, epoch)
        taken.extend(order[offset : offset + batch_size - len(taken)])
    return np.array(taken, dtype=np.int64)


@functools.lru_cache(maxsize=4)
def _epoch_order(num_items: int, seed: int, purpose: str, epoch: int) -> np.ndarray:
    return generator(seed, purpose, "epoch", epoch).permutation(num_items)


def autocast(precision: Precision, device: torch.device) -> Any:
    """Mixed precision: matrix products in bfloat16, weights and sums in float32."""
    resolved = resolve_precision(precision, device.type)
    if resolved == "float32":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[resolved])


def train(
    module: nn.Module,
    config: TrainingConfig,
    *,
    loss_at: Callable[[int, int], Tensor],
    validate: Callable[[], dict[str, float]],
    seed: int,
    folder: Path,
    log: TrainingLog,
    progress: Progress,
    label: str,
    dropout: bool = True,
    num_parts: int = 1,
) -> History:
    """Minimise the sum of `loss_at(step, part)` over the parts of a step's batch; leave the weights
    with the lowest validation `loss` in `module`.

    `folder` holds the state to resume from; the caller deletes it once the result is saved.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    device = next(iter(parameters.values())).device
    optimiser = torch.optim.AdamW(
        parameters.values(),
        lr=config.learning_rate,
        betas=config.adam_betas,
        weight_decay=config.weight_decay,
        fused=True,
    )
    history = _resume(folder, parameters, optimiser)
    log.rewind(history.step)
    log_every = max(1, config.steps // _LOGGED_STEPS)

    with (
        _interrupt_between_steps() as interrupted,
        progress.bar(label, config.steps, history.step) as bar,
    ):
        while history.step < config.steps and not history.stopped_early:
            step = history.step
            for group in optimiser.param_groups:
                group["lr"] = learning_rate_at(step, config)
            module.train(dropout)
            optimiser.zero_grad(set_to_none=True)
            loss = torch.zeros((), device=device)
            with torch_seed(seed, label, "dropout", step):
                for part in range(num_parts):
                    with autocast(config.precision, device), QuickDropout():
                        part_loss = loss_at(step, part)
                    part_loss.backward()
                    loss += part_loss.detach()
            if not torch.isfinite(loss):
                raise UserError(
                    DIVERGED,
                    config.learning_rate,
                    f"the loss of {label} became {loss.item()} at step {step}; lower it",
                )
            norm = nn.utils.clip_grad_norm_(parameters.values(), config.max_grad_norm)
            optimiser.step()
            history.step += 1
            bar.advance(note=f"loss {loss.item():.3f}")
            if history.step % log_every == 0:
                values = {
                    "train_loss": loss.item(),
                    "learning_rate": optimiser.param_groups[0]["lr"],
                    "grad_norm": norm.item(),
                }
                log.write(history.step, values)
            if history.step % config.validate_every == 0 or history.step == config.steps:
                _validate(module, validate, config, history, parameters, folder, log, label)
            if history.step % config.checkpoint_every == 0 or interrupted():
                _save(folder, parameters, optimiser, history)
            if interrupted():
                raise KeyboardInterrupt
    _load_best(folder, parameters, history)
    module.eval()
    return history


def _validate(
    module: nn.Module,
    validate: Callable[[], dict[str, float]],
    config: TrainingConfig,
    history: History,
    parameters: dict[str, nn.Parameter],
    folder: Path,
    log: TrainingLog,
    label: str,
) -> None:
    module.eval()
    device = next(iter(parameters.values())).device
    with torch.no_grad(), autocast(config.precision, device):
        values = validate()
    if not math.isfinite(values["loss"]):
        raise UserError(
            DIVERGED,
            config.learning_rate,
            f"the validation loss of {label} became {values['loss']} at step {history.step};"
            " lower it",
        )
    history.validations.append({"step": history.step, **values})
    log.write(history.step, {f"validation_{name}": value for name, value in values.items()})
    if values["loss"] < history.best_loss:
        history.best_loss, history.best_step = values["loss"], history.step
        if history.step < config.steps:  # the last ones are at hand
            _write_tensors(_best_path(folder, history.step), _copy(parameters), history)
    if config.patience is not None and history.stale() >= config.patience:
        history.stopped_early = True


def _best_path(folder: Path, step: int) -> Path:
    return folder / f"best-{step:07d}.safetensors"


def _copy(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu().contiguous() for name, parameter in parameters.items()}


def _save(
    folder: Path,
    parameters: dict[str, nn.Parameter],
    optimiser: torch.optim.Optimizer,
    history: History,
) -> None:
    tensors = {f"weight.{name}": value for name, value in _copy(parameters).items()}
    for name, parameter in parameters.items():
        # Empty for a parameter that no gradient has reached yet.
        for key, value in optimiser.state[parameter].items():
            tensors[f"{key}.{name}"] = value.cpu()
    _write_tensors(folder / _STATE, tensors, history)
    # The state names the best step, so older bests go only after it is on disk.
    for path in folder.glob("best-*.safetensors"):
        if path != _best_path(folder, history.best_step):
            path.unlink()


def _resume(
    folder: Path, parameters: dict[str, nn.Parameter], optimiser: torch.optim.Optimizer
) -> History:
    path = folder / _STATE
    if not path.is_file():
        return History()
    tensors, history = _read_tensors(path)
    _copy_into(parameters, {name: tensors.get(f"weight.{name}") for name in parameters}, path)
    for name, parameter in parameters.items():
        state = {key: tensors.get(f"{key}.{name}") for key in _ADAM_STATE}
        if state["step"] is not None:
            optimiser.state[parameter] = {
                key: value.to(parameter.device) for key, value in state.items() if value is not None
            }
    return history


def _load_best(folder: Path, parameters: dict[str, nn.Parameter], history: History) -> None:
    if history.best_step == history.step:
        return
    path = _best_path(folder, history.best_step)
    tensors, _ = _read_tensors(path)
    _copy_into(parameters, {name: tensors.get(name) for name in parameters}, path)


def _copy_into(
    parameters: dict[str, nn.Parameter], weights: Mapping[str, Tensor | None], path: Path
) -> None:
    for name, parameter in parameters.items():
        weight = weights[name]
        if weight is None or weight.shape != parameter.shape:
            raise _unreadable(path)
        with torch.no_grad():
            parameter.copy_(weight)


def _write_tensors(path: Path, tensors: dict[str, Tensor], history: History) -> None:
    metadata = {"history": json.dumps(history.__dict__), "digest": _digest(tensors)}
    write_bytes(path, serialise(tensors, metadata))


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], History]:
    """A checkpoint of ours; a damaged one is refused, it would go on to a wrong result."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            history = History(**json.loads(metadata["history"]))
    except (OSError, SafetensorError, ValueError, TypeError, KeyError):
        raise _unreadable(path) from None
    if _digest(tensors) != metadata.get("digest"):
        raise _unreadable(path)
    return tensors, history


def _unreadable(path: Path) -> UserError:
    reason = "cannot be read (missing, damaged or of another network)"
    return UserError("checkpoint", str(path), f"{reason}; delete {path.parent} to train anew")


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def forget_training(folder: Path) -> None:
    """Delete the resume state of a training whose result is saved."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _interrupt_between_steps() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C, and a scheduler's wish to stop, until the step under way is whole, so that it
    can be saved and resumed."""
    seen = threading.Event()
    with when_asked_to_stop(lambda *_: seen.set()):
        yield seen.is_set
