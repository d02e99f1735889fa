"""Search the configs that fit a memory budget, and the largest batch of each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from unet3d.config.settings.memory import SuggestSettings
from unet3d.config.settings.training import TrainingSettings
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.machine import Precision, get_available_bytes
from unet3d.memory.batch_search import BatchExtrapolation, search_largest_batch
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.record import MemoryRecord
from unet3d.memory.trace import Trace
from unet3d.types import Triple
from unet3d.units import CUDA_CONTEXT_BYTES, GIB, format_bytes
from unet3d.workflows.memory.estimate import check_step_size, estimate_memory, format_scaled_patch
from unet3d.workflows.memory.parallel import map_in_processes
from unet3d.workflows.memory.strategies import list_strategies
from unet3d.workflows.memory.training_step import make_step_factory

PLAIN = "checkpointing=none"


@dataclass(frozen=True, kw_only=True)
class MemoryCandidate:
    """Overrides that fit, what they take, and how much they compute beyond plain modules."""

    overrides: tuple[str, ...]
    batch_size: int
    patch_voxels: int
    peak: MemoryRecord
    extra_compute: float


def get_budget_bytes(budget_gib: float | None) -> int:
    """Return a budget in bytes; None is what this machine's GPU has left for a process."""
    if budget_gib is None:
        if not torch.cuda.is_available():
            raise UsageError("budget_gib=auto: torch finds no GPU; give the GPU's memory in GiB")
        available = get_available_bytes(torch.device("cuda"))
        assert available is not None
        return available
    if budget_gib * GIB <= CUDA_CONTEXT_BYTES:
        context = format_bytes(CUDA_CONTEXT_BYTES)
        raise DoesNotFitError(
            f"budget_gib={budget_gib:g} is too small: the CUDA context alone takes about {context}"
        )
    return int(budget_gib * GIB)


def search_configs(
    settings: SuggestSettings, budget: int, limit_batch: Callable[[Triple], int]
) -> Iterator[tuple[tuple[str, ...], MemoryCandidate | None]]:
    """Yield every combination with its largest batch; None where not even batch size 1 fits.

    `limit_batch` returns the largest batch of a patch that is of use.
    """
    training = settings.training
    check_step_size(training.with_batch_size(1))
    is_batch_given = training.composition.is_overridden("data.batch_size")

    def evaluate(overrides: tuple[str, ...]) -> MemoryCandidate | None:
        variant = training.with_overrides(*overrides)
        if is_batch_given:
            result = check_configured_batch(variant, budget)
        else:
            result = find_largest_batch(variant, budget, limit=limit_batch(variant.data.patch_size))
        if result is None:
            return None
        batch_size, peak = result
        batch = [] if is_batch_given else [f"data.batch_size={batch_size}"]
        return MemoryCandidate(
            overrides=(*overrides, *batch),
            batch_size=batch_size,
            patch_voxels=prod(variant.data.patch_size),
            peak=peak,
            extra_compute=flops[find_strategy(overrides)] / flops[PLAIN] - 1,
        )

    combinations = list_combinations(settings)
    strategies = list(dict.fromkeys([PLAIN, *map(find_strategy, combinations)]))
    counts = map_in_processes(partial(count_flops, training), strategies)
    flops = dict(zip(strategies, counts, strict=True))
    yield from zip(combinations, map_in_processes(evaluate, combinations), strict=True)


def list_combinations(settings: SuggestSettings) -> list[tuple[str, ...]]:
    """Return precision x strategy x patch, except for what the command line sets."""
    training = settings.training
    is_overridden = training.composition.is_overridden
    axes: list[list[str]] = []
    if not is_overridden("precision"):
        axes.append([f"precision={p}" for p in settings.precisions])
    if not is_overridden("checkpointing"):
        names = settings.strategies or list_strategies(training)
        axes.append([f"checkpointing={name}" for name in names])
    if not is_overridden("data.patch_size"):
        sizes = [format_scaled_patch(training.data.patch_size, f) for f in settings.patches]
        axes.append([f"data.patch_size={size}" for size in dict.fromkeys(sizes)])
    return list(product(*axes))


def find_largest_batch(
    settings: TrainingSettings, budget: int, *, limit: int | None = None
) -> tuple[int, MemoryRecord] | None:
    """Return the largest batch that fits, at most `limit`, and its peak; None if 1 does not."""
    if limit is not None and limit <= 2:  # one trace instead of two
        return check_configured_batch(
            settings.with_batch_size(limit), budget
        ) or check_configured_batch(settings.with_batch_size(1), budget)
    two, three = (estimate_cached(settings.with_batch_size(n)) for n in (2, 3))
    extrapolation = BatchExtrapolation(two, three)
    if not extrapolation.affine:
        overrides = " ".join(settings.composition.overrides) or "this network"
        raise UsageError(
            f"cannot compute the largest batch for {overrides}: the network allocates differently "
            "at batch sizes 2 and 3; try sizes one by one with unet3d memory data.batch_size=N"
        )
    batch_size = search_largest_batch(extrapolation, budget)
    if limit is not None:
        batch_size = min(batch_size, limit)
    if batch_size >= 2:
        return batch_size, extrapolation.peak(batch_size)
    return check_configured_batch(settings.with_batch_size(1), budget)


def check_configured_batch(
    settings: TrainingSettings, budget: int
) -> tuple[int, MemoryRecord] | None:
    """Return the configured batch size and its peak; None if it does not fit."""
    peak = estimate_cached(settings).peak
    if (peak.reserved or 0) + CUDA_CONTEXT_BYTES > budget:
        return None
    return settings.data.batch_size, peak


_last: list[tuple[TrainingSettings, bool, MemoryEstimate]] = []


def estimate_cached(settings: TrainingSettings) -> MemoryEstimate:
    """Estimate a step, or return the last estimate if it was of the same settings.

    A search asks twice in a row, and a trace takes seconds.
    """
    has_gpu = torch.cuda.is_available()
    if not _last or _last[0][:2] != (settings, has_gpu):
        estimate = estimate_memory(settings, validates=False)
        _last[:] = [(settings, has_gpu, estimate)]
    return _last[0][2]


def find_strategy(overrides: tuple[str, ...]) -> str:
    """Return the override of the checkpointing strategy; empty if it is not overridden."""
    return next((o for o in overrides if o.startswith("checkpointing=")), "")


def count_flops(settings: TrainingSettings, strategy: str) -> int:
    """Return the floating-point operations of one training step with a strategy."""
    words = [strategy] if strategy else []
    variant = settings.with_overrides(*words, "data.batch_size=1", "precision=32")
    precision = Precision(variant.precision, variant.precision)
    with FakeTensorMode():
        step = make_step_factory(variant, precision, cuda=True)()
        with FlopCounterMode(display=False) as counter:
            step.train(Trace(cuda=True))
    return counter.get_total_flops()
