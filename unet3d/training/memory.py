"""The memory of a run: its estimate, and the checkpointing strategy that fits."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
from torch import nn

from unet3d.errors import DoesNotFitError
from unet3d.machine import Precision, describe_missing_kernels
from unet3d.memory.estimate import MemoryEstimate, UntraceableError
from unet3d.memory.from_config import trace_step
from unet3d.memory.oom_advice import check_memory
from unet3d.memory.step.config import StepConfig
from unet3d.memory.strategies import list_leaner_strategies, resolve_strategy
from unet3d.memory.tables import summarize_compiled
from unet3d.text import format_bytes
from unet3d.training.config import TrainConfig
from unet3d.training.datamodule import VolumeDataModule
from unet3d.training.run import TrainingRun


def estimate_run_memory(
    settings: TrainConfig,
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
        estimate = trace_step(
            settings.step, precision, cuda=cuda, volume_size=largest, network=network
        )
    except UntraceableError as reason:
        return None, [str(reason)]
    kind = "allocated" if cuda else "of tensors"
    peak = format_bytes(estimate.peak.allocated or 0)
    note = f"estimated peak of a step: {peak} {kind}"
    if settings.step.compile:
        note = summarize_compiled(estimate)
    warnings = check_memory(
        estimate,
        settings.step,
        data.device,
        if_too_large=settings.memory.if_too_large,
        sweeping=settings.composition.sweeping,
    )
    return estimate, [note, *warnings]


def choose_strategy(
    step: StepConfig, precision: Precision, device: torch.device
) -> tuple[StepConfig, list[str]]:
    """Return the step with the strategy that fits network and device; say if it is another."""
    requested = step.strategy
    if device.type == "mps":
        step = step.with_strategy("none")
    step = resolve_strategy(step, precision, cuda=device.type == "cuda")
    missing = describe_missing_kernels(device.type)
    if missing is not None:
        return step, [missing]
    if requested == step.strategy:
        return step, []
    reason = "" if requested == "auto" else " this network has no fused blocks,"
    return step, [f"checkpointing={requested}:{reason} using {step.strategy}"]


def choose_leaner(
    run: TrainingRun, error: DoesNotFitError, log: Callable[[str], None], *, is_auto: bool
) -> TrainConfig:
    """Return the settings to continue with after a lack of memory; raise if there are none.

    Only a run of one process with checkpointing=auto may choose.
    """
    leaner = list_leaner_strategies(run.settings.step)
    if not is_auto or run.process.world_size > 1 or not leaner:
        raise error
    saved = run.callbacks.last.saved_step
    log(f"{error}\ncontinuing from step {saved} with checkpointing={leaner[0]}")
    settings = replace(run.settings, step=run.settings.step.with_strategy(leaner[0]))
    return replace(settings, resume="auto") if saved else settings
