"""Measure startup time: imports, --help, and `unet3d train` up to its first step.

Each command runs in a new process, in a folder that already has the volumes of the default run. All
commands run once before they are timed, so that the files of Python and torch are in the system's
cache.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from unet3d.machine.system import get_cpu_model
from unet3d.report.run_report import collect_versions

ROOT = Path(__file__).resolve().parents[2]

PREPARE = ["train", "trainer.max_steps=1", "trainer.accelerator=cpu", "evaluation.enabled=false"]

# Prints when each phase ended, and exits with the first step: nothing after it is timed.
FIRST_STEP = """
import os, sys, time
ends = [("python", time.time())]
from unet3d.cli.main import import_command, main
import_command("train")
from unet3d.workflows.training import fit
from unet3d.lit.callbacks.step_memory import StepMemory
from unet3d.lit.callbacks.step_timing import StepTimer
ends.append(("imports", time.time()))

def record_end(owner, name, phase, leave=False):
    inner = getattr(owner, name)
    def wrapped(*args, **kwargs):
        result = inner(*args, **kwargs)
        ends.append((phase, time.time()))
        if leave:
            print(*(f"{phase}={end}" for phase, end in ends), file=sys.stderr)
            sys.stderr.flush()
            os._exit(0)
        return result
    setattr(owner, name, wrapped)

record_end(fit, "build_training", "build, with the memory estimate")
record_end(StepMemory, "on_validation_end", "first validation volume")
record_end(StepTimer, "on_train_batch_end", "first step", leave=True)
main(["train", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"])
"""

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import unet3d": ["-c", "import unet3d"],
    "unet3d --version": ["-m", "unet3d.cli.main", "--version"],
    "unet3d --help": ["-m", "unet3d.cli.main", "--help"],
    "unet3d train --help": ["-m", "unet3d.cli.main", "train", "--help"],
    "unet3d train modle=unet_tiny": ["-m", "unet3d.cli.main", "train", "modle=unet_tiny"],
    "import torch": ["-c", "import torch"],
    "import torch, lightning.pytorch": ["-c", "import torch, lightning.pytorch"],
    "unet3d memory": ["-m", "unet3d.cli.main", "memory", "format=json"],
    "unet3d doctor": ["-m", "unet3d.cli.main", "doctor"],
    "unet3d train, to its first step": ["-c", FIRST_STEP],
}


class Timing(NamedTuple):
    """Seconds of one process: wall clock, processor time of all cores, and each phase."""

    wall: float
    processor: float
    phases: list[tuple[str, float]]


def time_process(arguments: list[str], folder: Path) -> Timing:
    """Run Python with these arguments in a folder."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True
    )
    seconds, after = time.time() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 2) or "Traceback" in done.stderr:
        sys.exit(f"{arguments}: {done.stderr}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    last = (done.stderr.splitlines() or [""])[-1]
    return Timing(seconds, used, parse_phases(last, start) if last.startswith("python=") else [])


def parse_phases(line: str, start: float) -> list[tuple[str, float]]:
    """Convert the times of day at which phases ended into seconds of each phase.

    >>> parse_phases("imports=1.5 build, and so on=2.5", 1.0)
    [('imports', 0.5), ('build, and so on', 1.0)]
    """
    phases = []
    while line:
        name, _, line = line.partition("=")
        end, _, line = line.partition(" ")
        phases.append((name, float(end) - start))
        start = float(end)
    return phases


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each command")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "cpu-start.json")
    options = parser.parse_args()
    timings: dict[str, list[Timing]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        time_process(["-m", "unet3d.cli.main", *PREPARE], folder)
        load = os.getloadavg()[0]
        for turn in range(options.runs + 1):
            for command, arguments in COMMANDS.items():
                timing = time_process(arguments, folder)
                if turn:  # the first turn fills the system's cache
                    timings[command].append(timing)
    rows: dict[str, Any] = {}
    for name, runs in timings.items():
        rows[name] = {
            "median_seconds": round(median(run.wall for run in runs), 3),
            "seconds": [round(run.wall, 3) for run in runs],
            "median_processor_seconds": round(median(run.processor for run in runs), 3),
        }
        if runs[0].phases:
            rows[name]["median_seconds_by_phase"] = {
                phase: round(median(run.phases[n][1] for run in runs), 3)
                for n, (phase, _) in enumerate(runs[0].phases)
            }
        print(f"{name:34} {rows[name]['median_seconds']:7.2f} s", file=sys.stderr)
    report = {
        "command": f"python -m scripts.bench.start --runs {options.runs}",
        "processor": get_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "versions": collect_versions(),
        "commands": rows,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
