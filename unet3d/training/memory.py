"""The memory of a run: its estimate, and the checkpointing strategy that fits."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
from torch import nn

from unet3d.config.settings.training import TrainingSettings
from unet3d.errors import DoesNotFitError
from unet3d.machine import Precision, describe_missing_kernels
from unet3d.memory.estimate import MemoryEstimate, UntraceableError
from unet3d.memory.tables import summarize_compiled
from unet3d.training.datamodule import VolumeDataModule
from unet3d.training.run import TrainingRun
from unet3d.units import format_bytes
from unet3d.workflows.memory.estimate import trace_step
from unet3d.workflows.memory.oom_advice import check_memory
from unet3d.workflows.memory.strategies import list_leaner_strategies, resolve_strategy


def estimate_run_memory(
    settings: TrainingSettings,
    precision: Precision,
    network: nn.Module,
    data: VolumeDataModule,
) -> tuple[MemoryEstimate | None, list[str]]:
    """Estimate the memory of a step; also return what to print of it before the first one."""
    if not settings.memory.estimate:
        return None, []
    cuda = data.device.type == "cuda"
    largest = max((volume.shape for volume in data.validation), key=prod, default=None)
    try:
        estimate = trace_step(settings, precision, cuda=cuda, volume_size=largest, network=network)
    except UntraceableError as reason:
        return None, [str(reason)]
    kind = "allocated" if cuda else "of tensors"
    peak = format_bytes(estimate.peak.allocated or 0)
    note = f"estimated peak of a step: {peak} {kind}"
    if settings.compile:
        note = summarize_compiled(estimate)
    return estimate, [note, *check_memory(estimate, settings, data.device)]


def choose_strategy(
    settings: TrainingSettings, precision: Precision, device: torch.device
) -> tuple[TrainingSettings, list[str]]:
    """Return the settings with the strategy that fits network and device; say if it is another."""
    requested = settings.strategy
    if device.type == "mps":
        settings = settings.with_strategy("none")
    settings = resolve_strategy(settings, precision, cuda=device.type == "cuda")
    missing = describe_missing_kernels(device.type)
    if missing is not None:
        return settings, [missing]
    if requested == settings.strategy:
        return settings, []
    if requested == "auto":
        return settings, [f"checkpointing=auto: using {settings.strategy}"]
    reason = "this network has no fused blocks"
    return settings, [f"checkpointing={requested}: {reason}, using {settings.strategy}"]


def choose_leaner(
    run: TrainingRun, error: DoesNotFitError, log: Callable[[str], None], *, is_auto: bool
) -> TrainingSettings:
    """Return the settings to continue with after a lack of memory; raise if there are none.

    Only a run of one process with checkpointing=auto may choose.
    """
    leaner = list_leaner_strategies(run.settings)
    if not is_auto or run.process.world_size > 1 or not leaner:
        raise error
    saved = run.callbacks.last.saved_step
    log(f"{error}\ncontinuing from step {saved} with checkpointing={leaner[0]}")
    settings = run.settings.with_strategy(leaner[0])
    return replace(settings, resume="auto") if saved else settings
