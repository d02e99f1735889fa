"""Estimate a step from its settings, for a strategy that its network supports."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.checkpointing.recompute import find_blocks
from unet3d.data.dataset import get_network_sizes
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.inference.window_grid import compute_window_starts
from unet3d.machine import Precision
from unet3d.memory.estimate import MemoryEstimate, estimate_step
from unet3d.memory.traced_step import build_fake_network, build_traced_step
from unet3d.step.build import complete_step
from unet3d.step.config import StepConfig
from unet3d.text import GIB, format_bytes
from unet3d.types import WHOLE_MAPS_MIB, HasRetention

LARGEST_BATCH_BYTES = 64 * GIB
"""Bytes of a network's input and output; a step takes many times as much."""

MAX_TRACED_WINDOWS = 5000
"""Windows that are traced in about three minutes."""

LARGER_TILES_MIB = (WHOLE_MAPS_MIB, 256)
"""Tiles that a GPU with room for them computes faster."""

FUSED_STRATEGIES = ("fused", "skips", "lean", "leanest")


def check_step_size(config: StepConfig, volume_size: Sequence[int] | None = None) -> None:
    """Refuse a step that fits nowhere: tracing it would take hours, tile by tile."""
    data = complete_step(config).data
    batch = data.batch_size * prod(data.patch_size)
    needed = 4 * sum(get_network_sizes(data)) * max(batch, prod(volume_size or ()))
    if needed > LARGEST_BATCH_BYTES:
        raise DoesNotFitError(
            f"the input and the output of the network alone take {format_bytes(needed)}, which no "
            "device has beside the rest of a step: lower data.batch_size or data.patch_size"
        )
    if volume_size is not None:
        sides = zip(volume_size, data.patch_size, strict=True)
        starts = [compute_window_starts(*side, config.windows.overlap) for side in sides]
        if (count := prod(map(len, starts))) > MAX_TRACED_WINDOWS:
            raise UsageError(
                f"volume= has {count:,} windows of data.patch_size={list(data.patch_size)}, and an "
                f"estimate follows at most {MAX_TRACED_WINDOWS:,}: set the patch size of a run on "
                "such volumes"
            )


def estimate_resolved_step(
    config: StepConfig,
    precision: Precision,
    *,
    cuda: bool,
    volume_size: Sequence[int] | None = None,
    validates: bool = True,
    network: nn.Module | None = None,
) -> MemoryEstimate:
    """Estimate a step with its configured strategy; UntraceableError says why it is impossible.

    With compile=true it is that of plain modules. A `network` is one that has been built.
    """
    options: Any = {"cuda": cuda, "volume_size": volume_size, "network": network}
    make_step = partial(build_traced_step, config, precision, **options)
    return estimate_step(make_step, cuda=cuda, validates=validates)


def list_strategies(config: StepConfig) -> tuple[str, ...]:
    """Return the strategies that the network supports, from the least work to the least memory."""
    with FakeTensorMode():
        model = build_fake_network(config)
    if isinstance(model, HasRetention):
        return FUSED_STRATEGIES
    return ("none", "blocks") if find_blocks(model) else ("none",)


def scale_patch(patch_size: Sequence[int], fraction: float) -> tuple[int, ...]:
    """Return a patch with sides scaled to multiples of 8 voxels.

    >>> scale_patch([320, 150, 26], 0.5), scale_patch([320, 150, 26], 1)
    ((160, 72, 16), (320, 150, 26))
    """
    return tuple(n if fraction == 1 else max(8, round(n * fraction / 8) * 8) for n in patch_size)


def make_figure_title(config: StepConfig) -> str:
    """Return the title of a figure of the estimated step: what memory depends on the most."""
    network = config.network
    options = {"model": network.name, "pool": network.pool_name, "checkpointing": config.strategy}
    chosen = [f"{group}={option}" for group, option in options.items() if option]
    return f"one training step, estimated: {', '.join(chosen)}, precision={config.precision}"
