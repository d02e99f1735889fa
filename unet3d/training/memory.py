"""The memory estimate of a run, before it starts."""

from math import prod

from torch import nn

from unet3d.config.settings.training import TrainingSettings
from unet3d.machine import Precision
from unet3d.memory.estimate import MemoryEstimate, UntraceableError
from unet3d.memory.tables import summarize_compiled
from unet3d.training.datamodule import VolumeDataModule
from unet3d.units import format_bytes
from unet3d.workflows.memory.estimate import trace_step
from unet3d.workflows.memory.oom_advice import check_memory


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
