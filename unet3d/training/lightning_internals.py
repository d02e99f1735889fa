"""The private names of Lightning and TensorBoard that we use, each behind one function.

They were read in lightning 2.6.6, torch 2.13 (torch.utils.tensorboard) and tensorboard 2.21. Every
run uses them, so that an upgrade that renames one fails in its tests.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.writer import SummaryWriter


def is_restoring(trainer: Trainer) -> bool:
    """Return whether a checkpoint has been loaded of which not all is restored yet."""
    return bool(trainer._checkpoint_connector._loaded_checkpoint)


def is_optimizer_step(trainer: Trainer) -> bool:
    """Return whether the current batch ends with an optimizer step, not just accumulation."""
    return not trainer.fit_loop._should_accumulate()


def is_validation_epoch(trainer: Trainer) -> bool:
    """Return whether the current epoch ends with a validation."""
    return trainer.fit_loop.epoch_loop._should_check_val_epoch()


def get_logger_step(trainer: Trainer) -> int:
    """Return the step under which loggers record the current batch."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def build_fit_loop_state(
    *,
    epoch: int,
    batch: int,
    batches_per_epoch: int,
    optimizer_steps: int,
    logger_step: int,
    validation_pending: bool,
) -> dict[str, Any]:
    """Return the fit loop's counters at a position, as its state dict has them.

    A pending validation is resumed as if it had been interrupted within its first batch.
    """
    started = epoch + (batch > 0)
    epochs = {"ready": started, "started": started, "processed": epoch, "completed": epoch}
    steps = {"ready": optimizer_steps, "completed": optimizer_steps}
    validation = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    return {
        "epoch_progress": _total_and_current(epochs),
        "epoch_loop.state_dict": {"_batches_that_stepped": logger_step},
        "epoch_loop.batch_progress": {
            "total": _finished(epoch * batches_per_epoch + batch),
            "current": _finished(batch),
            "is_last_batch": validation_pending,
        },
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": _total_and_current(steps),
                "zero_grad": _total_and_current({**steps, "started": optimizer_steps}),
            }
        },
        "epoch_loop.val_loop.batch_progress": {
            "total": validation if validation_pending else _finished(0),
            "current": _finished(0),
            "is_last_batch": False,
        },
    }


def disable_signal_handlers(trainer: Trainer) -> None:
    """Keep Lightning from handling signals, and from broadcasting a SIGTERM before every batch."""
    trainer._signal_connector.register_signal_handlers = lambda: None  # deadlocks, status 0
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def request_exit(trainer: Trainer) -> None:
    """Let Lightning leave as after a SIGTERM: once the current batch has been logged."""
    trainer._signal_connector.received_sigterm = True


def has_writer(logger: TensorBoardLogger) -> bool:
    """Return whether a logger has already created its writer."""
    return logger._experiment is not None


def set_purge_step(logger: TensorBoardLogger, step: int) -> None:
    """Hide events of earlier runs from `step` on; call it before the writer is created."""
    logger._kwargs["purge_step"] = step


def catch_write_errors(writer: SummaryWriter, report: Callable[[OSError], None]) -> None:
    """Let a writer drop what cannot be written, and report why.

    Its thread would end with a traceback, and the next call would end the run.
    """
    assert writer.file_writer is not None
    events = writer.file_writer.event_writer
    path, file = Path(events._file_name), events._async_writer._writer._writer
    write = file.write

    def try_to_write(record: bytes) -> None:
        size = path.stat().st_size
        try:
            write(record)
        except OSError as error:
            os.truncate(path, size)  # part of a record would hide all later ones
            report(error)

    file.write = try_to_write


def _finished(count: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "processed", "completed"), count)


def _total_and_current(counts: dict[str, int]) -> dict[str, Any]:
    return {"total": counts, "current": dict(counts)}
