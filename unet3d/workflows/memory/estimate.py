"""Estimate the memory of a configured step, as it is and with one thing changed."""

from collections.abc import Iterator, Sequence
from math import prod

from torch import nn

from unet3d.components.dataset import complete_settings, get_network_sizes
from unet3d.config.settings.training import TrainingSettings
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.machine import Precision, resolve_precision
from unet3d.memory.estimate import (
    MemoryEstimate,
    estimate_step,
    refuse_untraceable,
)
from unet3d.units import GIB, format_bytes
from unet3d.workflows.memory.parallel import map_in_processes
from unet3d.workflows.memory.strategies import list_leaner_strategies, resolve_strategy
from unet3d.workflows.memory.training_step import make_step_factory

LARGEST_BATCH_BYTES = 64 * GIB
"""Bytes of a network's input and output; a step takes many times as much."""


def estimate_memory(
    settings: TrainingSettings, volume_size: Sequence[int] | None = None, *, validates: bool = True
) -> MemoryEstimate:
    """Estimate the configured step: for CUDA unless trainer.accelerator=cpu, on any machine."""
    cuda = settings.trainer.accelerator != "cpu"
    check_step_size(settings, volume_size)
    if cuda:  # a GPU computes in the precision that is requested
        precision = Precision(settings.precision, settings.precision)
    else:
        precision = resolve_precision(settings.precision, "cpu")
    settings = resolve_strategy(settings, precision, cuda=cuda)
    return trace_step(settings, precision, cuda=cuda, volume_size=volume_size, validates=validates)


def check_step_size(settings: TrainingSettings, volume_size: Sequence[int] | None = None) -> None:
    """Refuse a step that fits nowhere: tracing it would take hours, tile by tile."""
    data = complete_settings(settings).data
    channels, num_outputs = get_network_sizes(data)
    batch = data.batch_size * prod(data.patch_size)
    needed = 4 * (channels + num_outputs) * max(batch, prod(volume_size or ()))
    if needed > LARGEST_BATCH_BYTES:
        raise DoesNotFitError(
            f"the input and the output of the network alone take {format_bytes(needed)}, which no "
            "device has beside the rest of a step: lower data.batch_size or data.patch_size"
        )


def trace_step(
    settings: TrainingSettings,
    precision: Precision,
    *,
    cuda: bool,
    volume_size: Sequence[int] | None,
    validates: bool = True,
    network: nn.Module | None = None,
) -> MemoryEstimate:
    """Estimate a step; UntraceableError says in one line why that is impossible.

    With compile=true it is that of plain modules: see memory/tables.py. A `network` that has
    been built is not built again.
    """
    step = make_step_factory(
        settings, precision, cuda=cuda, volume_size=volume_size, network=network
    )
    with refuse_untraceable():
        return estimate_step(step, cuda=cuda, validates=validates)


def format_scaled_patch(patch_size: Sequence[int], fraction: float) -> str:
    """Format a patch with sides scaled to multiples of 8 voxels, as the value of an override.

    >>> format_scaled_patch([320, 150, 26], 0.5), format_scaled_patch([320, 150, 26], 1)
    ('[160,72,16]', '[320,150,26]')
    """
    sides = [n if fraction == 1 else max(8, round(n * fraction / 8) * 8) for n in patch_size]
    return f"[{','.join(map(str, sides))}]"


def make_figure_title(settings: TrainingSettings) -> str:
    """Return the title of a figure of the estimated step."""
    choices = settings.composition.choices
    groups = [name for name in ("model", "pool", "checkpointing") if name in choices]
    options = ", ".join(f"{group}={choices[group]}" for group in groups)
    return f"one training step, estimated: {options}, precision={settings.precision}"


def estimate_with_savings(
    settings: TrainingSettings, volume_size: Sequence[int] | None = None
) -> tuple[MemoryEstimate, list[tuple[str, int]]]:
    """Estimate the configured step, and changes of it that cost no quality.

    The second result has (override, saved bytes) of these changes, the largest first.
    """

    def estimate(override: str | None) -> MemoryEstimate | UsageError:
        try:
            if override is None:
                return estimate_memory(settings, volume_size)
            return estimate_memory(settings.with_overrides(override), validates=False)
        except UsageError as error:
            return error

    overrides = list(_list_saving_overrides(settings))
    current, *others = map_in_processes(estimate, [None, *overrides])
    if isinstance(current, UsageError):
        raise current
    found = zip(overrides, others, strict=True)  # an error: this network does not support it
    peaks = [(name, e.peak.allocated or 0) for name, e in found if not isinstance(e, UsageError)]
    savings = [(name, (current.peak.allocated or 0) - peak) for name, peak in peaks]
    return current, sorted((s for s in savings if s[1] > 0), key=lambda item: -item[1])


def _list_saving_overrides(settings: TrainingSettings) -> Iterator[str]:
    if settings.compile:
        yield "compile=false"
    else:
        leaner = list_leaner_strategies(settings)[::-1]  # the leanest take longest to estimate
        yield from (f"checkpointing={name}" for name in leaner)
    if settings.precision == "32":
        yield "precision=bf16"
    if settings.network.name.startswith("naive_"):
        yield f"model={settings.network.name.replace('naive', 'unet')}"
