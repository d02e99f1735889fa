"""Search the configs that fit a memory budget, and the largest batch of each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from unet3d.config.fields import number, word_or
from unet3d.errors import UsageError
from unet3d.machine import Precision, get_available_bytes
from unet3d.memory.estimate import (
    LARGEST_BATCH,
    MemoryEstimate,
    add_context_bytes,
    find_fitting_batch,
)
from unet3d.memory.from_config import check_step_size, estimate_configured_step
from unet3d.memory.trace import Trace
from unet3d.memory.traced_step import make_step_factory
from unet3d.peak_memory import MemoryRecord
from unet3d.step.config import StepConfig
from unet3d.text import GIB
from unet3d.types import Triple

BUDGET = word_or("auto", number("above 0"))

Changes = dict[str, Any]
"""Other values, by key."""


@dataclass(frozen=True)
class MemoryCandidate:
    """Changes that fit, what they take, and how much they compute beyond plain modules."""

    changes: Changes
    patch_voxels: int
    batch_size: int
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
    return int(budget_gib * GIB)


def search_configs(
    config: StepConfig,
    combinations: Sequence[Changes],
    budget: int,
    compute_max_batch_size: Callable[[Triple], int] | None,
) -> Iterator[tuple[Changes, MemoryCandidate | None]]:
    """Yield every combination with its largest batch; None where not even batch size 1 fits.

    `compute_max_batch_size` returns the largest batch that is of use for a patch; None keeps the
    configured batch.
    """
    check_step_size(config.vary({"data.batch_size": 1}))

    def evaluate(changes: Changes) -> MemoryCandidate | None:
        variant = config.vary(changes)
        patch = variant.data.patch_size
        if compute_max_batch_size is None:
            result = check_configured_batch(variant, budget)
        else:
            result = find_largest_batch(variant, budget, limit=compute_max_batch_size(patch))
            changes = changes | ({} if result is None else {"data.batch_size": result[0]})
        extra = flops[variant.strategy] / flops["none"] - 1
        return None if result is None else MemoryCandidate(changes, prod(patch), *result, extra)

    chosen = [changes.get("checkpointing", config.strategy) for changes in combinations]
    strategies = list(dict.fromkeys(["none", *chosen]))
    counts = map(partial(count_flops, config), strategies)
    flops = dict(zip(strategies, counts, strict=True))
    yield from zip(combinations, map(evaluate, combinations), strict=True)


def find_largest_batch(
    config: StepConfig, budget: int, *, limit: int = LARGEST_BATCH
) -> tuple[int, MemoryRecord] | None:
    """Return the largest batch that fits, at most `limit`, and its peak; None if 1 does not."""

    def estimate(batch: int) -> MemoryEstimate:
        return estimate_cached(config.vary({"data.batch_size": batch}))

    return find_fitting_batch(estimate, budget, limit)


def check_configured_batch(config: StepConfig, budget: int) -> tuple[int, MemoryRecord] | None:
    """Return the configured batch size and its peak; None if it does not fit."""
    peak = estimate_cached(config).peak
    return (config.data.batch_size, peak) if add_context_bytes(peak) <= budget else None


_last: list[tuple[StepConfig, MemoryEstimate]] = []


def estimate_cached(config: StepConfig) -> MemoryEstimate:
    """Estimate a step once: a search asks twice in a row, and a trace takes seconds."""
    if not _last or _last[0][0] != config:
        _last[:] = [(config, estimate_configured_step(config, validates=False))]
    return _last[0][1]


def count_flops(config: StepConfig, strategy: str) -> int:
    """Return the floating-point operations of one training step with a strategy."""
    variant = config.vary({"data.batch_size": 1, "precision": "32"})
    if strategy != config.strategy:
        variant = variant.with_strategy(strategy)
    precision = Precision(variant.precision, variant.precision)
    with FakeTensorMode():
        step = make_step_factory(variant, precision, cuda=True)()
        with FlopCounterMode(display=False) as counter:
            step.train(Trace(cuda=True))
    return counter.get_total_flops()
