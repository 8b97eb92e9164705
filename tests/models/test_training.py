"""The training loop: its schedule, its batches, and that stopping it changes nothing.

Shapes: B items of a batch, F features.
"""

import errno
import itertools
import math
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from residual_ebm.config import TrainingConfig
from residual_ebm.errors import UserError
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.storage import write_bytes
from residual_ebm.models import training as loop
from residual_ebm.models.parts import parts_of, share_of
from residual_ebm.models.training import (
    History,
    TrainingLog,
    batch_indices,
    forget_training,
    learning_rate_at,
    train,
)
from residual_ebm.progress import QUIET
from residual_ebm.randomness import torch_seed
from residual_ebm.stages.training_log import training_log

NUM_ITEMS, NUM_FEATURES = 50, 6
STATE = "state.safetensors"


def training(**changes: Any) -> TrainingConfig:
    settings: dict[str, Any] = {
        "steps": 12,
        "batch_size": 8,
        "learning_rate": 0.05,
        "warmup_steps": 3,
        "weight_decay": 0.01,
        "precision": "float32",
        "validate_every": 5,
        "checkpoint_every": 4,
    }
    return TrainingConfig(**{**settings, **changes})


class Killed(BaseException):
    """The process ends here: nothing after it runs, nothing is saved."""


class Task:
    """A regression by a small network with dropout, trained by the real loop."""

    def __init__(self, config: TrainingConfig, folder: Path, dropout: float = 0.3) -> None:
        with torch_seed(0, "task"):
            self.network = nn.Sequential(
                nn.Linear(NUM_FEATURES, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 1)
            )
            self.feature_BF = torch.randn(NUM_ITEMS, NUM_FEATURES)
            self.target_B = self.feature_BF[:, 0] * self.feature_BF[:, 1]
        self.config = config
        self.folder = folder
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.before_loss: Callable[[int], None] = lambda _: None

    def loss_at(self, step: int, part: int) -> Tensor:
        if part == 0:
            self.before_loss(step)
        chosen = torch.from_numpy(batch_indices(NUM_ITEMS, self.config.batch_size, step, 0, "task"))
        rows = parts_of(self.config, 1)[part]
        loss = self._loss(self.feature_BF[chosen[rows]], self.target_B[chosen[rows]])
        return loss * share_of(rows, self.config)

    def validate(self) -> dict[str, float]:
        return {"loss": self._loss(self.feature_BF, self.target_B).item()}

    def _loss(self, feature_BF: Tensor, target_B: Tensor) -> Tensor:
        return (self.network(feature_BF)[:, 0].float() - target_B).square().mean()

    def rewind(self, step: int) -> None:
        self.logged = [(at, values) for at, values in self.logged if at <= step]

    def train(self, **changes: Any) -> History:
        arguments: dict[str, Any] = {
            "loss_at": self.loss_at,
            "validate": self.validate,
            "seed": 0,
            "folder": self.folder,
            "log": TrainingLog(lambda *entry: self.logged.append(entry), self.rewind),
            "progress": QUIET,
            "label": "task",
            "num_parts": len(parts_of(self.config, 1)),
        }
        return train(self.network, self.config, **{**arguments, **changes})

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.network.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def do_at(step: int, action: Callable[[], None]) -> Callable[[int], None]:
    def before_loss(number: int) -> None:
        if number == step:
            action()

    return before_loss


def kill() -> None:
    raise Killed


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def press_control_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


VARIANTS = {
    "dropout": (training(), 0.3),
    "no dropout": (training(), 0.0),
    "bfloat16": (training(precision="bfloat16"), 0.3),
    "sparse checkpoints": (training(checkpoint_every=5, validate_every=2), 0.3),
    "patience": (
        training(validate_every=1, checkpoint_every=1, patience=2, learning_rate=0.5),
        0.3,
    ),
}


@pytest.fixture(params=list(VARIANTS))
def make_task(request: pytest.FixtureRequest) -> Callable[[Path], Task]:
    config, dropout = VARIANTS[request.param]
    return lambda folder: Task(config, folder, dropout)


# The schedule


def test_learning_rate_warms_up_and_decays_to_zero() -> None:
    config = training(steps=100, warmup_steps=10, learning_rate=2.0)
    rates = [learning_rate_at(step, config) for step in range(100)]
    np.testing.assert_allclose(rates[:10], 0.2 * np.arange(1, 11))
    assert rates[10] == 2.0
    assert (np.diff(rates[10:]) < 0).all()
    assert learning_rate_at(55, config) == pytest.approx(1.0)
    assert learning_rate_at(100, config) == pytest.approx(0.0, abs=1e-12)
    # Half a cosine: quarter way down the rate has fallen by (1 - cos(pi / 4)) / 2 of it.
    assert learning_rate_at(10 + 90 // 4, config) == pytest.approx(
        1 + math.cos(math.pi * 22 / 90), rel=1e-12
    )


@example(10, 5, 0)
@given(st.integers(1, 50), st.integers(0, 80), st.integers(0, 120))
def test_learning_rate_is_positive_up_to_its_peak(steps: int, warmup: int, step: int) -> None:
    config = training(steps=steps, warmup_steps=warmup, learning_rate=0.5)
    rate = learning_rate_at(step, config)
    assert 0 <= rate <= 0.5
    if step < steps:
        assert rate > 0, "every step of a training teaches something"


def test_no_warmup_starts_at_the_peak() -> None:
    assert learning_rate_at(0, training(warmup_steps=0)) == 0.05


@given(st.integers(1, 20), st.integers(1, 50), st.integers(1, 4))
def test_every_item_once_an_epoch(num_items: int, batch_size: int, num_epochs: int) -> None:
    steps = math.ceil(num_epochs * num_items / batch_size)
    batches = [batch_indices(num_items, batch_size, step, 0, "test") for step in range(steps)]
    assert all(len(batch) == batch_size for batch in batches)
    taken = np.concatenate(batches)
    for epoch in range(num_epochs):
        assert Counter(taken[epoch * num_items : (epoch + 1) * num_items]) == Counter(
            range(num_items)
        )


def test_epochs_have_their_own_order() -> None:
    first, second = (batch_indices(30, 30, step, 0, "test").tolist() for step in range(2))
    assert first != second
    assert first != list(range(30))


def test_batches_are_keyed_by_seed_and_purpose() -> None:
    batch = batch_indices(1000, 10, 7, 1, "lm").tolist()
    assert batch_indices(1000, 10, 7, 1, "lm").tolist() == batch
    assert batch_indices(1000, 10, 7, 2, "lm").tolist() != batch
    assert batch_indices(1000, 10, 7, 1, "energy").tolist() != batch


# Stopped and resumed


def test_killed_at_any_step_ends_the_same(
    tmp_path: Path, make_task: Callable[[Path], Task]
) -> None:
    whole = make_task(tmp_path / "whole")
    history = whole.train()
    for step in range(history.step):
        stopped = make_task(tmp_path / f"stopped-{step}")
        stopped.before_loss = do_at(step, kill)
        with pytest.raises(Killed):
            stopped.train()
        resumed = make_task(stopped.folder)
        resumed.logged = stopped.logged
        assert asdict(resumed.train()) == asdict(history)
        assert_same(resumed.weights(), whole.weights())
        assert resumed.logged == whole.logged


@pytest.mark.parametrize("written", [False, True])
def test_killed_at_any_write_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """Between a best and the state that names it, and on either side of a state."""

    def make_task(folder: Path) -> Task:
        return Task(training(validate_every=2, checkpoint_every=4), folder)

    whole = make_task(tmp_path / "whole")
    history = whole.train()
    names: list[str] = []
    for number in itertools.count():
        stopped = make_task(tmp_path / f"stopped-{number}")
        monkeypatch.setattr(loop, "write_bytes", killed_at_write(number, written, names))
        try:
            stopped.train()
            break
        except Killed:
            pass
        monkeypatch.undo()
        resumed = make_task(stopped.folder)
        assert asdict(resumed.train()) == asdict(history)
        assert_same(resumed.weights(), whole.weights())
    assert {name.partition("-")[0] for name in names} == {"best", STATE}
    assert number > 3


def killed_at_write(number: int, written: bool, names: list[str]) -> Callable[[Path, bytes], None]:
    """`write_bytes`, up to the write of this number, which kills before or after it is done."""
    count = itertools.count()

    def write(path: Path, data: bytes) -> None:
        last = next(count) == number
        if written or not last:
            write_bytes(path, data)
        if last:
            names.append(path.name)
            raise Killed

    return write


@pytest.mark.parametrize("step", range(12))
def test_control_c_saves_and_ends_the_same(tmp_path: Path, step: int) -> None:
    """Also where no checkpoint is due: the step under way is kept, not lost."""
    whole = Task(training(checkpoint_every=100), tmp_path / "whole")
    history = whole.train()
    stopped = Task(training(checkpoint_every=100), tmp_path / "stopped")
    stopped.before_loss = do_at(step, press_control_c)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert (stopped.folder / STATE).is_file()

    resumed = Task(training(checkpoint_every=100), stopped.folder)
    first_step: list[int] = []
    resumed.before_loss = first_step.append
    assert asdict(resumed.train()) == asdict(history)
    assert first_step[:1] == [step + 1][: 11 - step], "what was done is not done again"
    assert_same(resumed.weights(), whole.weights())


def test_control_c_in_a_validation_is_held_until_it_is_saved(tmp_path: Path) -> None:
    whole = Task(training(checkpoint_every=100), tmp_path / "whole")
    history = whole.train()
    stopped = Task(training(checkpoint_every=100), tmp_path / "stopped")

    def validate() -> dict[str, float]:
        press_control_c()
        return stopped.validate()

    with pytest.raises(KeyboardInterrupt):
        stopped.train(validate=validate)
    resumed = Task(training(checkpoint_every=100), stopped.folder)
    validations = 0

    def count_and_validate() -> dict[str, float]:
        nonlocal validations
        validations += 1
        return resumed.validate()

    resumed_history = resumed.train(validate=count_and_validate)
    assert validations == len(history.validations) - 1
    assert asdict(resumed_history) == asdict(history)
    assert_same(resumed.weights(), whole.weights())


def test_control_c_works_again_after_training(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    Task(training(), tmp_path).train()
    assert signal.getsignal(signal.SIGINT) is before
    stopped = Task(training(), tmp_path / "stopped")
    stopped.before_loss = do_at(0, kill)
    with pytest.raises(Killed):
        stopped.train()
    assert signal.getsignal(signal.SIGINT) is before


def test_training_in_another_thread(tmp_path: Path) -> None:
    """Only the main thread may listen to Ctrl-C; a notebook's worker trains all the same."""
    whole, other = Task(training(), tmp_path / "whole"), Task(training(), tmp_path / "other")
    whole.train()
    thread = threading.Thread(target=other.train)
    thread.start()
    thread.join()
    assert_same(other.weights(), whole.weights())


def test_training_ignores_and_leaves_the_global_generator(tmp_path: Path) -> None:
    weights = []
    for seed in range(2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        task = Task(training(), tmp_path / str(seed))
        task.train()
        assert torch.equal(torch.get_rng_state(), before)
        weights.append(task.weights())
    assert_same(*weights)


def test_parameter_that_is_not_always_used(tmp_path: Path) -> None:
    """A mixture of experts leaves some parameters without a gradient at some steps, or at all."""

    class Sometimes(Task):
        def __init__(self, folder: Path) -> None:
            super().__init__(training(checkpoint_every=1), folder)
            self.network.register_parameter("sometimes", nn.Parameter(torch.ones(1)))
            self.network.register_parameter("never", nn.Parameter(torch.ones(1)))

        def loss_at(self, step: int, part: int) -> Tensor:
            loss = super().loss_at(step, part)
            return loss + self.network.get_parameter("sometimes").sum() if step in (3, 8) else loss

    whole = Sometimes(tmp_path / "whole")
    whole.train()
    stopped = Sometimes(tmp_path / "stopped")
    stopped.before_loss = do_at(6, kill)
    with pytest.raises(Killed):
        stopped.train()
    resumed = Sometimes(stopped.folder)
    resumed.train()
    assert_same(resumed.weights(), whole.weights())


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    task = Task(training(), tmp_path)
    frozen = task.network.get_parameter("0.weight").requires_grad_(False)
    before = frozen.clone()
    task.train()
    assert torch.equal(frozen, before)


# What is left


def test_best_weights_are_left(tmp_path: Path) -> None:
    """The validation losses are made up, so the best is known and is not the last."""
    losses = iter([3.0, 1.0, 2.0])
    seen: list[dict[str, Tensor]] = []
    task = Task(training(steps=12, validate_every=4), tmp_path)

    def validate() -> dict[str, float]:
        assert not task.network.training, "dropout is off outside training"
        assert not torch.is_grad_enabled()
        seen.append(task.weights())
        return {"loss": next(losses)}

    history = task.train(validate=validate)
    assert (history.best_step, history.best_loss, history.step) == (8, 1.0, 12)
    assert_same(task.weights(), seen[1])
    assert not torch.equal(seen[1]["0.weight"], seen[2]["0.weight"])
    assert not task.network.training


def test_first_of_equal_bests_is_kept(tmp_path: Path) -> None:
    task = Task(training(validate_every=4), tmp_path)
    assert task.train(validate=lambda: {"loss": 1.0}).best_step == 4


def test_the_last_step_is_validated(tmp_path: Path) -> None:
    history = Task(training(steps=12, validate_every=5), tmp_path).train()
    assert [entry["step"] for entry in history.validations] == [5, 10, 12]


def test_training_learns(tmp_path: Path) -> None:
    task = Task(training(steps=300, validate_every=100, checkpoint_every=100), tmp_path, 0.0)
    before = task.validate()["loss"]
    history = task.train()
    assert task.validate()["loss"] == pytest.approx(history.best_loss)
    assert history.best_loss < before / 4


@pytest.mark.parametrize(
    ("losses", "patience", "last_step", "stops"),
    [
        ([3, 1, 2, 2, 0, 0], 2, 4, True),
        ([3, 1, 2, 0, 2, 2], 2, 6, True),
        ([3, 1, 1, 1, 0, 0], 2, 4, True),  # equal is no improvement
        ([6, 5, 4, 3, 2, 1], 1, 6, False),
        ([1, 2, 3, 4, 5, 6], None, 6, False),
    ],
)
def test_patience(
    tmp_path: Path, losses: list[float], patience: int | None, last_step: int, stops: bool
) -> None:
    coming = iter(losses)
    task = Task(training(steps=6, validate_every=1, patience=patience), tmp_path)
    history = task.train(validate=lambda: {"loss": float(next(coming))})
    assert (history.step, history.stopped_early) == (last_step, stops)
    assert history.best_step == 1 + losses.index(min(losses[:last_step]))


def test_gradients_are_clipped(tmp_path: Path) -> None:
    """With a norm of nearly nothing and Adam's epsilon above it, the weights hardly move."""
    task = Task(training(max_grad_norm=1e-12, weight_decay=0.0), tmp_path)
    before = task.weights()
    task.train()
    for name, value in task.weights().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-3)


def test_a_batch_in_parts_trains_the_same(tmp_path: Path) -> None:
    whole = Task(training(), tmp_path / "whole", dropout=0.0)
    whole.train()
    parts = Task(training(tokens_at_once=3), tmp_path / "parts", dropout=0.0)
    parts.train()
    for name, value in parts.weights().items():
        torch.testing.assert_close(value, whole.weights()[name], rtol=1e-3, atol=1e-4)
    losses = [
        [values["train_loss"] for _, values in task.logged if "train_loss" in values]
        for task in (whole, parts)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_each_part_drops_out_by_itself(tmp_path: Path) -> None:
    """The seed is set once a step: parts with the same numbers would drop the same places."""
    task = Task(training(steps=1, tokens_at_once=4), tmp_path, dropout=0.5)
    drawn: list[Tensor] = []

    def loss_at(_step: int, _part: int) -> Tensor:
        drawn.append(task.network[2](torch.ones(64)))
        return task.network(task.feature_BF).square().mean()

    task.train(loss_at=loss_at)
    assert len(drawn) == 2
    assert not torch.equal(*drawn)


def test_each_step_has_its_learning_rate(tmp_path: Path) -> None:
    task = Task(training(), tmp_path)
    task.train()
    logged = [values["learning_rate"] for _, values in task.logged if "learning_rate" in values]
    assert logged == [learning_rate_at(step, task.config) for step in range(12)]


# What can go wrong


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite_is_a_user_error(tmp_path: Path, value: float) -> None:
    task = Task(training(), tmp_path)
    with pytest.raises(UserError, match=r"training\.learning_rate = 0\.05") as caught:
        task.train(
            loss_at=lambda step, part: task.loss_at(step, part) * (value if step == 7 else 1)
        )
    assert "at step 7" in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_validation_that_is_never_finite_is_a_user_error(tmp_path: Path, value: float) -> None:
    with pytest.raises(UserError, match=f"loss.*{value}"):
        Task(training(), tmp_path).train(validate=lambda: {"loss": value})


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_broken_state_is_a_user_error(tmp_path: Path, kept: int) -> None:
    Task(training(), tmp_path).train()
    state = tmp_path / STATE
    state.write_bytes(state.read_bytes()[:kept])
    with pytest.raises(UserError) as caught:
        Task(training(), tmp_path).train()
    assert str(state) in str(caught.value)
    assert f"delete {tmp_path}" in str(caught.value)


def test_state_of_another_network_is_a_user_error(tmp_path: Path) -> None:
    Task(training(), tmp_path).train()
    other = Task(training(), tmp_path)
    other.network[0] = nn.Linear(NUM_FEATURES, 9)
    with pytest.raises(UserError, match="cannot be read"):
        other.train()


@pytest.mark.parametrize("fault", ["missing", "truncated"])
def test_broken_best_is_a_user_error(tmp_path: Path, fault: str) -> None:
    losses = iter([1.0, 2.0, 3.0])
    Task(training(), tmp_path).train(validate=lambda: {"loss": next(losses)})
    (best,) = tmp_path.glob("best-*.safetensors")
    if fault == "missing":
        best.unlink()
    else:
        best.write_bytes(best.read_bytes()[:-1])
    with pytest.raises(UserError):
        Task(training(), tmp_path).train()


@pytest.mark.parametrize("best_at", [5, 10, 12])
def test_a_finished_training_resumed_ends_with_its_best_weights(
    tmp_path: Path, best_at: int
) -> None:
    """The last ones are in the state, and nowhere else."""

    def trained() -> Task:
        losses = iter([0.0 if step == best_at else 1.0 for step in (5, 10, 12)])
        task = Task(training(checkpoint_every=12), tmp_path)
        history = task.train(validate=lambda: {"loss": next(losses)})
        assert history.best_step == best_at
        return task

    first = trained()
    bests = [path.name for path in tmp_path.glob("best-*")]
    assert bests == ([] if best_at == 12 else [f"best-{best_at:07d}.safetensors"])
    assert_same(trained().weights(), first.weights())


def test_full_disk_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Task(training(), tmp_path / "whole")
    whole.train()

    stopped = Task(training(), tmp_path / "stopped")
    stopped.before_loss = do_at(6, lambda: monkeypatch.setattr(os, "fsync", full_disk))
    with pytest.raises(UserError, match="disk is full"):
        stopped.train()
    monkeypatch.undo()
    resumed = Task(training(), stopped.folder)
    resumed.train()
    assert_same(resumed.weights(), whole.weights())


@pytest.mark.parametrize("call", ["__init__", "flush"])
def test_full_disk_under_the_curves_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """TensorBoard's event files fill the disk as well as ours do."""
    log = training_log(RunDirectory(tmp_path), "train-lm", "base")
    monkeypatch.setattr(SummaryWriter, call, full_disk)
    with pytest.raises(UserError, match="disk is full"):  # noqa: PT012
        log.rewind(0)
        log.write(1, {"train_loss": 1.0})


def test_finished_training_is_not_run_again(tmp_path: Path) -> None:
    task = Task(training(checkpoint_every=12), tmp_path)
    history = deepcopy(task.train())
    again = Task(training(checkpoint_every=12), tmp_path)
    again.before_loss = lambda step: pytest.fail(f"step {step} was run again")
    assert asdict(again.train()) == asdict(history)
    assert_same(again.weights(), task.weights())


def test_one_state_and_one_best_are_kept(tmp_path: Path) -> None:
    """A folder of a long training does not fill the disk with bests that were beaten."""
    losses = iter([*range(100, 89, -1), 1000])
    task = Task(training(validate_every=1, checkpoint_every=3), tmp_path)
    task.train(validate=lambda: {"loss": float(next(losses))})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best-0000011.safetensors",
        STATE,
    ]


def test_forgotten_training_starts_anew(tmp_path: Path) -> None:
    task = Task(training(), tmp_path / "training")
    task.train()
    forget_training(task.folder)
    assert not task.folder.exists()
    forget_training(task.folder)
    steps: list[int] = []
    again = Task(training(), task.folder)
    again.before_loss = steps.append
    again.train()
    assert steps == list(range(12))
    shutil.rmtree(task.folder)
