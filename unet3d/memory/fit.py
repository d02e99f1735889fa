"""Estimate the configured step, and search what fits: changes in one order, and a batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from unet3d.checkpointing.mednext import is_mednext_block
from unet3d.checkpointing.recompute import find_blocks
from unet3d.config.compose import format_overrides
from unet3d.config.fields import number, word_or
from unet3d.data.dataset import get_network_sizes
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.inference.window_grid import compute_window_starts
from unet3d.machine import Precision, get_available_bytes, resolve_precision
from unet3d.memory.batches import LARGEST_BATCH, find_fitting_batch
from unet3d.memory.estimate import MemoryEstimate, add_context_bytes, trace_step
from unet3d.memory.fake_tensors import SmallRangeMode, use_fake_tensors
from unet3d.memory.traced_step import build_traced_step
from unet3d.peak_memory import MemoryRecord
from unet3d.step.build import build_network, complete_step
from unet3d.step.config import StepConfig
from unet3d.step.training_step import build_configured_step, measure_phases
from unet3d.text import GIB, format_bytes
from unet3d.types import WHOLE_MAPS_MIB, HasRetention

Changes = dict[str, Any]
"""Other values, by key."""

LARGEST_BATCH_BYTES = 64 * GIB
"""Bytes of a network's input and output; a step takes many times as much."""

MAX_TRACED_WINDOWS = 5000
"""Windows that are traced in about three minutes."""

LARGER_TILES_MIB = (WHOLE_MAPS_MIB, 256)
"""Tiles that a GPU with room for them computes faster."""

FUSED_STRATEGIES = ("fused", "skips", "lean", "leanest")

BUDGET = word_or("auto", number("above 0"))

ROOM_FOR_LARGER_TILES = 0.8
"""Fraction of the available memory that a step may need with larger tiles than it has to have."""

SMALLER_TILE_MIB = 16


def get_budget_bytes(budget_gib: float | None) -> int:
    """Return a budget in bytes; None is what this machine's GPU has left for a process."""
    if budget_gib is None:
        if not torch.cuda.is_available():
            raise UsageError("budget_gib=auto: torch finds no GPU; give the GPU's memory in GiB")
        available = get_available_bytes(torch.device("cuda"))
        assert available is not None
        return available
    return int(budget_gib * GIB)


# What to give up.


def list_strategies(config: StepConfig) -> tuple[str, ...]:
    """Return the strategies that the network supports, from the least work to the least memory."""
    with use_fake_tensors(), SmallRangeMode():
        model = build_network(config)
    if isinstance(model, HasRetention):
        return FUSED_STRATEGIES
    if any(map(is_mednext_block, model.modules())):
        return "none", "fused", "lean"
    return ("none", "blocks") if find_blocks(model) else ("none",)


def scale_patch(patch_size: Sequence[int], fraction: float) -> tuple[int, ...]:
    """Return a patch with sides scaled to multiples of 8 voxels.

    >>> scale_patch([320, 150, 26], 0.5), scale_patch([320, 150, 26], 1)
    ((160, 72, 16), (320, 150, 26))
    """
    return tuple(n if fraction == 1 else max(8, round(n * fraction / 8) * 8) for n in patch_size)


def list_leaner_strategies(config: StepConfig) -> tuple[str, ...]:
    """Return the strategies that compute more than the configured one, to need less memory."""
    strategies, current = list_strategies(config), config.strategy
    if config.compile:  # compiled, fused blocks run as `none`
        strategies = tuple(name for name in strategies if name not in FUSED_STRATEGIES)
    if current == "none" and "fused" in strategies:
        return strategies
    return strategies[strategies.index(current) + 1 :] if current in strategies else ()


def list_concessions(config: StepConfig) -> list[Changes]:
    """Return changes that save memory; those that change training least come first."""
    data = config.data
    strategies = [{"checkpointing": name} for name in list_leaner_strategies(config)]
    leanest = strategies[-1] if strategies else {}
    half, one = ({"data.batch_size": n} for n in (max(1, data.batch_size // 2), 1))
    smaller, bf16 = list_validation_concessions(config)
    return [
        *strategies,
        bf16,
        half,
        leanest | bf16,
        leanest | half,
        leanest | bf16 | half,
        leanest | bf16 | one,
        leanest | bf16 | one | smaller,
    ]


def list_validation_concessions(config: StepConfig) -> list[Changes]:
    """Return changes that save memory in the validation of large volumes."""
    smaller = tuple(max(8, n // 16 * 8) for n in config.data.patch_size)
    return [{"data.patch_size": smaller}, {"precision": "bf16"}]


def list_run_options(config: StepConfig, *, has_graphs: bool, has_tiles: bool) -> list[Changes]:
    """Return what a run may choose of a step, the fastest first: CUDA graphs, and larger tiles.

    With `has_tiles`, the size of tiles is open; the last choice is smaller ones.
    """
    graphs = {"cuda_graph": has_graphs}
    options = [{**graphs, "checkpointing.tile_mib": mib} for mib in LARGER_TILES_MIB]
    options = [*(options if has_tiles else []), graphs]
    if has_graphs and config.cuda_graph == "auto":
        options.append({"cuda_graph": False})
    if has_tiles:
        options.append({**options[-1], "checkpointing.tile_mib": SMALLER_TILE_MIB})
    return options


# The search.


def try_changes(
    config: StepConfig,
    candidates: Iterable[Changes],
    estimate: Callable[[StepConfig], MemoryEstimate],
) -> Iterator[tuple[Changes, MemoryEstimate | UsageError]]:
    """Estimate the step with each of the changes when it is asked for, each combination once."""
    tried: list[Changes] = []
    for candidate in candidates:
        changes = candidate
        try:
            changes = {k: v for k, v in candidate.items() if config.vary({k: v}) != config}
            if changes in tried:
                continue
            tried.append(changes)
            result = estimate(config.vary(changes))
        except UsageError as error:  # this network or this patch does not support it
            result = error
        yield changes, result


def fits(changes: Changes, estimate: MemoryEstimate, budget: int | None) -> bool:
    """Return whether a step with these changes fits; None is an unknown budget."""
    is_larger = changes.get("checkpointing.tile_mib") in LARGER_TILES_MIB
    share = ROOM_FOR_LARGER_TILES if is_larger else 1
    return budget is None or add_context_bytes(estimate.run_peak) <= share * budget


def search(
    config: StepConfig,
    candidates: Iterable[Changes],
    budget: int,
    volume_size: Sequence[int] | None = None,
) -> Iterator[tuple[Changes, MemoryEstimate]]:
    """Yield the changes with which a run is estimated to fit a device, in their order."""
    estimate = partial(estimate_configured_step, volume_size=volume_size)
    for changes, result in try_changes(config, candidates, estimate):
        if not isinstance(result, UsageError) and fits(changes, result, budget):
            yield changes, result


def resolve_fused(config: StepConfig) -> StepConfig:
    """Replace `checkpointing=fused` for a network without fused blocks."""
    if config.strategy != "fused" or "fused" in list_strategies(config):
        return config
    return config.with_strategy("none")


def resolve_strategy(config: StepConfig, precision: Precision, *, cuda: bool) -> StepConfig:
    """Replace `checkpointing=auto`, and `fused` for a network without fused blocks or compiled.

    `auto` becomes the first strategy that is estimated to fit the device, or else the one that is
    estimated to need the least.
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
    if len(strategies) == 1:
        return config.with_strategy(strategies[0])

    needed: dict[str, int] = {}
    for name in strategies:
        step = config.with_strategy(name)
        estimate = estimate_resolved_step(step, precision, cuda=cuda)
        needed[name] = add_context_bytes(estimate.run_peak)
        if needed[name] <= available:
            return step
    return config.with_strategy(min(needed, key=needed.__getitem__))


# The configured step.


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
    count = 1 if volume_size is None else count_windows(config, volume_size)
    if count > MAX_TRACED_WINDOWS:
        raise UsageError(
            f"volume= has {count:,} windows of data.patch_size={list(data.patch_size)}, and an "
            f"estimate follows at most {MAX_TRACED_WINDOWS:,}: set the patch size of a run on "
            "such volumes"
        )


def count_windows(config: StepConfig, volume_size: Sequence[int]) -> int:
    """Return the number of windows in which a volume is validated."""
    sides = zip(volume_size, config.data.patch_size, strict=True)
    return prod(len(compute_window_starts(*side, config.windows.overlap)) for side in sides)


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
    return trace_step(make_step, cuda=cuda, validates=validates)


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


def measure_step(config: StepConfig) -> dict[str, MemoryRecord]:
    """Run the configured step on this machine's GPU, and return the peak of each phase."""
    precision = resolve_precision(config.precision, "cuda")
    config = resolve_strategy(config, precision, cuda=True)
    device = torch.device("cuda")
    return measure_phases(build_configured_step(config, device), device)


def estimate_with_savings(
    config: StepConfig, volume_size: Sequence[int] | None = None
) -> tuple[MemoryEstimate, list[tuple[str, int]]]:
    """Estimate the step; also return (override, saved bytes) of changes that cost no quality."""
    changes: list[Changes] = [{"compile": False}]
    if not config.compile:
        changes = [{"checkpointing": name} for name in list_leaner_strategies(config)[-1:]]
    if config.precision == "32":
        changes.append({"precision": "bf16"})
    if config.network.name.startswith("plain_"):
        changes.append({"model": config.network.name.replace("plain", "unet")})

    def estimate(step: StepConfig) -> MemoryEstimate:
        return estimate_configured_step(step, volume_size, validates=False)

    current = estimate_configured_step(config, volume_size)
    savings = [
        (format_overrides(change), current.allocated - other.allocated)
        for change, other in try_changes(config, changes, estimate)
        if not isinstance(other, UsageError) and other.allocated < current.allocated
    ]
    return current, sorted(savings, key=lambda saving: -saving[1])


# The largest batch.


def find_largest_batch(
    config: StepConfig, budget: int, *, limit: int = LARGEST_BATCH
) -> tuple[int, MemoryRecord] | None:
    """Return the largest batch that fits, at most `limit`, and its peak; None if 1 does not."""
    return find_fitting_batch(
        lambda batch: estimate_cached(config.vary({"data.batch_size": batch})), budget, limit
    )


def check_configured_batch(config: StepConfig, budget: int) -> tuple[int, MemoryRecord] | None:
    """Return the configured batch size and its peak; None if it does not fit."""
    peak = estimate_cached(config).run_peak
    return (config.data.batch_size, peak) if add_context_bytes(peak) <= budget else None


_last: list[tuple[StepConfig, MemoryEstimate]] = []


def estimate_cached(config: StepConfig) -> MemoryEstimate:
    """Estimate a step once: a search asks twice in a row, and a trace takes seconds."""
    if not _last or _last[0][0] != config:
        _last[:] = [(config, estimate_configured_step(config))]
    return _last[0][1]
