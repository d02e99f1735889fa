"""`unet3d suggest budget_gib=24`: find configs that fit a GPU, as override lines to paste."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.memory import parse_suggest
from unet3d.files import write_output
from unet3d.memory.tables import format_mib
from unet3d.text import format_columns
from unet3d.units import GIB
from unet3d.workflows.memory.suggest import (
    MemoryCandidate,
    get_budget_bytes,
    list_combinations,
    search_configs,
)
from unet3d.workflows.planning.planner import find_batch_limit


def main(composed: ComposedConfig, folder: Path) -> int:
    """Try every combination and print the best."""
    settings = parse_suggest(composed)
    budget = get_budget_bytes(settings.budget_gib)
    total, candidates = len(list_combinations(settings)), []
    limit = find_batch_limit(settings.training)
    searched = search_configs(settings, budget, limit)
    for number, (overrides, candidate) in enumerate(searched, start=1):
        if candidate is not None:
            candidates.append(candidate)
        outcome = "does not fit" if candidate is None else f"batch {candidate.batch_size}"
        print(f"{number}/{total} {' '.join(overrides)}: {outcome}", file=sys.stderr)
    # As `unet3d plan` chooses: the largest patch of which two fit, since that is what a network
    # sees; then the least extra work.
    candidates.sort(
        key=lambda c: (
            c.batch_size < 2,
            -c.patch_voxels,
            round(c.extra_compute, 2),
            -c.batch_size,
        )
    )
    best = candidates[: settings.top]
    if settings.format == "json":
        rows = [
            {
                "overrides": list(c.overrides),
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


def format_candidates(candidates: Sequence[MemoryCandidate]) -> str:
    """Return one line per candidate, to read and to paste."""
    rows = [("overrides", "allocated MiB", "reserved MiB", "extra compute")]
    for c in candidates:
        extra = f"{100 * c.extra_compute:.0f}%"
        allocated, reserved = format_mib(c.peak.allocated), format_mib(c.peak.reserved)
        rows.append((" ".join(c.overrides), allocated, reserved, extra))
    return format_columns(rows)
