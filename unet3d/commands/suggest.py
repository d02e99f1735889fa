"""`unet3d suggest budget_gib=24`: find configs that fit a GPU, as override lines to paste."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from unet3d.config.compose import ComposedConfig, format_overrides, list_options
from unet3d.config.fields import (
    PRECISION,
    integer,
    list_of,
    number,
    one_of,
    one_or_list_of,
    read_settings,
)
from unet3d.files import write_output
from unet3d.memory.from_config import list_strategies, scale_patch
from unet3d.memory.report import format_mib
from unet3d.planning.planner import make_batch_limit
from unet3d.planning.suggest import (
    BUDGET,
    Changes,
    MemoryCandidate,
    get_budget_bytes,
    search_configs,
)
from unet3d.text import GIB, format_columns
from unet3d.training.config import TrainConfig, parse_train_config

PATCHES = one_or_list_of(number("above 0", "<= 4"), "fractions of data.patch_size in 0..4")


@dataclass(frozen=True, kw_only=True)
class SuggestConfig:
    """What to search for the configs that fit a budget."""

    training: TrainConfig
    budget_gib: Annotated[float | None, BUDGET]  # None: the memory of this machine's GPU
    precisions: Annotated[tuple[str, ...], list_of(PRECISION)]
    strategies: Annotated[  # None: all of the network's
        tuple[str, ...] | None, list_of(one_of(list_options("checkpointing")))
    ]
    patches: Annotated[tuple[float, ...], PATCHES]
    top: Annotated[int, integer(">= 1")]
    format: Literal["table", "json"]
    output: Path | None


def main(composed: ComposedConfig, folder: Path) -> int:
    """Try every combination and print the best."""
    settings = read_settings(SuggestConfig, composed.config, training=parse_train_config(composed))
    budget = get_budget_bytes(settings.budget_gib)
    step, is_overridden = settings.training.step, composed.composition.is_overridden
    combinations, candidates = list_combinations(settings), []
    limit = None
    if not is_overridden("data.batch_size"):
        limit = make_batch_limit(step.data, settings.training.fold, is_overridden)
    searched = search_configs(step, combinations, budget, limit)
    for n, (changes, candidate) in enumerate(searched, start=1):
        if candidate is not None:
            candidates.append(candidate)
        outcome = "does not fit" if candidate is None else f"batch {candidate.batch_size}"
        print(f"{n}/{len(combinations)} {format_overrides(changes)}: {outcome}", file=sys.stderr)
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
            f"nothing fits {budget / GIB:g} GiB: try a smaller data.patch_size or network (model=)",
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


def format_candidates(candidates: Sequence[MemoryCandidate]) -> str:
    """Return one line per candidate, to read and to paste."""
    rows = [("overrides", "allocated MiB", "reserved MiB", "extra compute")]
    for c in candidates:
        extra = f"{100 * c.extra_compute:.0f}%"
        allocated, reserved = format_mib(c.peak.allocated), format_mib(c.peak.reserved)
        rows.append((format_overrides(c.changes), allocated, reserved, extra))
    return format_columns(rows)
