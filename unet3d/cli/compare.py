"""`unet3d compare RUN ...`: runs side by side, as a table and a picture."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from unet3d.cli.app import write_output
from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import expand_paths
from unet3d.errors import UsageError
from unet3d.memory.tables import format_columns
from unet3d.report.run_comparison import (
    RunSummary,
    comparison_to_dict,
    draw_runs,
    find_runs,
    make_comparison_rows,
)

FORMATS = ("table", "json")


def main(request: ComposedConfig, folder: Path) -> int:
    """Show the runs; 1 if something that was named is no run."""
    cfg = request.config
    if cfg.format not in FORMATS:
        raise UsageError(f"format must be one of {', '.join(FORMATS)}, got {cfg.format!r}")
    if not cfg.runs:  # runs=[]
        raise UsageError(
            "which runs? unet3d compare RUN ..., each a run's folder or one that holds runs"
        )
    named = expand_paths(cfg.runs)
    for path in named:
        if not path.exists():
            raise UsageError(f"there is no {path}")
    runs, faults = find_runs(named)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not runs:
        raise UsageError(f"there is no run in {', '.join(map(str, named))}")
    write_output(
        json.dumps(comparison_to_dict(runs)) if cfg.format == "json" else format_comparison(runs),
        cfg.output,
    )
    if cfg.picture is not None:
        draw_runs(runs, Path(cfg.picture))
        print(cfg.picture, file=sys.stderr)
    return 1 if faults else 0


def format_comparison(runs: Sequence[RunSummary]) -> str:
    """Under each other, with what the last column means."""
    differing = len(runs[0].differs)
    text = format_columns(make_comparison_rows(runs), left=1 + differing)
    if len(runs) > 1:
        text += (
            "\nunbeaten: no other run has as good a Dice, peak and time, and a better one of them"
        )
    return text


def print_sweep_summary(folder: Path) -> None:
    """What a sweep ends with, if two of its runs or more have come to something."""
    runs, _ = find_runs([folder])
    if len(runs) < 2:
        return
    print("\n" + format_comparison(runs))
    if any(run.figures.get("dice") is not None for run in runs):
        picture = folder / "comparison.png"
        try:
            draw_runs(runs, picture)
            print(picture)
        except (UsageError, OSError) as reason:
            print(f"no picture: {reason}")
