"""Where the numbers of a training go."""

from torch.utils.tensorboard import SummaryWriter

from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.storage import disk_errors
from residual_ebm.models.training import TrainingLog


def training_log(run_dir: RunDirectory, stage: str, model: str) -> TrainingLog:
    """Numbers go to metrics.jsonl and to TensorBoard event files."""
    writers: dict[str, SummaryWriter] = {}

    def rewind(step: int) -> None:
        run_dir.forget_metrics_after(stage, model, step)
        folder = run_dir.tensorboard / f"{stage}-{model}"
        with disk_errors(folder):
            writers["events"] = SummaryWriter(str(folder), purge_step=step + 1)

    def write(step: int, values: dict[str, float]) -> None:
        run_dir.log_metrics(stage, model, step, values)
        with disk_errors(run_dir.tensorboard):
            for name, value in values.items():
                writers["events"].add_scalar(name, value, step)
            writers["events"].flush()

    return TrainingLog(write, rewind)
