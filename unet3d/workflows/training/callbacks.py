"""Build the callbacks of a run, in the order in which Lightning calls them."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from unet3d.config.instantiate import Factory
from unet3d.config.settings.training import TrainingSettings
from unet3d.data.loading.loaders import TrainLoader
from unet3d.errors import UsageError
from unet3d.lit.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from unet3d.lit.callbacks.curves import Curves
from unet3d.lit.callbacks.dashboard import Dashboard
from unet3d.lit.callbacks.early_stopping import EarlyStopping
from unet3d.lit.callbacks.lr import LRSchedule, TorchSchedule
from unet3d.lit.callbacks.preemption import Preemption
from unet3d.lit.callbacks.prefetch import Prefetch
from unet3d.lit.callbacks.progress import ProgressBar, ProgressLines
from unet3d.lit.callbacks.resume_state import ResumeState
from unet3d.lit.callbacks.step_memory import StepMemory
from unet3d.lit.callbacks.step_timing import StepTimer
from unet3d.lit.callbacks.stopping import StoppingLimits
from unet3d.lit.callbacks.training_warnings import TrainingWarnings
from unet3d.lit.callbacks.weight_averaging import WeightAveraging
from unet3d.lit.module import SegmentationModule
from unet3d.machine.device import Precision
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.peak import PeakMeter
from unet3d.report.run_comparison import HIDDEN_KEYS
from unet3d.report.training_warnings import find_absent_classes
from unet3d.stop_signals import SignalListener
from unet3d.types import HasRetention
from unet3d.workflows.memory.estimate import make_figure_title
from unet3d.workflows.training.dataset import TrainingData
from unet3d.workflows.training.suggested_overrides import suggest_overrides


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


def build_callbacks(
    settings: TrainingSettings,
    *,
    config: dict[str, Any],
    folder: Path,
    device: str,
    precision: Precision,
    class_names: Sequence[str],
    data: TrainingData,
    spacing_mm: Mapping[str, Sequence[float]],
    module: SegmentationModule,
    train_loader: TrainLoader,
    estimate: MemoryEstimate | None,
    signals: SignalListener | None,
) -> RunCallbacks:
    """Build the callbacks; `spacing_mm` holds the spacing of each validation case."""
    timing = StepTimer(settings.data.num_workers)
    limits = StoppingLimits(
        max_steps=settings.trainer.max_steps,
        max_seconds=settings.trainer.max_seconds,
        step_seconds=timing.seconds,
        cheaper_step=suggest_overrides(settings).cheaper_step,
    )
    recorded_pass = module.recorded_pass
    memory = StepMemory(
        PeakMeter(),
        None if estimate is None else estimate.peak,
        None if recorded_pass is None else recorded_pass.peaks,
    )
    hparams = select_hparams(settings, config)
    dashboard = Dashboard(config, hparams, estimate, make_figure_title(settings))
    curves = Curves()
    absent = find_absent_classes(
        module.metric.scored_classes,
        *([v.summary.classes for v in part] for part in (data.training, data.validation)),
    )
    training_warnings = TrainingWarnings(limits, partial(suggest_overrides, settings), absent)
    resume_state = ResumeState(
        train_loader,
        limits,
        seed=settings.seed,
        fixed={
            "head_warmup": settings.head_warmup,
            "lr_factors": dict(settings.lr_factors),
            "ema_decay": settings.ema_decay,
            "kind of device": device,
            "precision in use": precision.used,
            "blocks of the network": describe_blocks(settings.strategy, module.model),
            "cases": data.digest_cases(),
        },
    )
    checkpoints = folder / "checkpoints"
    last = LastCheckpoint(checkpoints, every_seconds=settings.save_every_seconds)
    configured = build_configured(
        settings,
        facts={
            "folder": checkpoints,
            "class_names": class_names,
            "orientation": data.preprocessing.orientation,
            "spacing_mm": spacing_mm,
        },
        has_validation=bool(data.validation),
    )
    show_bar = settings.trainer.show_progress_bar
    if show_bar == "auto":
        show_bar = sys.stdout.isatty()
    progress = ProgressBar if show_bar else ProgressLines
    ordered: list[Callback] = [
        # First: at the end of a step the GPU still works on it, and nothing else is as urgent.
        *([Prefetch(train_loader)] if device == "cuda" else []),
        *([] if settings.ema_decay is None else [WeightAveraging(settings.ema_decay)]),
        build_lr_schedule(settings.scheduler, limits),
        memory,
        timing,
        dashboard,
        curves,
        training_warnings,
        limits,
        resume_state,
        *configured,
        last,
        *([] if signals is None else [Preemption(signals, last)]),
        progress(limits),
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


def describe_blocks(strategy: str, model: nn.Module) -> str:
    """Return which blocks compute: within a kind, strategies change no bit of a step."""
    is_fused = isinstance(model, HasRetention) and strategy not in ("none", "blocks")
    return "fused" if is_fused else "plain"


def build_lr_schedule(scheduler: Factory, limits: StoppingLimits) -> Callback:
    """Build the callback of a schedule of unet3d, or of a scheduler of torch."""
    target = scheduler.target
    if isinstance(target, type) and issubclass(target, LRScheduler):
        return TorchSchedule(scheduler, limits)
    return LRSchedule(scheduler(), limits)


def build_configured(
    settings: TrainingSettings, *, facts: Mapping[str, Any], has_validation: bool
) -> list[Callback]:
    """Build the callbacks of the config group, each with those facts that its class takes.

    Those that write the best checkpoint come last: it has the state of the others. Without
    validation there is no best checkpoint.
    """
    built: list[Callback] = []
    for name, factory in settings.callbacks.items():
        needs = signature(factory.target).parameters
        callback = factory(**{key: facts[key] for key in facts.keys() & needs.keys()})
        if not isinstance(callback, Callback):
            raise UsageError(f"callbacks.{name} is not a Lightning callback")
        if isinstance(callback, EarlyStopping) and not has_validation:
            raise UsageError(f"callbacks.{name} needs validation cases, fold=none has none")
        if has_validation or not isinstance(callback, BestCheckpoint):
            built.append(callback)
    if sum(isinstance(callback, BestCheckpoint) for callback in built) > 1:
        raise UsageError("callbacks: only one can write the best checkpoint")
    return sorted(built, key=lambda callback: isinstance(callback, BestCheckpoint))


def select_hparams(
    settings: TrainingSettings, config: dict[str, Any]
) -> dict[str, str | int | float]:
    """Return the main options, and what else the command line sets, for TensorBoard's HParams.

    Few, since TensorBoard shows only the first columns until more are ticked.
    """
    choices, overrides = settings.composition.choices, settings.composition.overrides
    main = ("model", "pool", "checkpointing")
    hparams: dict[str, Any] = {key: choices[key] for key in main if key in choices}
    for key in sorted(o.lstrip("+~").partition("=")[0] for o in overrides):
        value: Any = choices.get(key, config)
        for part in key.split(".") if value is config else ():
            value = value.get(part) if isinstance(value, dict) else None
        if key not in HIDDEN_KEYS and value is not None:
            hparams[key] = value if isinstance(value, int | float) else str(value)
    return hparams | {"precision": settings.precision}
