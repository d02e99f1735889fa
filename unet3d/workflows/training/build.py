"""Build a training run from its settings, in the order in which data flows."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from unet3d.config.settings.training import TrainingSettings
from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading.datasets import read_classes
from unet3d.data.loading.loaders import TrainLoader, build_loaders
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.lit.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from unet3d.lit.callbacks.dashboard import Dashboard
from unet3d.lit.callbacks.images import CaseImages
from unet3d.lit.callbacks.lr import LRSchedule
from unet3d.lit.callbacks.preemption import Preemption, SignalListener
from unet3d.lit.callbacks.prefetch import Prefetch
from unet3d.lit.callbacks.progress import ProgressBar, ProgressLines
from unet3d.lit.callbacks.resume_state import ResumeState
from unet3d.lit.callbacks.step_memory import StepMemory
from unet3d.lit.callbacks.step_timing import StepSpeed
from unet3d.lit.callbacks.stopping import StoppingLimits
from unet3d.lit.callbacks.training_health import TrainingHealth
from unet3d.machine.device import Precision, resolve_device, resolve_precision
from unet3d.machine.distributed_env import Ranks
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.peak import PeakMeter
from unet3d.report.diagnosis import find_absent_classes
from unet3d.report.run_comparison import HIDDEN_KEYS
from unet3d.units import format_bytes
from unet3d.workflows.memory.estimate import UntraceableError, make_figure_title, trace_step
from unet3d.workflows.memory.oom_advice import check_memory
from unet3d.workflows.memory.strategies import resolve_strategy
from unet3d.workflows.shared.dataset import (
    build_source,
    get_network_sizes,
    resolve_dataset,
)
from unet3d.workflows.training.dataset import TrainingData, prepare_training_data
from unet3d.workflows.training.module import build_module, make_metadata
from unet3d.workflows.training.output_bias import initialize_output_bias
from unet3d.workflows.training.preflight import enforce_requirements, find_problems
from unet3d.workflows.training.remedies import suggest_remedies
from unet3d.workflows.training.run import TrainingRun
from unet3d.workflows.training.trainer import build_trainer


def build_training(
    settings: TrainingSettings,
    folder: Path,
    signals: SignalListener | None = None,
    ranks: Ranks | None = None,
) -> TrainingRun:
    """Check the machine and build everything that the settings name."""
    ranks = ranks or Ranks()
    device = resolve_device(settings.trainer.accelerator)
    precision = resolve_precision(settings.precision, device)

    # The dataset's channels and classes, and the strategy that fits the device.
    augment = settings.augmentation()
    source = build_source(settings.data)
    facts = resolve_dataset(settings.data, source.describe())
    settings = facts.complete(settings)
    requested_strategy = settings.strategy
    settings = resolve_strategy(settings, precision, cuda=device == "cuda")
    notes = describe_strategy(requested_strategy, settings.strategy)

    # Check the machine before any volume is read.
    problems = find_problems(
        settings,
        precision,
        device=device,
        processes=ranks.per_node,
        folder=folder,
        channels=len(facts.channels),
        augment=augment,
    )
    warnings = enforce_requirements(settings, problems)
    data = prepare_training_data(settings, source, facts, ranks)

    # The network, what it is judged by, and how it learns.
    pl.seed_everything(settings.seed, verbose=False)
    set_tf32(settings.tf32)
    config = make_config_record(settings)
    spacing_mm = {v.name: v.get_spacing_mm(data.preprocessing) for v in data.validation}
    module = build_module(
        settings,
        precision,
        facts=facts,
        spacing_mm=spacing_mm,
        metadata=make_metadata(config, facts, data),
    )

    # Batches, and the first bias, which depends on what they hold.
    train_loader, val_loader = build_data_loaders(
        settings, data, augment=augment, device=device, ranks=ranks
    )
    bias_notes = initialize_output_bias(module.model, settings, facts, train_loader)
    estimate, memory_notes = estimate_run_memory(settings, precision, device, data.validation)

    # Callbacks, in the order in which Lightning calls them.
    limits = StoppingLimits(
        max_steps=settings.trainer.max_steps, max_seconds=settings.trainer.max_seconds
    )
    memory = StepMemory(PeakMeter(), None if estimate is None else estimate.peak)
    timing = StepSpeed(settings.data.num_workers)
    hparams = select_hparams(settings, config)
    dashboard = Dashboard(config, hparams, estimate, make_figure_title(settings))
    absent = find_absent_classes(
        module.metric.scored_classes, read_classes(data.training), read_classes(data.validation)
    )
    health = TrainingHealth(limits, suggest_remedies(settings), absent)
    resume_state = ResumeState(train_loader, limits, seed=settings.seed)
    checkpoints = folder / "checkpoints"
    last = LastCheckpoint(checkpoints, every_seconds=settings.save_every_seconds)
    progress = ProgressBar if settings.trainer.show_progress_bar else ProgressLines
    callbacks = [
        LRSchedule(settings.scheduler(), limits),
        memory,
        timing,
        *([Prefetch(train_loader)] if device == "cuda" else []),
        CaseImages(
            class_names=facts.classes,
            orientation=data.preprocessing.orientation,
            spacing_mm=spacing_mm,
        ),
        dashboard,
        health,
        limits,
        resume_state,
        *([BestCheckpoint(checkpoints)] if data.validation else []),
        last,
        *([] if signals is None else [Preemption(signals, last)]),
        progress(limits),
    ]
    return TrainingRun(
        settings=settings,
        config=config,
        folder=folder,
        precision=precision,
        facts=facts,
        data=data,
        module=module,
        train_loader=train_loader,
        val_loader=val_loader,
        ranks=ranks,
        trainer=build_trainer(
            settings,
            device=device,
            precision=precision,
            callbacks=callbacks,
            folder=folder,
            ranks=ranks,
        ),
        limits=limits,
        resume_state=resume_state,
        memory=memory,
        timing=timing,
        dashboard=dashboard,
        health=health,
        estimate=estimate,
        notes=[*notes, *memory_notes, *bias_notes, *warnings],
    )


def describe_strategy(requested: str, used: str) -> list[str]:
    """Say which checkpointing strategy is used instead of the requested one."""
    if requested == used:
        return []
    if requested == "auto":
        return [f"checkpointing=auto: using {used}"]
    return [f"checkpointing={requested}: this network has no fused blocks, using {used}"]


def build_data_loaders(
    settings: TrainingSettings,
    data: TrainingData,
    *,
    augment: Augment,
    device: str,
    ranks: Ranks,
) -> tuple[TrainLoader, DataLoader | None]:
    """Build the loaders of training patches and of validation volumes for this rank."""
    return build_loaders(
        data.training,
        data.validation,
        patch_size=settings.data.patch_size,
        batch_size=settings.data.batch_size,
        patches_per_case=settings.data.patches_per_case,
        foreground_fraction=settings.data.foreground_fraction,
        augment=augment,
        num_workers=settings.data.num_workers,
        device=torch.device(device, ranks.local) if device == "cuda" else torch.device(device),
        seed=settings.seed,
        rank=ranks.rank,
        ranks=ranks.world,
    )


def make_config_record(settings: TrainingSettings) -> dict[str, Any]:
    """Return the config from which the network can be built again; the settings are complete."""
    in_channels, num_outputs = get_network_sizes(settings.data)
    model = settings.network.bind(in_channels=in_channels, num_outputs=num_outputs).model
    return {**settings.resolved, "model": {**settings.resolved["model"], **model.arguments}}


def estimate_run_memory(
    settings: TrainingSettings,
    precision: Precision,
    device: str,
    validation: Sequence[CachedVolume],
) -> tuple[MemoryEstimate | None, list[str]]:
    """Estimate the memory of a step; also return what to print of it before the first one."""
    if not settings.memory.estimate:
        return None, []
    cuda = device == "cuda"
    largest = max((volume.shape for volume in validation), key=prod, default=None)
    try:
        estimate = trace_step(settings, precision, cuda=cuda, volume_size=largest)
    except UntraceableError as reason:
        return None, [str(reason)]
    low, high = estimate.bounds
    note = f"predicted peak of a step: {format_bytes(low)} of tensors"
    if cuda:
        note = f"predicted peak of a step: {format_bytes(low)} to {format_bytes(high)} allocated"
    return estimate, [note, *check_memory(estimate, settings, torch.device(device))]


def select_hparams(
    settings: TrainingSettings, config: dict[str, Any]
) -> dict[str, str | int | float]:
    """Return the main options, and what else the command line sets, for TensorBoard's HParams.

    Few, since TensorBoard shows only the first columns until more are ticked.
    """
    choices, overrides = settings.composition.choices, settings.composition.overrides
    main = ("model", "pool", "checkpointing")
    hparams: dict[str, Any] = {key: choices[key] for key in main if key in choices}
    for key in sorted(word.lstrip("+~").partition("=")[0] for word in overrides):
        value: Any = choices.get(key, config)
        for part in key.split(".") if value is config else ():
            value = value.get(part) if isinstance(value, dict) else None
        if key not in HIDDEN_KEYS and value is not None:
            hparams[key] = value if isinstance(value, int | float) else str(value)
    return hparams | {"precision": settings.precision}


def set_tf32(enabled: bool) -> None:
    """Allow or forbid a GPU to round the factors of float32 products to TF32."""
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled
