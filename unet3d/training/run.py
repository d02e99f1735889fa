"""A training run: its parts, the processes that join in it, and its errors."""

import signal
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from unet3d.data.layouts.splits import describe_groups
from unet3d.data.loading.worker_errors import end_workers_on_error, explain_worker_error
from unet3d.data.preprocessing.channels import describe_axes
from unet3d.errors import DoesNotFitError, Interrupted, RunError, UsageError, summarize_error
from unet3d.files import write_text
from unet3d.machine import Precision
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.oom_advice import format_oom_report
from unet3d.model.weights import count_parameters
from unet3d.signals import SignalListener
from unet3d.text import describe_classes
from unet3d.training.callbacks.checkpoints import AtomicCheckpointIO
from unet3d.training.config import TrainConfig
from unet3d.training.datamodule import VolumeDataModule
from unet3d.training.distributed import join_process_group, rank_zero_first
from unet3d.training.launch import ProcessRank
from unet3d.training.lightning_internals import is_restoring
from unet3d.training.module import SegmentationModule
from unet3d.training.run_folder import Log, open_run_folder
from unet3d.training.trainer import RunCallbacks

NOT_DETERMINISTIC = " does not have a deterministic implementation"
"""What torch says of an operation, after its name."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Everything that a run needs, ready to start."""

    settings: TrainConfig
    config: Mapping[str, Any]  # resolved, with what the dataset says: plain values for records
    folder: Path
    precision: Precision
    module: SegmentationModule
    data: VolumeDataModule
    trainer: Trainer
    callbacks: RunCallbacks
    estimate: MemoryEstimate | None
    notes: list[str]  # to print before the first step

    @property
    def is_main(self) -> bool:
        """Return whether this process writes the files of the run."""
        return self.data.process.rank == 0

    def list_unwritten_checkpoints(self) -> list[str]:
        """Return which checkpoints could not be written, and why."""
        io = self.trainer.strategy.checkpoint_io
        return list(io.failed_saves.values()) if isinstance(io, AtomicCheckpointIO) else []


@contextmanager
def join_run(
    settings: TrainConfig, folder: Path, process: ProcessRank, log: Log
) -> Generator[SignalListener]:
    """Join the processes of a run, and lock its folder; only the first process prints."""
    if process.world_size > 1 and settings.composition.folder_has_time:
        raise UsageError(
            f"{settings.trainer.launch} starts several processes, and each would create its own "
            "time-stamped run folder: set output=... (and resume=auto to resume after an "
            "interruption)"
        )
    group = join_process_group(settings, process)
    stdout = nullcontext() if process.rank == 0 else redirect_stdout(StringIO())
    with stdout, group, SignalListener().listening() as signals, ExitStack() as stack:
        # torch raises an error of a dead worker between any two instructions, also as no_grad ends.
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        with rank_zero_first(process, "folder"):
            if process.rank == 0:
                stack.enter_context(open_run_folder(folder, resume=settings.resume, log=log))
        yield signals


def summarize_run(run: TrainingRun) -> str:
    """Say what is trained, on which data, in which precision."""
    model, data, precision = run.module.model, run.data, run.precision
    config = run.settings.data
    training = describe_groups([volume.name for volume in data.training], data.groups)
    validation = describe_groups([volume.name for volume in data.validation], data.groups)
    normalized = ", ".join(dict.fromkeys(data.preprocessing.normalize))
    reason = ""
    if precision.requested != precision.used:
        reason = f" (instead of {precision.requested}: {precision.reason})"
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    fixed = f" and {frozen:,} frozen ones" if frozen else ""
    ranks, world_size = "", data.process.world_size
    if world_size > 1:
        batch_size = run.settings.data.batch_size * world_size
        ranks = f", {world_size} ranks with batches of {batch_size} in total"
    lines = [
        f"{type(model).__name__}, {count_parameters(model):,} parameters{fixed}, precision "
        f"{precision.used}{reason}, on {run.data.device}{ranks}",
        f"{training} for training, {validation} for validation; "
        f"{describe_classes(data.dataset.classes, data.dataset.regions)}",
        f"patches of {describe_axes(config.patch_size, config.orientation)} voxels, "
        f"{config.batch_size} at a time, normalized by {normalized}",
        *filter(None, [data.split_note, *data.data_warnings]),
        *(f"hint: {finding.describe()}" for finding in data.hints),
        *(f"skipped: {finding.describe()}" for finding in data.skipped),
        *run.notes,
        f"run: {run.folder}",
    ]
    return "\n".join(lines)


def write_config(run: TrainingRun) -> None:
    """Write the config of the run into its folder."""
    if run.is_main:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(run.folder / "config.yaml", yaml.safe_dump(dict(run.config), sort_keys=False))


def interrupt_if_asked(run: TrainingRun, signals: SignalListener) -> None:
    """Raise Interrupted on all ranks if one has received a signal after the last step."""
    received = signals.received is not None
    if run.trainer.strategy.reduce_boolean_decision(received, all=False):
        raise Interrupted(signals.received or signal.SIGTERM)


@contextmanager
def explain_errors(
    run: TrainingRun, checkpoint: Path | None, signals: SignalListener
) -> Generator[None]:
    """Say what went wrong in training, in the terms of the settings."""
    take_snapshot = run.settings.memory.snapshot and torch.cuda.is_available()
    if take_snapshot:
        torch.cuda.memory._record_memory_history()
    try:
        with end_workers_on_error():
            yield
    except torch.OutOfMemoryError as error:
        if take_snapshot:  # for pytorch.org/memory_viz
            torch.cuda.memory._dump_snapshot(str(run.folder / "memory_snapshot.pickle"))
        is_validating = run.trainer.validating or run.trainer.sanity_checking
        phase = "validation" if is_validating else run.callbacks.memory.phase
        report = format_oom_report(
            error,
            config=run.settings.step,
            composition=run.settings.composition,
            model=run.module.model,
            phase=phase or "training step",
            device=run.data.device,
            estimate=run.estimate,
            volume_size=run.data.largest_validation if is_validating else None,
            folder=run.folder,
        )
        raise DoesNotFitError(report) from error
    except (UsageError, RunError, DoesNotFitError):
        raise
    except MisconfigurationException as error:
        raise UsageError(summarize_error(error)) from error
    except Exception as error:
        operation, is_nondeterministic, _ = str(error).partition(NOT_DETERMINISTIC)
        if is_nondeterministic:
            raise UsageError(
                f"trainer.deterministic=true: {operation}{NOT_DETERMINISTIC} on this device; use "
                "checkpointing=fused, if the network has fused blocks, or remove this option"
            ) from error
        if is_restoring(run.trainer):
            reason = " ".join(str(error).split())
            raise UsageError(
                f"resume={checkpoint}: it cannot be restored: {type(error).__name__}: {reason}"
            ) from error
        workers = run.data.train_loader.num_workers
        explained = explain_worker_error(
            error, run.data.list_cases_in_flight(), num_workers=workers
        )
        if explained is None:
            raise
        raise explained from error
    except SystemExit:  # how Lightning leaves its loops
        if signals.received is None:
            raise
        raise Interrupted(signals.received) from None
    finally:
        signals.defers_exit = False
