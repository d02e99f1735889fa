"""How long a command takes to begin: imports, help, and `unet3d train` up to its first step.

Each is a new process, in a folder of its own with the default job's volumes there already; the
files of Python and torch are in the system's cache, for every command is run once before.
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
from typing import Any

import torch

from unet3d.machine.system import get_cpu_model
from unet3d.report.run_report import collect_versions

ROOT = Path(__file__).resolve().parents[1]

PREPARE = ["train", "trainer.max_steps=1", "trainer.accelerator=cpu", "evaluation.enabled=false"]

# Ends as the first step does, so that nothing after it is counted; times of day, by phase.
FIRST_STEP = """
import os, sys, time
told = [("python", time.time())]
from unet3d.cli.main import imported, main
train = imported("train")
from unet3d.lit.callbacks.step_memory import StepMemory
from unet3d.lit.callbacks.step_timing import StepSpeed
told.append(("imports", time.time()))

def when(owner, name, phase, leave=False):
    inner = getattr(owner, name)
    def outer(*given, **named):
        result = inner(*given, **named)
        told.append((phase, time.time()))
        if leave:
            print(*(f"{phase}={at}" for phase, at in told), file=sys.stderr)
            sys.stderr.flush()
            os._exit(0)
        return result
    setattr(owner, name, outer)

when(train, "build", "build, with the prediction")
when(StepMemory, "on_validation_end", "first validation volume")
when(StepSpeed, "on_train_batch_end", "first step", leave=True)
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


def timed(words: list[str], folder: Path) -> tuple[float, float, list[tuple[str, float]]]:
    """Seconds by the clock, seconds of all cores, and when each phase ended."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    ended = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True
    )
    seconds, after = time.time() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode not in (0, 2) or "Traceback" in ended.stderr:
        sys.exit(f"{words}: {ended.stderr}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    last = (ended.stderr.splitlines() or [""])[-1]
    return seconds, used, phases(last, began) if last.startswith("python=") else []


def phases(line: str, began: float) -> list[tuple[str, float]]:
    """`a=1.5 b, c=2.5`, times of day, as the seconds of each."""
    found = []
    while line:
        name, _, line = line.partition("=")
        number, _, line = line.partition(" ")
        found.append((name, float(number) - began))
        began = float(number)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "cpu-start.json")
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float, list[tuple[str, float]]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        timed(["-m", "unet3d.cli.main", *PREPARE], place)
        load = os.getloadavg()[0]
        for turn in range(arguments.runs + 1):  # the first one fills the system's cache
            for name, words in COMMANDS.items():
                taken = timed(words, place)
                if turn:
                    found.setdefault(name, []).append(taken)
    rows: dict[str, Any] = {}
    for name, runs in found.items():
        rows[name] = {
            "median_seconds": round(median(seconds for seconds, _, _ in runs), 3),
            "seconds": [round(seconds, 3) for seconds, _, _ in runs],
            "median_processor_seconds": round(median(used for _, used, _ in runs), 3),
        }
        if runs[0][2]:
            rows[name]["median_seconds_by_phase"] = {
                phase: round(median(run[2][n][1] for run in runs), 3)
                for n, (phase, _) in enumerate(runs[0][2])
            }
        print(f"{name:34} {rows[name]['median_seconds']:7.2f} s", file=sys.stderr)
    result = {
        "command": f"python scripts/bench_start.py --runs {arguments.runs}",
        "processor": get_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "versions": collect_versions(),
        "commands": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
