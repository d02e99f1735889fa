"""Estimate the memory of a configured step, as it is and with one thing changed."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import nn

from unet3d.config.compose import format_overrides
from unet3d.data.dataset import get_network_sizes
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.machine import Precision, resolve_precision
from unet3d.memory.estimate import (
    MemoryEstimate,
    estimate_step,
    refuse_untraceable,
)
from unet3d.memory.step.build import complete_step
from unet3d.memory.step.config import StepConfig
from unet3d.memory.step.training_step import make_step_factory
from unet3d.memory.strategies import list_leaner_strategies, resolve_strategy
from unet3d.parallel import map_in_processes
from unet3d.text import GIB, format_bytes

LARGEST_BATCH_BYTES = 64 * GIB
"""Bytes of a network's input and output; a step takes many times as much."""


def estimate_memory(
    config: StepConfig, volume_size: Sequence[int] | None = None, *, validates: bool = True
) -> MemoryEstimate:
    """Estimate the configured step: for CUDA unless trainer.accelerator=cpu, on any machine."""
    cuda = config.accelerator != "cpu"
    check_step_size(config, volume_size)
    if cuda:  # a GPU computes in the precision that is requested
        precision = Precision(config.precision, config.precision)
    else:
        precision = resolve_precision(config.precision, "cpu")
    config = resolve_strategy(config, precision, cuda=cuda)
    return trace_step(config, precision, cuda=cuda, volume_size=volume_size, validates=validates)


def check_step_size(config: StepConfig, volume_size: Sequence[int] | None = None) -> None:
    """Refuse a step that fits nowhere: tracing it would take hours, tile by tile."""
    data = complete_step(config).data
    channels, num_outputs = get_network_sizes(data)
    batch = data.batch_size * prod(data.patch_size)
    needed = 4 * (channels + num_outputs) * max(batch, prod(volume_size or ()))
    if needed > LARGEST_BATCH_BYTES:
        raise DoesNotFitError(
            f"the input and the output of the network alone take {format_bytes(needed)}, which no "
            "device has beside the rest of a step: lower data.batch_size or data.patch_size"
        )


def trace_step(
    config: StepConfig,
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
    step = make_step_factory(config, precision, cuda=cuda, volume_size=volume_size, network=network)
    with refuse_untraceable():
        return estimate_step(step, cuda=cuda, validates=validates)


def scale_patch(patch_size: Sequence[int], fraction: float) -> tuple[int, ...]:
    """Return a patch with sides scaled to multiples of 8 voxels.

    >>> scale_patch([320, 150, 26], 0.5), scale_patch([320, 150, 26], 1)
    ((160, 72, 16), (320, 150, 26))
    """
    return tuple(n if fraction == 1 else max(8, round(n * fraction / 8) * 8) for n in patch_size)


def make_figure_title(config: StepConfig) -> str:
    """Return the title of a figure of the estimated step."""
    return f"one training step, estimated: {config.format_options()}, precision={config.precision}"


def estimate_with_savings(
    config: StepConfig, volume_size: Sequence[int] | None = None
) -> tuple[MemoryEstimate, list[tuple[str, int]]]:
    """Estimate the configured step, and changes of it that cost no quality.

    The second result has (override, saved bytes) of these changes, the largest first.
    """

    def estimate(values: Mapping[str, Any] | None) -> MemoryEstimate | UsageError:
        try:
            if values is None:
                return estimate_memory(config, volume_size)
            return estimate_memory(config.vary(values), validates=False)
        except UsageError as error:
            return error

    changes = list(_list_savings(config))
    current, *others = map_in_processes(estimate, [None, *changes])
    if isinstance(current, UsageError):
        raise current
    names = map(format_overrides, changes)
    found = zip(names, others, strict=True)  # an error: this network does not support it
    peaks = [(name, e.peak.allocated or 0) for name, e in found if not isinstance(e, UsageError)]
    savings = [(name, (current.peak.allocated or 0) - peak) for name, peak in peaks]
    return current, sorted((s for s in savings if s[1] > 0), key=lambda item: -item[1])


def _list_savings(config: StepConfig) -> Iterator[dict[str, Any]]:
    if config.compile:
        yield {"compile": False}
    else:
        leaner = list_leaner_strategies(config)[::-1]  # the leanest take longest to estimate
        yield from ({"checkpointing": name} for name in leaner)
    if config.precision == "32":
        yield {"precision": "bf16"}
    if config.network.name.startswith("naive_"):
        yield {"model": config.network.name.replace("naive", "unet")}
