"""Lightning's loggers, for runs that are killed and resumed, and for disks that fill up."""

import csv
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4
from weakref import WeakSet

import numpy as np
import torch
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard.summary import hparams

from unet3d.errors import (
    UsageError,
    describe_os_error,
    explain_missing_packages,
    summarize_error,
)
from unet3d.files import write_text
from unet3d.text import join_first
from unet3d.training.lightning_internals import (
    catch_write_errors,
    has_writer,
    set_purge_step,
)

FINAL_METRICS = ("final/dice", "final/hd95_mm", "final/peak_mib", "final/step_seconds")
"""Metrics by which runs are compared, logged after training."""


class ResumableTensorBoardLogger(TensorBoardLogger):
    """Hide the steps that a resumed run repeats, and drop events while the disk is full."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        is_new = not has_writer(self)
        writer = super().experiment
        if is_new:
            catch_write_errors(writer, lambda error: report_error(self, error))
        return writer

    def purge(self, step: int) -> None:
        """Hide events of earlier processes from `step` on."""
        set_purge_step(self, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Show hyperparameters from the start on: HParams also lists runs that never end."""
        experiment, session_start, _ = hparams(dict(params), dict.fromkeys(FINAL_METRICS, 0.0))
        for summary in (experiment, session_start):
            self.experiment.file_writer.add_summary(summary)

    @rank_zero_only
    def save(self) -> None:
        """Write what is in the queue; hparams.yaml is not written: a run has its config.yaml."""
        self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Stay open for the final metrics, which would start another event file."""
        if has_writer(self):
            self.save()


class ResumableCSVLogger(CSVLogger):
    """Continue metrics.csv when training is resumed, and drop rows while the disk is full.

    Lightning's logger deletes the table of an earlier process.
    """

    def __init__(self, save_dir: Path, name: str = "csv"):
        super().__init__(save_dir, name, version="")
        self.path = Path(self.log_dir, "metrics.csv")

    @rank_zero_only
    def purge(self, step: int) -> None:
        """Delete the rows from `step` on."""
        rows = []
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if int(row["step"]) < step]
        self.experiment.metrics = rows  # Lightning has deleted the file by now
        self.save()

    @rank_zero_only
    def save(self) -> None:
        """Append the rows since the last time."""
        size = self.path.stat().st_size if self.path.exists() else 0
        columns = list(self.experiment.metrics_keys)
        try:
            super().save()
        except OSError as error:
            self.experiment.metrics_keys = columns  # the table does not have new ones
            os.truncate(self.path, min(size, self.path.stat().st_size))  # no part of a row
            report_error(self, error)


class ResumableWandbLogger(WandbLogger):
    """Continue the same run of W&B when training is resumed: the run folder keeps its id."""

    def __init__(
        self,
        save_dir: Path,
        *,
        project: str,
        mode: Literal["offline", "online"] = "offline",
        entity: str | None = None,
        run_name: str | None = None,
    ):
        with explain_missing_packages("logger=wandb", "wandb"):
            from wandb import Settings
        self.id_file = Path(save_dir, "wandb", "run_id")
        super().__init__(
            name=run_name or Path(save_dir).resolve().name,
            save_dir=save_dir,
            id=read_id(self.id_file) or uuid4().hex,
            project=project,
            mode=mode,
            entity=entity,
            settings=Settings(silent=True, console="off"),
        )

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Set the config of the run, and keep its id."""
        super().log_hyperparams(params)
        write_text(self.id_file, str(self.version))


class ResumableMLFlowLogger(MLFlowLogger):
    """Continue the same run of MLflow when training is resumed: the run folder keeps its id.

    Metrics are sent in the background: a server that is away costs metrics, not the run.
    """

    def __init__(
        self,
        save_dir: Path,
        *,
        experiment: str,
        tracking_uri: str | None = None,
        run_name: str | None = None,
    ):
        folder = Path(save_dir).absolute()
        self.id_file = folder / "mlflow" / "run_id"
        uri = tracking_uri or f"sqlite:///{folder / 'mlflow.db'}"
        is_local = uri.startswith("sqlite:")
        with explain_missing_packages("logger=mlflow", "mlflow"):
            super().__init__(
                experiment,
                run_name or folder.resolve().name,
                tracking_uri=uri,
                artifact_location=(folder / "mlflow" / "artifacts").as_uri() if is_local else None,
                run_id=read_id(self.id_file),
                synchronous=False,
            )

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Set the parameters of the run, which a resumed one cannot change, and keep its id."""
        if not self.id_file.exists():
            super().log_hyperparams(params)
            self.id_file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.id_file, str(self.run_id))
        self.experiment.update_run(self.run_id, status="RUNNING")

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        with suppress_logging_errors(self):
            super().finalize(status)


def read_id(path: Path) -> str | None:
    """Return the id of the service's run that the folder's earlier processes logged to."""
    return path.read_text("utf-8") if path.exists() else None


def purge_logs(trainer: Trainer, step: int) -> None:
    """Drop what earlier processes logged from `step` on, where a logger can do that."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, ResumableTensorBoardLogger | ResumableCSVLogger):
            logger.purge(step)


def log_values(pl_module: LightningModule, values: Mapping[str, float], **options: Any) -> None:
    """Log plain numbers of a step, as tensors that stay on the CPU.

    Lightning would copy a number to the device and read it again, and the host would wait for it.
    """
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    pl_module.log_dict(tensors, **options)


def get_metric(metrics: Mapping[str, Any], name: str) -> float:
    """Return a metric that an option `monitor` names; say which there are if it is none of them."""
    if name not in metrics:
        known = join_first(sorted(key for key in metrics if key.startswith("val/")), limit=20)
        raise UsageError(f"monitor={name}: no such metric; a validation logs {known}")
    return float(metrics[name])


def log_image(logger: Logger, name: str, image: np.ndarray, step: int) -> None:
    """Show an RGB image (H, W, 3) of bytes, where a logger can do that."""
    from PIL import Image  # when the first one is drawn

    with suppress_logging_errors(logger):  # such as those of a server
        match logger:
            case TensorBoardLogger():
                logger.experiment.add_image(name, image, step, dataformats="HWC")
            case WandbLogger():
                logger.log_image(name, [image], step)
            case MLFlowLogger():
                logger.experiment.log_image(logger.run_id, image, f"images/{name}/{step}.png")
            case CSVLogger():
                path = Path(logger.log_dir, "images", name, f"{step}.png")
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(path)


def close_logger(logger: Logger, *, finished: bool) -> None:
    """End the log of a run after its final metrics, which come after Lightning's finalize()."""
    logger.finalize("success" if finished else "failed")
    match logger:
        case TensorBoardLogger():
            logger.experiment.close()
        case WandbLogger():  # or the next run of a sweep would log to this one
            logger.experiment.finish(exit_code=0 if finished else 1)


_reported = WeakSet[Logger]()  # loggers whose first error was printed


@contextmanager
def suppress_logging_errors(logger: Logger) -> Generator[None]:
    """Let training continue without what cannot be logged; the first error is printed."""
    try:
        yield
    except Exception as error:
        report_error(logger, error)


def report_error(logger: Logger, error: Exception) -> None:
    """Print why metrics are missing, once for a logger."""
    if logger not in _reported:
        _reported.add(logger)
        is_file = isinstance(error, OSError)
        reason = describe_os_error(error, logger.log_dir) if is_file else summarize_error(error)
        warn(f"some metrics were not logged; training continues: {reason}")


def warn(message: str) -> None:
    """Print to standard error, which works next to a progress bar and from a thread."""
    print(f"unet3d: {message}", file=sys.stderr)
