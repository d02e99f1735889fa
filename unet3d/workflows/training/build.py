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
from unet3d.data.loading.loaders import TrainLoader, build_loaders
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.machine.device import (
    Precision,
    describe_missing_kernels,
    resolve_device,
    resolve_precision,
)
from unet3d.machine.distributed_env import ProcessRank
from unet3d.memory.estimate import MemoryEstimate, UntraceableError
from unet3d.memory.tables import summarize_compiled
from unet3d.stop_signals import SignalListener
from unet3d.units import format_bytes
from unet3d.workflows.memory.estimate import trace_step
from unet3d.workflows.memory.oom_advice import check_memory
from unet3d.workflows.memory.strategies import resolve_strategy
from unet3d.workflows.shared.dataset import build_layout, get_network_sizes, resolve_dataset
from unet3d.workflows.training.callbacks import build_callbacks
from unet3d.workflows.training.check_options import check_options
from unet3d.workflows.training.cuda_graph import choose_recorder
from unet3d.workflows.training.dataset import TrainingData, prepare_training_data
from unet3d.workflows.training.head_bias import initialize_head_bias
from unet3d.workflows.training.module import build_module, make_metadata
from unet3d.workflows.training.preflight import (
    check_batch_fits,
    enforce_requirements,
    find_problems,
)
from unet3d.workflows.training.run import TrainingRun
from unet3d.workflows.training.trainer import build_trainer


def build_training(
    settings: TrainingSettings,
    folder: Path,
    signals: SignalListener | None = None,
    process: ProcessRank | None = None,
) -> TrainingRun:
    """Check the machine and build everything that the settings name."""
    process = process or ProcessRank()
    device = resolve_device(settings.trainer.accelerator)
    precision = resolve_precision(settings.precision, device)

    # The dataset's channels and classes, and the strategy that fits the device.
    augment = settings.augmentation()
    layout = build_layout(settings.data)
    dataset = resolve_dataset(settings.data, layout.describe())
    settings = dataset.complete(settings)
    requested_strategy = settings.strategy
    if device == "mps":
        settings = settings.with_strategy("none")
    settings = resolve_strategy(settings, precision, cuda=device == "cuda")
    notes = describe_strategy(requested_strategy, settings.strategy, device)

    # Check the machine before any volume is read.
    check_batch_fits(settings, len(dataset.channels), augment)
    problems = find_problems(
        settings,
        precision,
        device=device,
        processes=process.local_world_size,
        folder=folder,
        channels=len(dataset.channels),
        augment=augment,
    )
    warnings = enforce_requirements(settings, problems)
    check_options(settings, precision, dataset, folder)
    data = prepare_training_data(settings, layout, dataset, process)

    # The network, what it is judged by, and how it learns.
    pl.seed_everything(settings.seed, verbose=False)
    set_tf32(settings.tf32)
    config = make_config_record(settings)
    spacing_mm = {v.name: v.get_spacing_mm(data.preprocessing) for v in data.validation}
    recorder, graph_notes = choose_recorder(settings, device, process)
    module = build_module(
        settings,
        precision,
        dataset=dataset,
        spacing_mm=spacing_mm,
        metadata=make_metadata(config, dataset, data, augment),
        recorder=recorder,
    )

    # Batches, and the first bias, which depends on what they hold.
    train_loader, val_loader = build_data_loaders(
        settings, data, augment=augment, device=device, process=process
    )
    bias_notes = initialize_head_bias(module.model, settings, dataset, train_loader)
    estimate, memory_notes = estimate_run_memory(settings, precision, device, data.validation)

    # What watches the run, saves it and stops it.
    callbacks = build_callbacks(
        settings,
        config=config,
        folder=folder,
        device=device,
        precision=precision,
        class_names=dataset.classes,
        data=data,
        spacing_mm=spacing_mm,
        module=module,
        train_loader=train_loader,
        estimate=estimate,
        signals=signals,
    )
    return TrainingRun(
        settings=settings,
        config=config,
        folder=folder,
        precision=precision,
        dataset=dataset,
        data=data,
        module=module,
        train_loader=train_loader,
        val_loader=val_loader,
        process=process,
        trainer=build_trainer(
            settings,
            device=device,
            precision=precision,
            callbacks=callbacks.ordered,
            folder=folder,
            process=process,
        ),
        callbacks=callbacks,
        estimate=estimate,
        notes=[*notes, *graph_notes, *memory_notes, *bias_notes, *warnings],
    )


def describe_strategy(requested: str, used: str, device: str) -> list[str]:
    """Say which checkpointing strategy is used instead of the requested one."""
    missing = describe_missing_kernels(device)
    if missing is not None:
        return [missing]
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
    process: ProcessRank,
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
        device=torch.device(device, torch.cuda.current_device())
        if device == "cuda"
        else torch.device(device),
        seed=settings.seed,
        rank=process.rank,
        world_size=process.world_size,
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
    kind = "allocated" if cuda else "of tensors"
    peak = format_bytes(estimate.peak.allocated or 0)
    note = f"estimated peak of a step: {peak} {kind}"
    if settings.compile:
        note = summarize_compiled(estimate)
    return estimate, [note, *check_memory(estimate, settings, torch.device(device))]


def set_tf32(enabled: bool) -> None:
    """Allow or forbid a GPU to round the factors of float32 products to TF32."""
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled
