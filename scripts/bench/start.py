"""Measure startup time: imports, --help, and `unet3d train` up to its first step.

Each command runs in a new process, in a folder that already has the volumes of the default run. All
commands run once before they are timed, so that the files of Python and torch are in the system's
cache.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from scripts.bench.results import ROOT, make_parser, write_results
from unet3d.control_groups import count_usable_cores
from unet3d.machine import get_cpu_model

PREPARE = ["train", "trainer.max_steps=1", "trainer.accelerator=cpu", "evaluation.enabled=false"]

# Prints when each phase ended, and exits with the first step: nothing after it is timed.
FIRST_STEP = """
import json, os, time
ends = [("python", time.time())]
from unet3d.app import import_command
from unet3d.__main__ import main
import_command("train")
from unet3d.commands import train
from unet3d.training.callbacks.step_records import StepMemory, StepTimer
ends.append(("imports", time.time()))

def record_end(owner, name, phase, leave=False):
    inner = getattr(owner, name)
    def wrapped(*args, **kwargs):
        result = inner(*args, **kwargs)
        ends.append((phase, time.time()))
        if leave:
            print(json.dumps(ends), flush=True)
            os._exit(0)
        return result
    setattr(owner, name, wrapped)

record_end(train, "build_training", "build, with the memory estimate")
record_end(StepMemory, "on_validation_end", "first validation volume")
record_end(StepTimer, "on_train_batch_end", "first step", leave=True)
main(["train", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"])
"""

UNET3D = ("-m", "unet3d")
COMMANDS = {
    "unet3d --help": [*UNET3D, "--help"],
    "unet3d train --help": [*UNET3D, "train", "--help"],
    "unet3d memory": [*UNET3D, "memory", "format=json"],
    "unet3d doctor": [*UNET3D, "doctor"],
    "unet3d train, to its first step": ["-c", FIRST_STEP],
}


def time_process(arguments: list[str], folder: Path) -> tuple[float, dict[str, float]]:
    """Run Python with these arguments in a folder; return its seconds and those of each phase."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.time()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True
    )
    seconds = time.time() - start
    if done.returncode not in (0, 2) or "Traceback" in done.stderr:
        sys.exit(f"{arguments}: {done.stderr}")
    phases = {}
    if arguments[-1] == FIRST_STEP:
        for phase, end in json.loads(done.stdout.splitlines()[-1]):
            phases[phase], start = end - start, end
    return seconds, phases


def main() -> None:
    parser = make_parser("scripts.bench.start", __doc__, output="cpu-start.json")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each command")
    options = parser.parse_args()
    timings: dict[str, list[tuple[float, dict[str, float]]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        time_process([*UNET3D, *PREPARE], folder)
        for turn in range(options.runs + 1):
            for command, arguments in COMMANDS.items():
                timing = time_process(arguments, folder)
                if turn:  # the first turn fills the system's cache
                    timings[command].append(timing)
    rows: dict[str, Any] = {}
    for name, runs in timings.items():
        seconds = [taken for taken, _ in runs]
        rows[name] = {
            "median_seconds": round(median(seconds), 3),
            "seconds": [round(taken, 3) for taken in seconds],
        }
        if phases := runs[0][1]:
            rows[name]["median_seconds_by_phase"] = {
                phase: round(median(ended[phase] for _, ended in runs), 3) for phase in phases
            }
        print(f"{name:34} {rows[name]['median_seconds']:7.2f} s", file=sys.stderr)
    report = {
        "command": f"python -m scripts.bench.start --runs {options.runs}",
        "processor": get_cpu_model(),
        "cores": count_usable_cores(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "commands": rows,
    }
    write_results(options.output, report)


if __name__ == "__main__":
    main()
