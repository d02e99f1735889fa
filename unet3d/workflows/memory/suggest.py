"""What fits a card: the combinations to try, and the best batch of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import fill_from_dataset
from unet3d.errors import UsageError
from unet3d.memory.batch_search import CONTEXT, BatchExtrapolation, search_largest_batch
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.record import MemoryRecord
from unet3d.memory.trace import Trace
from unet3d.workflows.memory.estimate import (
    estimate_memory,
    format_scaled_patch,
    parse_cuda_precision,
    with_batch,
    with_overrides,
)
from unet3d.workflows.memory.strategies import list_strategies
from unet3d.workflows.memory.training_step import make_step_factory


@dataclass(frozen=True, kw_only=True)
class MemoryCandidate:
    """Overrides that fit, what they take, and how much more they compute than `none`."""

    overrides: tuple[str, ...]
    batch: int
    voxels: int  # of a patch
    peak: MemoryRecord
    extra_compute: float


def search_configs(
    request: ComposedConfig, budget: int
) -> Iterator[tuple[tuple[str, ...], MemoryCandidate | None]]:
    """Every combination with its best batch, as each is found; None where not even batch 1 fits."""
    pinned = request.is_overridden("data.batch_size")
    for overrides in list_combinations(request):
        trial = with_overrides(request, *overrides)
        found = (check_configured_batch if pinned else find_largest_batch)(trial, budget)
        if found is None:
            yield overrides, None
            continue
        batch, peak = found
        yield (
            overrides,
            MemoryCandidate(
                overrides=(*overrides, *([] if pinned else [f"data.batch_size={batch}"])),
                batch=batch,
                voxels=prod(trial.config.data.patch_size),
                peak=peak,
                extra_compute=measure_extra_compute(request, overrides),
            ),
        )


def list_combinations(request: ComposedConfig) -> list[tuple[str, ...]]:
    """Precision x strategy x patch, leaving alone what the command line says."""
    cfg = request.config
    axes: list[list[tuple[str, ...]]] = []
    if not request.is_overridden("precision"):
        axes.append([(f"precision={p}",) for p in cfg.precisions])
    if not request.is_overridden("checkpointing"):
        chosen = list_strategies(request) if cfg.strategies is None else cfg.strategies
        axes.append([(f"checkpointing={rung}",) for rung in chosen])
    if not request.is_overridden("data.patch_size"):
        axes.append([(f"data.patch_size={p}",) for p in list_patch_sizes(request)])
    return [tuple(word for part in parts for word in part) for parts in product(*axes)]


def list_patch_sizes(request: ComposedConfig) -> list[str]:
    """The configured patch, scaled, in steps of 8 voxels."""
    cfg = request.config
    found: dict[str, None] = {}
    for share in cfg.patches:
        if not 0 < share <= 4:
            raise UsageError(f"patches must be shares of data.patch_size in 0..4, got {share}")
        found[format_scaled_patch(cfg.data.patch_size, share)] = None
    return list(found)


def find_largest_batch(
    trial: ComposedConfig, budget: int, *, most: int | None = None
) -> tuple[int, MemoryRecord] | None:
    """The largest batch that fits, at most `most`, and its peak; None if not even 1 does."""
    if most is not None and most <= 2:  # one trace instead of two
        return check_configured_batch(with_batch(trial, most), budget) or check_configured_batch(
            with_batch(trial, 1), budget
        )
    two, three = (estimate_cached(with_batch(trial, n)) for n in (2, 3))
    any_batch = BatchExtrapolation(two, three)
    if not any_batch.affine:
        said = " ".join(trial.overrides)
        raise UsageError(f"the step's operations change with the batch size for {said}")
    batch = search_largest_batch(any_batch, budget)
    if most is not None:
        batch = min(batch, most)
    if batch >= 2:
        return batch, any_batch.peak(batch)
    return check_configured_batch(with_batch(trial, 1), budget)


def check_configured_batch(trial: ComposedConfig, budget: int) -> tuple[int, MemoryRecord] | None:
    """The batch as it is configured, if it fits."""
    peak = estimate_cached(trial).peak
    if (peak.reserved or 0) + CONTEXT > budget:
        return None
    return trial.config.data.batch_size, peak


_last: dict[str, MemoryEstimate] = {}


def estimate_cached(trial: ComposedConfig) -> MemoryEstimate:
    """Forecast a step, or return the last forecast if it was of the same config.

    A search asks twice in a row, and a trace takes seconds.
    """
    fill_from_dataset(trial.config)
    config = OmegaConf.to_yaml(trial.config, resolve=False)
    key = f"{torch.cuda.is_available()} {dict(trial.choices)} {config}"
    if key not in _last:
        found = estimate_memory(trial)
        _last.clear()
        _last[key] = found
    return _last[key]


def measure_extra_compute(request: ComposedConfig, overrides: tuple[str, ...]) -> float:
    """The convolution work of a step beyond that of checkpointing=none, as a share of it."""
    strategy = tuple(word for word in overrides if word.startswith("checkpointing"))
    if not strategy and request.choices.get("checkpointing", "none") == "none":
        return 0.0
    small = ("data.batch_size=1", "precision=32")
    return _work(request, strategy + small) / _work(request, ("checkpointing=none", *small)) - 1


_known: dict[tuple[str, ...], int] = {}


def _work(request: ComposedConfig, overrides: tuple[str, ...]) -> int:
    """Floating-point operations of one training step."""
    key = (*request.overrides, *overrides)
    if key not in _known:
        trial = with_overrides(request, *overrides)
        with FakeTensorMode():
            step = make_step_factory(trial, parse_cuda_precision(trial.config), cuda=True)()
            with FlopCounterMode(display=False) as counter:
                step.train(Trace(cuda=True))
        _known[key] = counter.get_total_flops()
    return _known[key]
