"""`unet3d suggest budget_gib=24`: find configs that fit a GPU, as override lines to paste."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from torch.utils.flop_counter import FlopCounterMode

from unet3d.config.compose import ComposedConfig, format_overrides, list_options
from unet3d.config.fields import (
    PRECISION,
    integer,
    list_of,
    number,
    one_of,
    one_or_list_of,
    read_settings,
    word_or,
)
from unet3d.errors import UsageError
from unet3d.files import write_output
from unet3d.machine import Precision
from unet3d.memory.fake_tensors import use_fake_tensors
from unet3d.memory.fit import (
    BUDGET,
    Changes,
    check_configured_batch,
    check_step_size,
    find_largest_batch,
    get_budget_bytes,
    list_strategies,
    scale_patch,
)
from unet3d.memory.report import format_mib
from unet3d.memory.trace import Trace
from unet3d.memory.traced_step import build_traced_step
from unet3d.peak_memory import MemoryRecord
from unet3d.planning.planner import make_batch_limit
from unet3d.step.config import StepConfig
from unet3d.text import GIB, format_columns
from unet3d.training.config import TrainConfig, parse_train_config

PATCHES = one_or_list_of(number("above 0", "<= 4"), "fractions of data.patch_size in 0..4")
STRATEGIES = word_or("all", list_of(one_of(list_options("checkpointing"))), gives_none=False)


@dataclass(frozen=True, kw_only=True)
class SuggestConfig:
    """What to search for the configs that fit a budget."""

    training: TrainConfig
    budget_gib: Annotated[float | None, BUDGET]  # None: the memory of this machine's GPU
    precisions: Annotated[tuple[str, ...], list_of(PRECISION)]
    strategies: Annotated[tuple[str, ...] | None, STRATEGIES]  # None: all of the network's
    patches: Annotated[tuple[float, ...], PATCHES]
    top: Annotated[int, integer(">= 1")]
    format: Literal["table", "json"]
    output: Path | None


@dataclass(frozen=True)
class Candidate:
    """Changes that fit, what they take, and how much they compute beyond plain modules."""

    changes: Changes
    patch_voxels: int
    batch_size: int
    peak: MemoryRecord
    extra_compute: float


def main(composed: ComposedConfig, folder: Path) -> int:
    """Try every combination and print the best."""
    settings = read_settings(SuggestConfig, composed.config, training=parse_train_config(composed))
    budget = get_budget_bytes(settings.budget_gib)
    step, is_overridden = settings.training.step, composed.composition.is_overridden
    combinations, candidates = list_combinations(settings), list[Candidate]()
    limit = None
    if not is_overridden("data.batch_size"):
        limit = make_batch_limit(step.data, settings.training.fold, is_overridden)
    check_step_size(step.vary({"data.batch_size": 1}))
    count = cache(partial(count_flops, step))
    for n, changes in enumerate(combinations, start=1):
        variant, outcome = step.vary(changes), "does not fit"
        try:
            if limit is None:
                found = check_configured_batch(variant, budget)
            else:
                found = find_largest_batch(variant, budget, limit=limit(variant.data.patch_size))
        except UsageError as reason:  # this network does not support it
            found, outcome = None, str(reason)
        if found is not None:
            batch, peak = found
            outcome = f"batch {batch}"
            extra = count(variant.strategy) / count("none") - 1
            batches = {} if limit is None else {"data.batch_size": batch}
            voxels = prod(variant.data.patch_size)
            candidates.append(Candidate(changes | batches, voxels, batch, peak, extra))
        print(f"{n}/{len(combinations)} {format_overrides(changes)}: {outcome}", file=sys.stderr)
        if n == 1 and found is None and not fits_smallest(step, combinations, budget):
            break
    # As `unet3d plan` chooses: the largest patch of which two fit, since that is what a network
    # sees; then the least extra work.
    candidates.sort(
        key=lambda c: (c.batch_size < 2, -c.patch_voxels, round(c.extra_compute, 2), -c.batch_size)
    )
    best = candidates[: settings.top]
    if settings.format == "json":
        rows = [
            {
                "overrides": format_overrides(c.changes).split(),
                "peak_allocated_bytes": c.peak.allocated,
                "peak_reserved_bytes": c.peak.reserved,
                "extra_compute": c.extra_compute,
            }
            for c in best
        ]
        write_output(json.dumps(rows), settings.output)
    elif best:
        write_output(format_candidates(best), settings.output)
    if not candidates:
        print(
            f"nothing fits {budget / GIB:.4g} GiB: try a smaller data.patch_size or model=",
            file=sys.stderr,
        )
        return 3
    return 0


def list_combinations(settings: SuggestConfig) -> list[Changes]:
    """Return precision x strategy x patch, except for what the command line sets."""
    step, is_overridden = settings.training.step, settings.training.composition.is_overridden
    axes: dict[str, Sequence[Any]] = {}
    if not is_overridden("precision"):
        axes["precision"] = settings.precisions
    if not is_overridden("checkpointing"):
        axes["checkpointing"] = settings.strategies or list_strategies(step)
    if not is_overridden("data.patch_size"):
        sizes = [scale_patch(step.data.patch_size, f) for f in settings.patches]
        axes["data.patch_size"] = list(dict.fromkeys(sizes))
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def fits_smallest(step: StepConfig, combinations: Sequence[Changes], budget: int) -> bool:
    """Return whether one smallest patch fits with all that saves memory."""
    patch = min(combinations, key=lambda changes: prod(changes.get("data.patch_size", ())))
    least = {"checkpointing": list_strategies(step)[-1], "precision": "16-true"}
    try:
        smallest = step.vary({**patch, **least, "data.batch_size": 1})
        return check_configured_batch(smallest, budget) is not None
    except UsageError:  # this network does not support it
        return True


def format_candidates(candidates: Sequence[Candidate]) -> str:
    """Return one line per candidate, to read and to paste."""
    rows = [("overrides", "allocated MiB", "reserved MiB", "extra compute")]
    for c in candidates:
        extra = f"{100 * c.extra_compute:.0f}%"
        allocated, reserved = format_mib(c.peak.allocated), format_mib(c.peak.reserved)
        rows.append((format_overrides(c.changes), allocated, reserved, extra))
    return format_columns(rows)


def count_flops(config: StepConfig, strategy: str) -> int:
    """Return the floating-point operations of one training step with a strategy."""
    variant = config.vary({"data.batch_size": 1, "precision": "32"})
    if strategy != config.strategy:
        variant = variant.with_strategy(strategy)
    precision = Precision(variant.precision, variant.precision)
    with use_fake_tensors():
        step = build_traced_step(variant, precision, cuda=True)
        with FlopCounterMode(display=False) as counter:
            step.train(Trace(cuda=True))
    return counter.get_total_flops()
