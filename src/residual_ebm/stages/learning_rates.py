"""A learning rate chosen on validation: each is tried for a tenth of the steps.

The trials begin with the same weights and see the same batches. They are part of the training they
are for: stopped in the middle, the same command goes on with the trial that was running.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from residual_ebm.config import TrainingConfig
from residual_ebm.errors import UserError
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.storage import read_json, write_json
from residual_ebm.models.training import DIVERGED, train
from residual_ebm.stages.training_log import training_log

_SHARE = 10


def choose_learning_rate(
    run_dir: RunDirectory,
    stage: str,
    name: str,
    module: nn.Module,
    config: TrainingConfig,
    folder: Path,
    **arguments: Any,
) -> tuple[TrainingConfig, list[dict[str, Any]]]:
    """The configuration with the best rate alone, and each rate's lowest validation loss.

    `module` is left as it was; `folder` keeps where the trials stand.
    """
    rates = [config.learning_rate, *config.other_learning_rates]
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in learning]
    trials: list[dict[str, Any]] = []
    for rate in rates:
        label = f"{name}-lr-{rate:g}"
        done = folder / f"{label}.json"
        if not done.exists():
            log = training_log(run_dir, stage, label)
            trial = _trial(config, rate)
            try:
                history = train(
                    module, trial, folder=folder / label, log=log, label=label, **arguments
                )
                loss = history.best_loss
            except UserError as error:
                if error.field != DIVERGED:
                    raise
                loss = None  # lost, as a trial may
            write_json(done, {"learning_rate": rate, "loss": loss})
            _copy(before, learning)
        trials.append(read_json(done, has="loss"))
    finished = [trial for trial in trials if trial["loss"] is not None]
    if not finished:
        raise UserError(DIVERGED, rates, f"the loss of {name} grew beyond all bounds; lower them")
    best = min(finished, key=lambda trial: trial["loss"])["learning_rate"]
    return _alone(config, best), trials


def num_steps(config: TrainingConfig) -> int:
    """Of a training and of the trials before it."""
    rates = [config.learning_rate, *config.other_learning_rates]
    trials = len(rates) * _trial(config, rates[0]).steps if config.other_learning_rates else 0
    return config.steps + trials


def _trial(config: TrainingConfig, rate: float) -> TrainingConfig:
    steps = max(1, config.steps // _SHARE)
    return _alone(config, rate).model_copy(
        update={
            "steps": steps,
            "warmup_steps": config.warmup_steps // _SHARE,
            "validate_every": min(config.validate_every, steps),
            "patience": None,
        }
    )


def _alone(config: TrainingConfig, rate: float) -> TrainingConfig:
    return config.model_copy(update={"learning_rate": rate, "other_learning_rates": []})


def _copy(source: list[torch.Tensor], target: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter, value in zip(target, source, strict=True):
            parameter.copy_(value)
