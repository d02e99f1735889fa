"""A training run: its parts, where it starts, and what it reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from unet3d.config.compose import list_config_groups
from unet3d.config.settings.training import TrainingSettings
from unet3d.data.layouts.groups import describe_groups
from unet3d.data.loading.loaders import TrainLoader
from unet3d.data.loading.worker_errors import InFlightCases, explain_worker_error
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.errors import RunError
from unet3d.lit.callbacks.checkpoints import BestCheckpoint, remove_leftovers
from unet3d.lit.callbacks.early_stopping import EarlyStopping
from unet3d.lit.callbacks.resume_state import get_logged_steps, purge_events_after
from unet3d.lit.fault_tolerant_checkpoints import FaultTolerantCheckpointIO
from unet3d.lit.module import SegmentationModule
from unet3d.lit.resume import check_resumable, is_finished, load_pretrained, load_resume
from unet3d.machine.device import Precision
from unet3d.machine.distributed_env import ProcessRank
from unet3d.memory.estimate import MemoryEstimate
from unet3d.report.run_report import collect_versions
from unet3d.workflows.memory.oom_advice import format_oom_report
from unet3d.workflows.shared.dataset import ResolvedDataset
from unet3d.workflows.shared.network import count_parameters
from unet3d.workflows.training.callbacks import RunCallbacks
from unet3d.workflows.training.dataset import TrainingData


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Everything that a run needs, ready to start."""

    settings: TrainingSettings
    config: Mapping[str, Any]  # resolved, with what the dataset says: plain values for records
    folder: Path
    precision: Precision
    dataset: ResolvedDataset
    data: TrainingData
    module: SegmentationModule
    train_loader: TrainLoader
    val_loader: DataLoader | None
    process: ProcessRank
    trainer: pl.Trainer
    callbacks: RunCallbacks
    estimate: MemoryEstimate | None
    notes: list[str]  # to print before the first step

    @property
    def validation(self) -> list[CachedVolume]:
        """Return the validation cases."""
        return self.data.validation

    def format_oom_report(self, error: torch.OutOfMemoryError) -> str:
        """Say what ran out of memory, and what to change."""
        is_validating = self.trainer.validating or self.trainer.sanity_checking
        phase = "validation" if is_validating else self.callbacks.memory.phase
        return format_oom_report(
            error,
            settings=self.settings,
            model=self.module.model,
            phase=phase or "training step",
            device=self.trainer.strategy.root_device,
            estimate=self.estimate,
            folder=self.folder,
        )

    def format_resume_overrides(self) -> str:
        """Return what to add to the command that started this run to resume it."""
        return f"resume=auto hydra.run.dir={self.folder}"

    def list_unwritten_checkpoints(self) -> list[str]:
        """Return which checkpoints could not be written, and why."""
        io = self.trainer.strategy.checkpoint_io
        return list(io.failed_saves.values()) if isinstance(io, FaultTolerantCheckpointIO) else []

    def explain_worker_error(self, error: Exception) -> RunError | None:
        """Say what happened to a data worker, if that is what the error is about."""
        return explain_worker_error(
            error,
            self._list_cases_in_flight(),
            num_workers=self.train_loader.num_workers,
            kills_before=self.train_loader.oom_kills,
        )

    def _list_cases_in_flight(self) -> list[InFlightCases]:
        loaders: list[Any] = [self.train_loader, self.val_loader]
        return [loader.dataset.in_flight for loader in loaders if loader is not None]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts, and messages about resume= and init_from=."""

    checkpoint: Path | None = None  # to resume from
    steps: int = 0  # of the checkpoint
    is_finished: bool = False  # whether the checkpoint is at the end of this run already
    messages: list[str]


def resolve_start(run: TrainingRun) -> Start:
    """Verify the checkpoint to resume from, if any, or load pretrained weights."""
    settings, folder = run.settings, run.folder / "checkpoints"
    is_main = run.process.rank == 0
    checkpoint = load_resume(settings.resume, folder)
    if checkpoint is not None:
        path, content, callbacks = checkpoint.path, checkpoint.content, run.callbacks
        metadata = run.module.metadata
        logged = get_logged_steps(callbacks.resume_state, content, path, metadata)
        check_resumable(path, content, run.module, run.trainer)
        if is_main:  # nothing was changed before, when it could still be refused
            remove_leftovers(folder)
            checkpoint.restore_last()
            for best in (c for c in callbacks.ordered if isinstance(c, BestCheckpoint)):
                state = content["callbacks"].get(best.state_key, {})
                checkpoint.messages.extend(best.copy_from(path.parent, state))
        purge_events_after(run.trainer, logged)
        epochs = run.trainer.max_epochs or -1
        finished = is_finished(
            *(content, callbacks.limits, callbacks.resume_state, epochs),
            [c for c in callbacks.ordered if isinstance(c, EarlyStopping)],
        )
        warnings = callbacks.training_warnings
        if finished and warnings.state_key in content["callbacks"]:  # nothing else loads them
            warnings.load_state_dict(content["callbacks"][warnings.state_key])
            run.module.on_load_checkpoint(content)
        # Lightning loads the file itself: the content must not stay in memory while it trains.
        return Start(
            checkpoint=path,
            steps=content["global_step"],
            is_finished=finished,
            messages=checkpoint.messages,
        )
    if is_main:
        remove_leftovers(folder)
    purge_events_after(run.trainer, 0)
    if settings.init_from is not None:
        return Start(messages=[load_pretrained(run.module.model, settings.init_from)])
    return Start(messages=[])


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
        f"{precision.used}{reason}, on {run.trainer.strategy.root_device}{ranks}",
        f"{training} for training, {validation} for validation; "
        f"classes {', '.join(run.dataset.classes)}",
        *filter(None, (data.split_note, data.shared_patients)),
        *(f"skipped: {finding.describe()}" for finding in data.skipped),
        *run.notes,
        *run.callbacks.training_warnings.absent,
        f"run: {run.folder}",
    ]
    return "\n".join(lines)


def build_report(
    run: TrainingRun, *, steps: int, finished: bool, error: str | None = None
) -> dict[str, Any]:
    """Return the content of report.json."""
    skipped = run.module.nonfinite_guard.skipped
    warnings = run.callbacks.training_warnings
    device = run.trainer.strategy.root_device
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
        "choices": {k: v for k, v in run.settings.composition.choices.items() if k in groups},
        "config": dict(run.config),
    }
