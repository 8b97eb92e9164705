"""Learning rates are tried alike, the best trains to the end, and stopping loses nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from residual_ebm.config import TrainingConfig
from residual_ebm.errors import UserError
from residual_ebm.files.open_run import open_run
from residual_ebm.files.run_directory import RunDirectory, resume_folder
from residual_ebm.models.training import History
from residual_ebm.progress import QUIET
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages.learning_rates import num_steps
from residual_ebm.stages.training_run import train_in_run

RATES = [1e-6, 1e-2]  # the first hardly moves


def config(**changes: Any) -> TrainingConfig:
    settings = {
        "steps": 50,
        "batch_size": 1,
        "learning_rate": 1e-4,
        "other_learning_rates": RATES,
        "validate_every": 10,
        "checkpoint_every": 3,
        "precision": "float32",
    }
    return TrainingConfig(**{**settings, **changes})


class Task:
    """A linear map that has to learn to give 1."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(4, 1)
        self.first = {name: value.clone() for name, value in self.module.state_dict().items()}
        self.begun: list[Tensor] = []
        self.stop_after: int | None = None
        self.steps = 0

    def loss_at(self, step: int, _part: int = 0) -> Tensor:
        if step == 0:
            self.begun.append(self.module.weight.detach().clone())
        self.steps += 1
        if self.stop_after is not None and self.steps > self.stop_after:
            raise KeyboardInterrupt
        inputs = torch.ones(2, 4) * (step % 3 + 1)
        return (self.module(inputs) - 1).square().mean()

    def run(self, run_dir: RunDirectory, training: TrainingConfig) -> History:
        return train_in_run(
            run_dir,
            "train-lm",
            run_dir.language_model("toy"),
            self.module,
            training,
            block_length=6,
            tokens_per_item=1,
            loss_at=self.loss_at,
            validate=lambda: {"loss": self.loss_at(1).item()},
            seed=0,
            progress=QUIET,
        )


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    with open_run(tmp_path / "run", load_recipe("tiny")) as opened:
        return opened


def test_the_best_rate_trains_to_the_end(run_dir: RunDirectory) -> None:
    task = Task()
    history = task.run(run_dir, config())
    assert history.learning_rate == 1e-2
    assert [trial["learning_rate"] for trial in history.trials] == [1e-4, *RATES]
    losses = {trial["learning_rate"]: trial["loss"] for trial in history.trials}
    assert losses[1e-2] < losses[1e-4] < losses[1e-6]
    assert history.step == 50
    assert [entry["step"] for entry in history.validations] == [10, 20, 30, 40, 50]
    # Every trial, and the training itself, began with the first weights.
    assert len(task.begun) == 4
    assert all(torch.equal(weight, task.first["weight"]) for weight in task.begun)
    assert history.summary()["trials"] == history.trials


def test_trials_take_a_tenth_of_the_steps(run_dir: RunDirectory) -> None:
    Task().run(run_dir, config(steps=100))
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    last = {line["model"]: line["step"] for line in lines}
    assert num_steps(config(steps=100)) == 130
    assert num_steps(config(steps=100, other_learning_rates=[])) == 100
    assert last == {"toy-lr-0.0001": 10, "toy-lr-1e-06": 10, "toy-lr-0.01": 10, "toy": 100}


def test_a_trial_that_diverges_loses_and_ends_nothing(run_dir: RunDirectory) -> None:
    history = Task().run(run_dir, config(other_learning_rates=[1e30]))
    assert history.learning_rate == 1e-4
    assert [trial["loss"] is None for trial in history.trials] == [False, True]


def test_trials_that_all_diverge_are_told(run_dir: RunDirectory) -> None:
    with pytest.raises(UserError, match=r"training.learning_rate = .*lower them"):
        Task().run(run_dir, config(learning_rate=1e29, other_learning_rates=[1e30]))


def test_one_rate_is_not_tried(run_dir: RunDirectory) -> None:
    task = Task()
    history = task.run(run_dir, config(other_learning_rates=[]))
    assert history.trials == []
    assert history.learning_rate == 1e-4
    assert len(task.begun) == 1


@pytest.mark.parametrize("stop_after", [2, 8, 13, 30])
def test_stopped_at_any_moment_it_ends_the_same(run_dir: RunDirectory, stop_after: int) -> None:
    straight = Task()
    expected = straight.run(run_dir, config())
    weights = {name: value.clone() for name, value in straight.module.state_dict().items()}
    shutil.rmtree(resume_folder(run_dir.language_model("toy")))
    stopped = Task()
    stopped.stop_after = stop_after
    with pytest.raises(KeyboardInterrupt):
        stopped.run(run_dir, config())
    resumed = Task()
    history = resumed.run(run_dir, config())
    assert history.trials == expected.trials
    for name, value in resumed.module.state_dict().items():
        assert torch.equal(value, weights[name]), name
