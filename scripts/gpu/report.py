"""Run everything that needs a GPU, in parts that can be run separately and continued: `make gpu`.

    python -m scripts.gpu.report --list
    python -m scripts.gpu.report                  # unfinished parts, for nine minutes
    python -m scripts.gpu.report pool forum       # these parts; failed rows are repeated
    python -m scripts.gpu.report --output FOLDER  # continues the results in benchmarks/
    python -m scripts.gpu.report --rehearse       # one small row of each part, on a CPU

Each part runs in a process of its own that writes every row at once: a crash, a CUDA error or a
time limit costs only the row that was being measured. Results are written to <device>.json. Without
a GPU, the exit code is 2. The settings of the device are read, never changed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.results import BENCHMARKS, ROOT, make_parser
from scripts.gpu.rows import NEEDS_NEW_PROCESS, read_parts, write_parts

GRACE_SECONDS = 30
"""Time after --seconds in which a running row may finish."""


@dataclass(frozen=True)
class Part:
    """Rows that are measured together, by the function of `module` with the part's name."""

    module: str
    about: str
    limit_seconds: int = 240
    min_seconds: int = 20  # no row starts with less time left


KERNELS, STEPS, RUNS = "scripts.gpu.kernels", "scripts.gpu.steps", "scripts.gpu.runs"
PARTS = {
    "environment": Part(KERNELS, "device and versions", 90),
    "tests": Part(RUNS, "tests marked gpu, and the tests of memory and checkpointing", 300, 100),
    "correct": Part(KERNELS, "fused blocks against plain modules, poolings against references"),
    "pool": Part(KERNELS, "poolings against nn.MaxPool3d", 240, 30),
    "forum": Part(STEPS, "experiment=example_small and example_large: peak, estimate and seconds"),
    "graphs": Part(STEPS, "steps launched, replayed as CUDA graphs, and compiled", 300),
    "rivals": Part(STEPS, "checkpoints, and plain modules compiled at several budgets", 300, 60),
    "inference": Part(RUNS, "a whole scan, its windows launched and replayed as CUDA graphs", 90),
    "predict": Part(STEPS, "estimated against measured peaks of 64 configurations", 400),
    "workspaces": Part("scripts.gpu.workspaces", "memory that cuDNN takes for single convolutions"),
    "peers": Part(STEPS, "networks of other projects with the same channels"),
    "tuned": Part(STEPS, "plain modules compiled, channels-last, with cudnn.benchmark", 480, 60),
    "batch": Part(STEPS, "largest batch of the forum networks that runs in 7000 MiB", 300),
    "tile_size": Part(STEPS, "time and peak by the size of a tile", 150),
    "lightning": Part(RUNS, "peak and time of steps in runs with Lightning", 300, 60),
}


def run_part(path: Path, name: str, part: Part, device: str, deadline: float) -> str:
    """Measure the missing rows of a part, in as many processes as it takes; return its state."""
    start = time.time()
    limit = min(start + part.limit_seconds, deadline + GRACE_SECONDS)
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        job: dict[str, Any] = {"path": str(path), "part": name, "device": device}
        job |= {"module": part.module, "deadline": limit, "min_seconds": part.min_seconds}
        job["scratch"] = folder
        while True:
            before = count_rows(read_parts(path)[name])
            code, log = run_worker(job)
            parts = read_parts(path)
            result = parts[name]
            has_progress = count_rows(result) > before
            row = result.pop("running", None)
            if code is None and row and not has_progress and limit <= deadline:
                result["failed"][row] = f"over the limit of {part.limit_seconds} s: {log}"
            elif code and (row or code != NEEDS_NEW_PROCESS):
                result["failed"][row or "(start)"] = f"exit code {code}: {log}"
            is_over = time.time() + part.min_seconds > min(limit, deadline)
            if not code or not (row or has_progress) or is_over:
                break
            write_parts(path, parts)
    if "(start)" in result["failed"]:
        result["state"] = "failed"
    result["seconds"] = round(result.get("seconds", 0) + time.time() - start, 1)
    write_parts(path, parts)
    return result["state"]


def count_rows(result: dict[str, Any]) -> int:
    return len(result["rows"]) + len(result["failed"])


def run_worker(job: dict[str, Any]) -> tuple[int | None, str]:
    """Run scripts.gpu.rows; return its exit code (None: killed in time) and the end of its log."""
    command = [sys.executable, "-W", "ignore", "-m", "scripts.gpu.rows", json.dumps(job)]
    with (Path(job["scratch"]) / "log").open("w+", errors="replace") as log:
        process = subprocess.Popen(command, cwd=ROOT, stderr=log, start_new_session=True)
        try:
            code: int | None = process.wait(max(0, job["deadline"] - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        log.seek(0)
        return code, log.read()[-1500:]


def get_device_name() -> str | None:
    """Return the name of the first GPU; a child asks torch, so that this process uses no GPU."""
    code = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    words = done.stdout.strip().splitlines()
    return words[-1] if words else None


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("scripts.gpu.report", __doc__, output="")
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: unfinished parts")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    parser.add_argument("--seconds", type=float, default=540, help="no row starts later")
    parser.add_argument("--again", action="store_true", help="repeat all rows of the named parts")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU; keeps no results")
    options = parser.parse_args(argv)
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"unknown part {part!r}; choose from {', '.join(PARTS)}")
    if options.rehearse and options.output.resolve() == BENCHMARKS:
        options.output = Path(tempfile.mkdtemp(prefix="gpu-rehearsal-"))
    return options


def open_results(folder: Path, device: str) -> Path:
    """Return the file of a device in a folder, which continues that of benchmarks/."""
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists() and (BENCHMARKS / path.name).exists():
        shutil.copy(BENCHMARKS / path.name, path)
    elif not path.exists():
        path.write_text(json.dumps({"device": device, "parts": {}}))
    return path


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:12} {part.limit_seconds:4} s  {part.about}")
        return 0
    device = "rehearsal" if options.rehearse else get_device_name()
    if not device:
        print("scripts.gpu.report needs a GPU; --rehearse tries it on a CPU", file=sys.stderr)
        return 2
    path, deadline = open_results(options.output, device), time.time() + options.seconds
    parts, unfinished = read_parts(path), []
    ended = [name for name in PARTS if parts.get(name, {}).get("state") in ("done", "failed")]
    for name in options.parts or [name for name in PARTS if name not in ended]:
        part = PARTS[name]
        parts = read_parts(path)
        empty = {"state": "cut off", "rows": {}, "failed": {}}
        if options.again or name not in parts:
            parts[name] = empty
        elif options.parts:
            parts[name] |= {"state": "cut off", "failed": {}}
        write_parts(path, parts)
        state = "cut off"
        if time.time() + part.min_seconds < deadline:
            print(f"{name}: {part.about}", flush=True)
            state = run_part(path, name, part, "cpu" if options.rehearse else "cuda:0", deadline)
            print(f"  {state}", flush=True)
        if state == "cut off":
            unfinished.append(name)
    if unfinished:
        print(f"unfinished, run again: {', '.join(unfinished)}")
    print(f"wrote {path}")
    return int(any(part["state"] == "failed" for part in read_parts(path).values()))


if __name__ == "__main__":
    sys.exit(main())
