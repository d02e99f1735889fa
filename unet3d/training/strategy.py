"""The checkpointing strategy of a run."""

from collections.abc import Callable
from dataclasses import replace

import torch

from unet3d.config.settings.training import TrainingSettings
from unet3d.errors import DoesNotFitError
from unet3d.machine import Precision, describe_missing_kernels
from unet3d.training.run import TrainingRun
from unet3d.workflows.memory.strategies import list_leaner_strategies, resolve_strategy


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
