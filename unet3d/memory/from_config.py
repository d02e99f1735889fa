"""Estimate a configured step: with the checkpointing strategy that fits, and with changes."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.checkpointing.recompute import find_blocks
from unet3d.config.compose import format_overrides
from unet3d.data.dataset import get_network_sizes
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.inference.window_grid import compute_window_starts
from unet3d.machine import Precision, get_available_bytes, resolve_precision
from unet3d.memory.estimate import MemoryEstimate, add_context_bytes, estimate_step
from unet3d.memory.traced_step import build_fake_network, make_step_factory
from unet3d.peak_memory import MemoryRecord
from unet3d.step.build import complete_step
from unet3d.step.config import StepConfig
from unet3d.step.training_step import build_configured_step, measure_phases
from unet3d.text import GIB, format_bytes
from unet3d.types import WHOLE_MAPS_MIB, HasRetention

LARGEST_BATCH_BYTES = 64 * GIB
"""Bytes of a network's input and output; a step takes many times as much."""

MAX_TRACED_WINDOWS = 5000
"""Windows that are traced in about three minutes."""

LARGER_TILES_MIB = (WHOLE_MAPS_MIB, 256)
"""Tiles that a GPU with room for them computes faster."""

FUSED_STRATEGIES = ("fused", "skips", "lean", "leanest")


def estimate_configured_step(
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
    return estimate_resolved_step(
        config, precision, cuda=cuda, volume_size=volume_size, validates=validates
    )


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
    step = make_step_factory(config, precision, cuda=cuda, volume_size=volume_size, network=network)
    return estimate_step(step, cuda=cuda, validates=validates)


def measure_step(config: StepConfig) -> dict[str, MemoryRecord]:
    """Run the configured step on this machine's GPU, and return the peak of each phase."""
    precision = resolve_precision(config.precision, "cuda")
    config = resolve_strategy(config, precision, cuda=True)
    device = torch.device("cuda")
    return measure_phases(build_configured_step(config, device), device)


def list_strategies(config: StepConfig) -> tuple[str, ...]:
    """Return the strategies that the network supports, from the least work to the least memory."""
    with FakeTensorMode():
        model = build_fake_network(config)
    if isinstance(model, HasRetention):
        return FUSED_STRATEGIES
    return ("none", "blocks") if find_blocks(model) else ("none",)


def list_leaner_strategies(config: StepConfig) -> tuple[str, ...]:
    """Return the strategies that need less memory than the configured one."""
    strategies, current = list_strategies(config), config.strategy
    if config.compile:  # compiled, fused blocks run as `none`
        strategies = tuple(name for name in strategies if name not in FUSED_STRATEGIES)
    if current == "none" and "fused" in strategies:
        return strategies
    return strategies[strategies.index(current) + 1 :] if current in strategies else ()


def resolve_fused(config: StepConfig) -> StepConfig:
    """Replace `checkpointing=fused` for a network without fused blocks."""
    if config.strategy != "fused" or "fused" in list_strategies(config):
        return config
    return config.with_strategy("none")


def resolve_strategy(config: StepConfig, precision: Precision, *, cuda: bool) -> StepConfig:
    """Replace `checkpointing=auto`, and `fused` for a network without fused blocks or compiled.

    `auto` becomes the first strategy that is estimated to fit the device, or else the leanest.
    """
    if config.compile and config.strategy in ("auto", *FUSED_STRATEGIES):
        return config.with_strategy("none")  # what the blocks run when compiled
    if config.strategy != "auto":
        return resolve_fused(config)
    strategies = list_strategies(config)
    available = None
    if not cuda or torch.cuda.is_available():
        available = get_available_bytes(torch.device("cuda" if cuda else "cpu"))
    if available is None:
        raise UsageError(
            "checkpointing=auto needs to know the GPU's memory, and this machine has no GPU: use "
            f"checkpointing={', '.join(strategies)} or trainer.accelerator=cpu"
        )

    for name in strategies[:-1]:
        candidate = config.with_strategy(name)
        estimate = estimate_resolved_step(candidate, precision, cuda=cuda, validates=False)
        if add_context_bytes(estimate.peak) <= available:
            return candidate
    return config.with_strategy(strategies[-1])


def estimate_with_savings(
    config: StepConfig, volume_size: Sequence[int] | None = None
) -> tuple[MemoryEstimate, list[tuple[str, int]]]:
    """Estimate the step; also return (override, saved bytes) of changes that cost no quality."""

    def estimate(values: Mapping[str, Any]) -> MemoryEstimate | UsageError:
        try:
            return estimate_configured_step(config.vary(values), volume_size, validates=not values)
        except UsageError as error:  # of a change: this network does not support it
            return error

    changes: list[dict[str, Any]] = [{"compile": False}]
    if not config.compile:
        changes = [{"checkpointing": name} for name in list_leaner_strategies(config)[-1:]]
    if config.precision == "32":
        changes.append({"precision": "bf16"})
    if config.network.name.startswith("naive_"):
        changes.append({"model": config.network.name.replace("naive", "unet")})
    current, *others = map(estimate, [{}, *changes])
    if isinstance(current, UsageError):
        raise current
    savings = [
        (format_overrides(change), current.allocated - other.allocated)
        for change, other in zip(changes, others, strict=True)
        if not isinstance(other, UsageError) and other.allocated < current.allocated
    ]
    return current, sorted(savings, key=lambda saving: -saving[1])


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
