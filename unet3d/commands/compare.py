"""`unet3d compare RUN ...`: runs side by side, as a table and a picture."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from unet3d.build.objects import paths
from unet3d.build.request import Request
from unet3d.commands.run import deliver
from unet3d.meter.show import columns
from unet3d.report.comparison import Compared, as_json, draw_runs, rows, runs_in
from unet3d.types import Misuse

FORMATS = ("table", "json")


def main(request: Request, folder: Path) -> int:
    """Show the runs; 1 if something that was named is no run."""
    cfg = request.config
    if cfg.format not in FORMATS:
        raise Misuse(f"format must be one of {', '.join(FORMATS)}, got {cfg.format!r}")
    if not cfg.runs:  # runs=[]
        raise Misuse(
            "which runs? unet3d compare RUN ..., each a run's folder or one that holds runs"
        )
    named = paths(cfg.runs)
    for path in named:
        if not path.exists():
            raise Misuse(f"there is no {path}")
    runs, faults = runs_in(named)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not runs:
        raise Misuse(f"there is no run in {', '.join(map(str, named))}")
    deliver(json.dumps(as_json(runs)) if cfg.format == "json" else table(runs), cfg.output)
    if cfg.picture is not None:
        draw_runs(runs, Path(cfg.picture))
        print(cfg.picture, file=sys.stderr)
    return 1 if faults else 0


def table(runs: Sequence[Compared]) -> str:
    """Under each other, with what the last column means."""
    differing = len(runs[0].differs)
    text = columns(rows(runs), left=1 + differing)
    if len(runs) > 1:
        text += (
            "\nunbeaten: no other run has as good a Dice, peak and time, and a better one of them"
        )
    return text


def swept(folder: Path) -> None:
    """What a sweep ends with, if two of its runs or more have come to something."""
    runs, _ = runs_in([folder])
    if len(runs) < 2:
        return
    print("\n" + table(runs))
    if any(run.figures.get("dice") is not None for run in runs):
        picture = folder / "comparison.png"
        try:
            draw_runs(runs, picture)
            print(picture)
        except (Misuse, OSError) as reason:
            print(f"no picture: {reason}")
