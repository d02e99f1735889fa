"""Build the callbacks of a run, in the order in which Lightning calls them."""

import sys
from collections.abc import Set
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from unet3d.data.dataset import ResolvedDataset, build_layout, resolve_dataset
from unet3d.errors import UsageError, summarize_error
from unet3d.evaluation.comparison import HIDDEN_KEYS
from unet3d.evaluation.options import build_metrics, select_class_metrics
from unet3d.machine import Precision
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.from_config import make_figure_title
from unet3d.metric.dice import Dice
from unet3d.peak_memory import PeakMeter
from unet3d.stop_signals import SignalListener
from unet3d.training.callbacks.curves import Curves
from unet3d.training.callbacks.dashboard import Dashboard
from unet3d.training.callbacks.early_stopping import EarlyStopping
from unet3d.training.callbacks.preemption import Preemption
from unet3d.training.callbacks.progress import ProgressBar, ProgressLines
from unet3d.training.callbacks.step_memory import StepMemory
from unet3d.training.callbacks.step_timing import StepTimer
from unet3d.training.callbacks.training_warnings import TrainingWarnings, suggest_overrides
from unet3d.training.callbacks.weight_averaging import WeightAveraging
from unet3d.training.checkpoints import BestCheckpoint, LastCheckpoint
from unet3d.training.config import TrainConfig, list_choices
from unet3d.training.datamodule import Prefetch, VolumeDataModule
from unet3d.training.limits import StoppingLimits
from unet3d.training.module import SegmentationModule
from unet3d.training.resume_state import ResumeState
from unet3d.types import HasRetention


@dataclass(frozen=True, kw_only=True)
class RunCallbacks:
    """All callbacks of a run, and those that others ask for what they know."""

    ordered: list[Callback]
    limits: StoppingLimits
    resume_state: ResumeState
    last: LastCheckpoint
    memory: StepMemory
    timing: StepTimer
    dashboard: Dashboard
    curves: Curves
    training_warnings: TrainingWarnings

    def set_estimate(self, estimate: MemoryEstimate | None) -> None:
        """Show the estimate of a step beside what is measured."""
        self.memory.estimated = None if estimate is None else estimate.peak
        self.dashboard.estimate = estimate


def build_callbacks(
    settings: TrainConfig,
    precision: Precision,
    module: SegmentationModule,
    data: VolumeDataModule,
    limits: StoppingLimits,
    *,
    config: dict[str, Any],
    folder: Path,
    signals: SignalListener | None,
) -> RunCallbacks:
    """Build the callbacks of a run, and those that the settings name."""
    timing = StepTimer(settings.data.num_workers)
    recorded_pass = module.recorded_pass
    recorded = None if recorded_pass is None else recorded_pass.peaks
    memory = StepMemory(PeakMeter(), recorded=recorded)
    dashboard = Dashboard(
        config, select_hparams(settings, config), make_figure_title(settings.step)
    )
    curves = Curves()
    suggest = partial(suggest_overrides, settings)
    training_warnings = TrainingWarnings(limits, suggest, data.absent_classes)
    # Within a kind of blocks, strategies change no bit of a step.
    step = settings.step
    is_plain = step.strategy in ("none", "blocks") or not isinstance(module.model, HasRetention)
    resume_state = ResumeState(
        data,
        limits,
        seed=settings.seed,
        fixed={
            "head_warmup": step.head_warmup,
            "lr_factors": dict(step.lr_factors),
            "ema_decay": step.ema_decay,
            "kind of device": data.device.type,
            "precision in use": precision.used,
            "blocks of the network": "plain" if is_plain else "fused",
        },
    )
    last = LastCheckpoint(folder / "checkpoints", every_seconds=settings.save_every_seconds)
    show_bar = settings.trainer.show_progress_bar
    if show_bar == "auto":
        show_bar = sys.stdout.isatty()
    progress = ProgressBar if show_bar else ProgressLines
    ordered: list[Callback] = [
        # First: at the end of a step the GPU still works on it, and nothing else is as urgent.
        *([Prefetch()] if data.device.type == "cuda" else []),
        *([] if step.ema_decay is None else [WeightAveraging(step.ema_decay)]),
        memory,
        timing,
        dashboard,
        curves,
        training_warnings,
        limits,
        resume_state,
        *build_configured(settings, data, folder / "checkpoints"),
        *([] if signals is None else [Preemption(signals, last)]),
        progress(limits),
        last,
    ]
    return RunCallbacks(
        ordered=ordered,
        limits=limits,
        resume_state=resume_state,
        last=last,
        memory=memory,
        timing=timing,
        dashboard=dashboard,
        curves=curves,
        training_warnings=training_warnings,
    )


def build_configured(
    settings: TrainConfig, data: VolumeDataModule, checkpoints: Path
) -> list[Callback]:
    """Build the callbacks of the config group, each with what its class takes of the run.

    Without validation there is no best checkpoint.
    """
    has_validation = settings.fold is not None
    known = list_metrics(settings, data.dataset)
    offered = {
        "folder": checkpoints,
        "class_names": data.dataset.classes,
        "orientation": settings.data.orientation,
        "spacing_mm": data.spacing_mm,
    }
    built: list[Callback] = []
    for name, factory in settings.callbacks.items():
        if "monitor" in factory.arguments:
            check_monitor(f"{factory.key}.monitor", str(factory.arguments["monitor"]), known)
        needs = signature(factory.target).parameters
        try:
            callback = factory(**{key: offered[key] for key in offered.keys() & needs.keys()})
        except MisconfigurationException as error:  # of a callback of Lightning
            raise UsageError(f"callbacks.{name}: {summarize_error(error)}") from error
        if isinstance(callback, EarlyStopping) and not has_validation:
            raise UsageError(f"callbacks.{name} needs validation cases, fold=none has none")
        if has_validation or not isinstance(callback, BestCheckpoint):
            built.append(callback)
    scheduler = settings.scheduler
    if "monitor" in scheduler.arguments:
        check_monitor("scheduler.monitor", str(scheduler.arguments["monitor"]), known)
    return built


def check_monitor(key: str, name: str, known: Set[str] | None) -> None:
    """Refuse to follow a metric that no validation logs; of other metrics, steps may log any."""
    if known is not None and name not in known and (name.startswith("val/") or "/" not in name):
        raise UsageError(f"{key} must be one of {', '.join(sorted(known))}, got {name!r}")


def check_search_monitor(settings: TrainConfig, name: str) -> None:
    """Refuse to search with a metric that a trial with these settings does not log."""
    dataset = resolve_dataset(settings.data, build_layout(settings.data).describe())
    check_monitor("monitor", name, list_metrics(settings, dataset))


def list_metrics(settings: TrainConfig, dataset: ResolvedDataset) -> Set[str] | None:
    """Return the names of what a validation logs: means, and scores of each class.

    None if they are not known, as those of a user's metrics and callbacks.
    """
    metrics = build_metrics(settings.metrics, dataset.regions)
    of_classes = select_class_metrics(metrics)
    callbacks = [str(factory.arguments.get("_target_")) for factory in settings.callbacks.values()]
    shipped = all(name.startswith(("unet3d.", "lightning.")) for name in callbacks)
    if len(of_classes) < len(metrics) or not shipped:
        return None
    scores = [
        "dice",
        "iou",
        "hd95_mm",
        *(score for metric in of_classes for score in metric.scores),
    ]
    classes = [f"/{name}" for name in Dice(dataset.classes, dataset.regions).scored_classes]
    ratios = {f"val/volume_ratio{name}" for name in classes}
    return {f"val/{score}{name}" for score in scores for name in ("", *classes)} | ratios


def select_hparams(settings: TrainConfig, config: dict[str, Any]) -> dict[str, str | int | float]:
    """Return the main options, and what else the command line sets, for TensorBoard's HParams.

    Few, since TensorBoard shows only the first columns until more are ticked.
    """
    choices, overrides = list_choices(settings), settings.composition.overrides
    main = ("model", "pool", "checkpointing")
    hparams: dict[str, Any] = {key: choices[key] for key in main if key in choices}
    for key in sorted(o.lstrip("+~").partition("=")[0] for o in overrides):
        value: Any = choices.get(key, config)
        for part in key.split(".") if value is config else ():
            value = value.get(part) if isinstance(value, dict) else None
        if key not in HIDDEN_KEYS and value is not None:
            hparams[key] = value if isinstance(value, int | float) else str(value)
    return hparams | {"precision": settings.step.precision}
