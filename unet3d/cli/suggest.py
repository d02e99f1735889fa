"""`unet3d suggest budget_gib=24`: what fits a card, as override lines to paste."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unet3d.cli.app import write_output
from unet3d.config.compose import ComposedConfig
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.memory.batch_search import CONTEXT
from unet3d.memory.tables import format_columns, format_mib
from unet3d.units import GIB, format_bytes
from unet3d.workflows.memory.suggest import MemoryCandidate, list_combinations, search_configs


def main(request: ComposedConfig, folder: Path) -> int:
    """Try every combination and show the best."""
    cfg = request.config
    if cfg.format not in ("table", "json"):
        raise UsageError(f"format must be table or json, got {cfg.format!r}")
    budget = parse_device_budget(cfg.budget_gib)
    total, found = len(list_combinations(request)), []
    for tried, (overrides, best) in enumerate(search_configs(request, budget), start=1):
        if best is not None:
            found.append(best)
        said = "does not fit" if best is None else f"batch {best.batch}"
        print(f"{tried}/{total} {' '.join(overrides)}: {said}", file=sys.stderr)
    # The largest patch first, since that is what a network sees; then the least extra work.
    found.sort(key=lambda f: (-f.voxels, round(f.extra_compute, 2), -f.batch))
    best_few = found[: cfg.top]
    if cfg.format == "json":
        write_output(json.dumps([candidate_to_dict(f) for f in best_few]), cfg.output)
    elif best_few:
        write_output(format_candidates(best_few), cfg.output)
    if not found:
        print(f"nothing fits {budget / GIB:g} GiB", file=sys.stderr)
        return 3
    return 0


def parse_device_budget(asked: Any) -> int:
    """GiB as bytes; `auto` is the memory of the GPU that is here."""
    if asked == "auto":
        if not torch.cuda.is_available():
            raise UsageError("budget_gib=auto: torch finds no GPU here; give the card's GiB")
        return torch.cuda.get_device_properties(0).total_memory
    if not isinstance(asked, int | float) or not asked > 0:
        raise UsageError(f"budget_gib must be above 0 or auto, got {asked!r}")
    if asked * GIB <= CONTEXT:
        raise DoesNotFitError(
            f"budget_gib={asked:g}: CUDA's context alone takes about {format_bytes(CONTEXT)}"
        )
    return int(asked * GIB)


def format_candidates(found: Sequence[MemoryCandidate]) -> str:
    """One line per fit, to read and to paste."""
    rows = [("overrides", "allocated MiB", "reserved MiB", "extra compute")]
    for f in found:
        extra = f"{100 * f.extra_compute:.0f} %"
        rows.append(
            (
                " ".join(f.overrides),
                format_mib(f.peak.allocated),
                format_mib(f.peak.reserved),
                extra,
            )
        )
    return format_columns(rows)


def candidate_to_dict(found: MemoryCandidate) -> dict[str, Any]:
    """For other programs."""
    return {
        "overrides": list(found.overrides),
        "peak_allocated_bytes": found.peak.allocated,
        "peak_reserved_bytes": found.peak.reserved,
        "extra_compute": found.extra_compute,
    }
