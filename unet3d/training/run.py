"""A training run: its parts, where it starts, how it ends, and what it reports."""

import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from unet3d.config.compose import list_config_groups
from unet3d.data.dataset import ResolvedDataset
from unet3d.data.layouts.splits import describe_groups
from unet3d.data.loading.worker_errors import end_workers_on_error, explain_worker_error
from unet3d.errors import (
    DoesNotFitError,
    Interrupted,
    RunError,
    UsageError,
    describe_os_error,
    summarize_error,
)
from unet3d.files import read_report, write_text
from unet3d.machine import Precision, ProcessRank
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.oom_advice import format_oom_report
from unet3d.model.build import count_parameters
from unet3d.report.run_report import (
    collect_versions,
    select_headline_metrics,
    write_report,
)
from unet3d.stop_signals import SignalListener
from unet3d.training.build_callbacks import RunCallbacks
from unet3d.training.checkpoints import AtomicCheckpointIO
from unet3d.training.config import TrainConfig, list_choices
from unet3d.training.datamodule import VolumeDataModule
from unet3d.training.distributed import process_group, run_on_rank_zero
from unet3d.training.lightning_internals import is_restoring
from unet3d.training.module import SegmentationModule
from unet3d.training.run_folder import open_run_folder, write_records
from unet3d.training.trainer import find_device

Log = Callable[[str], None]

RESTORE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What the content of a checkpoint can raise; devices and networks raise others meanwhile."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """A run that has been trained up to its limits.

    Attributes:
        folder: the run folder.
        checkpoint: the best checkpoint, or the last one where nothing was validated.
        metrics: ``dice`` and ``hd95_mm`` of the best checkpoint on the validation cases,
            ``peak_mib`` and ``step_seconds`` of a training step; those that were measured.
        report: the content of report.json.
    """

    folder: Path
    checkpoint: Path
    metrics: Mapping[str, float]
    report: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Everything that a run needs, ready to start."""

    settings: TrainConfig
    config: Mapping[str, Any]  # resolved, with what the dataset says: plain values for records
    folder: Path
    precision: Precision
    dataset: ResolvedDataset
    module: SegmentationModule
    data: VolumeDataModule
    trainer: pl.Trainer
    callbacks: RunCallbacks
    process: ProcessRank
    estimate: MemoryEstimate | None
    notes: list[str]  # to print before the first step

    @property
    def device(self) -> torch.device:
        """Return the device on which this process trains."""
        return self.data.device

    @property
    def is_main(self) -> bool:
        """Return whether this process writes the files of the run."""
        return self.process.rank == 0

    def list_unwritten_checkpoints(self) -> list[str]:
        """Return which checkpoints could not be written, and why."""
        io = self.trainer.strategy.checkpoint_io
        return list(io.failed_saves.values()) if isinstance(io, AtomicCheckpointIO) else []


@contextmanager
def join_run(
    settings: TrainConfig, folder: Path, process: ProcessRank, log: Log
) -> Generator[tuple[Path, SignalListener]]:
    """Join the processes of a run, and lock its folder, which may get another name.

    Only the first process prints.
    """
    group = process_group(
        process,
        launch=settings.trainer.launch,
        device=find_device(settings, process),
        timeout_seconds=settings.trainer.timeout_seconds,
    )
    stdout = nullcontext() if process.rank == 0 else redirect_stdout(StringIO())
    with stdout, group, SignalListener().listening() as signals, ExitStack() as stack:

        def open_folder() -> str:
            own = open_run_folder(
                folder,
                resume=settings.resume,
                composition=settings.composition,
                log=log,
                inputs=settings.list_inputs(),
            )
            return str(stack.enter_context(own))

        yield Path(run_on_rank_zero(process, open_folder)), signals


def summarize_run(run: TrainingRun) -> str:
    """Say what is trained, on which data, in which precision."""
    model, data, precision = run.module.model, run.data, run.precision
    training = describe_groups([volume.name for volume in data.training], data.groups)
    validation = describe_groups([volume.name for volume in data.validation], data.groups)
    reason = ""
    if precision.requested != precision.used:
        reason = f" (instead of {precision.requested}: {precision.reason})"
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    fixed = f" and {frozen:,} frozen ones" if frozen else ""
    ranks = ""
    if run.process.world_size > 1:
        batch_size = run.settings.data.batch_size * run.process.world_size
        ranks = f", {run.process.world_size} ranks with batches of {batch_size} in total"
    lines = [
        f"{type(model).__name__}, {count_parameters(model):,} parameters{fixed}, precision "
        f"{precision.used}{reason}, on {run.device}{ranks}",
        f"{training} for training, {validation} for validation; "
        f"classes {', '.join(run.dataset.classes)}",
        *filter(None, (data.split_note, data.shared_patients)),
        *(f"skipped: {finding.describe()}" for finding in data.skipped),
        *run.notes,
        *data.absent_classes,
        f"run: {run.folder}",
    ]
    return "\n".join(lines)


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
            device=run.device,
            estimate=run.estimate,
            folder=run.folder,
        )
        raise DoesNotFitError(report) from error
    except (UsageError, RunError, DoesNotFitError):
        raise
    except Exception as error:
        if is_restoring(run.trainer) and isinstance(error, RESTORE_ERRORS):  # a callback's state
            reason = f"{type(error).__name__}: {summarize_error(error)}"
            raise UsageError(f"resume={checkpoint}: it cannot be restored: {reason}") from error
        if isinstance(error, MisconfigurationException):
            raise UsageError(summarize_error(error)) from error
        worker_error = explain_worker_error(
            error,
            run.data.list_cases_in_flight(),
            num_workers=run.data.train_loader.num_workers,
        )
        if worker_error is None:
            raise
        raise worker_error from error
    except SystemExit:  # how Lightning leaves its loops
        if signals.received is None:
            raise
        raise Interrupted(signals.received) from None
    finally:
        signals.defers_exit = False


@contextmanager
def report_early_end(run: TrainingRun, log: Log) -> Generator[None]:
    """Write the report of a run that does not reach its limits."""
    message: str | None = None
    finished = False
    try:
        yield
        finished = True
    except Interrupted as stop:
        log(
            f"\ninterrupted by {stop} after {run.trainer.global_step} steps; resume with "
            f"resume=auto hydra.run.dir={run.folder}"
        )
        stop.is_reported = True
        raise
    except (RunError, UsageError) as error:
        message = str(error)
        raise
    finally:
        if not finished:
            steps = run.trainer.global_step
            report = build_report(run, steps=steps, finished=False, error=message)
            run.callbacks.dashboard.finish({}, 0, finished=False)
            if run.is_main:
                try_write_report(run, report)
                write_page(run, report, log)


def interrupt_if_asked(run: TrainingRun, signals: SignalListener) -> None:
    """Raise Interrupted on all ranks if one has received a signal after the last step."""
    received = signals.received is not None
    if run.trainer.strategy.reduce_boolean_decision(received, all=False):
        raise Interrupted(signals.received or signal.SIGTERM)


def write_config(run: TrainingRun) -> None:
    """Write the config of the run into its folder."""
    if run.is_main:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(run.folder / "config.yaml", yaml.safe_dump(dict(run.config), sort_keys=False))
        write_records(run.folder, run.settings.composition.records)


def build_report(
    run: TrainingRun, *, steps: int, finished: bool, error: str | None = None
) -> dict[str, Any]:
    """Return the content of report.json."""
    skipped = run.module.nonfinite_guard.skipped
    warnings = run.callbacks.training_warnings
    device = run.device
    metrics = {name: float(value) for name, value in run.trainer.callback_metrics.items()}
    groups = list_config_groups()
    return {
        "finished": finished,
        **({} if error is None else {"error": error}),
        "folder": str(run.folder),
        "steps": steps,
        "skipped_steps": skipped,
        "parameters": count_parameters(run.module.model),
        "skipped_cases": [finding.describe() for finding in run.data.skipped],
        "warnings": [
            *filter(None, [run.data.shared_patients]),
            *warnings.warnings(done=finished, steps=steps, skipped=skipped),
        ],
        "metrics": {k: v for k, v in metrics.items() if k.startswith(("val/", "train/"))},
        "memory": run.callbacks.memory.summarize(),
        "speed": run.callbacks.timing.summarize(),
        "precision": {"requested": run.precision.requested, "used": run.precision.used},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": collect_versions(),
        "choices": {k: v for k, v in list_choices(run.settings).items() if k in groups},
        "config": dict(run.config),
    }


def reopen_report(run: TrainingRun, steps: int) -> dict[str, Any]:
    """Return the report of a run that has reached its limits; one that was killed then has none."""
    report = read_report(run.folder)
    report.pop("error", None)
    if report.get("finished"):
        return report
    rebuilt = build_report(run, steps=steps, finished=True)
    known = ("finished", "steps", "skipped_steps", "warnings")  # from the checkpoint
    return rebuilt | report | {key: rebuilt[key] for key in known}


def is_complete(run: TrainingRun) -> bool:
    """Return whether a run that has reached its limits has its report and its evaluation."""
    report = read_report(run.folder)
    part = "evaluation" if run.data.validation else "postprocessing"
    is_evaluated = part in report and not report[part].get("errors")
    needs_evaluation = run.settings.evaluation.enabled and not is_evaluated
    return bool(report.get("finished")) and "error" not in report and not needs_evaluation


def make_result(run: TrainingRun, report: Mapping[str, Any]) -> TrainingResult:
    """Return what a run has reached, with the checkpoint that was evaluated if one was."""
    evaluated = (report.get("evaluation") or {}).get("checkpoint")
    names = [*([Path(evaluated).name] if evaluated else []), "best.ckpt", "last.ckpt"]
    checkpoints = [run.folder / "checkpoints" / name for name in names]
    return TrainingResult(
        folder=run.folder,
        checkpoint=next((path for path in checkpoints if path.exists()), checkpoints[-1]),
        metrics=select_headline_metrics(report),
        report=report,
    )


def try_write_report(run: TrainingRun, report: dict[str, Any]) -> list[str]:
    """Write the report; return what prevented it, if anything."""
    path = run.folder / "report.json"
    try:
        write_report(report, path)
    except OSError as error:
        return [describe_os_error(error, path)]
    return []


def write_page(run: TrainingRun, report: Mapping[str, Any], log: Log) -> None:
    """Write report.html and curves.json, and say where; the run does not fail if that fails."""
    try:
        from unet3d.training.page import write_run_page  # here, so that runs start as soon

        write_run_page(run, report)
        log(f"report: {run.folder / 'report.html'}")
    except Exception as error:
        log(f"{run.folder / 'report.html'} was not written: {summarize_error(error)}")
