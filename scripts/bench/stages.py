"""Run a command of unet3d in a new process, and time its stages."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# A stage does not count the stages that run within it. What runs in several threads is counted in
# processor seconds of these threads, and not subtracted from the stage that waits for them.
TIMED = """
import importlib, json, resource, sys, threading, time
stages, running = {}, []

def record(name, wall, cpu, calls=1):
    stage = stages.setdefault(name, {"wall": 0.0, "cpu": 0.0, "calls": 0})
    stage["wall"] += wall
    stage["cpu"] += cpu
    stage["calls"] += calls

def time_stage(name, module, *path):
    *owners, attribute = path
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    inner = getattr(owner, attribute)
    def wrapped(*args, **kwargs):
        if name.endswith("(threads)"):
            start = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                record(name, 0.0, time.thread_time() - start)
        now = time.time(), time.process_time()
        if running:
            outer, *start = running[-1]
            record(outer, now[0] - start[0], now[1] - start[1], 0)
        running.append([name, *now])
        try:
            return inner(*args, **kwargs)
        finally:
            end = time.time(), time.process_time()
            _, *start = running.pop()
            record(name, end[0] - start[0], end[1] - start[1])
            if running:
                running[-1][1:] = end
    setattr(owner, attribute, wrapped)

from unet3d.cli.main import import_command, main
command = sys.argv[1]
import_command(command)
for name, module, *path in STAGES.get(command, []):
    time_stage(name, module, *path)
record("imports", time.time() - STARTED, time.process_time())
begin = time.time(), time.process_time()
status = main(sys.argv[1:])
spent = time.time() - begin[0], time.process_time() - begin[1]
counted = [s for name, s in stages.items() if name != "imports" and "(threads)" not in name]
inside = [sum(stage[key] for stage in counted) for key in ("wall", "cpu")]
record("the rest", spent[0] - inside[0], spent[1] - inside[1])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"stages": stages, "peak_rss_mib": peak / 1024}), file=sys.stderr)
sys.exit(status)
"""

LISTING = ("listing cases", "unet3d.data.layouts.decathlon", "Decathlon", "list_cases")
PROBLEMS = ("listing cases", "unet3d.data.layouts.decathlon", "Decathlon", "find_problems")
USABLE = ("headers", "unet3d.workflows.shared.usable_cases", "check_headers")
CACHE = "unet3d.data.preprocessing.cache"

STAGES = {
    "check": [
        LISTING,
        PROBLEMS,
        ("headers", "unet3d.workflows.dataset_check", "check_headers"),
        ("headers", "unet3d.workflows.dataset_check", "read_image_headers"),
        ("voxels", "unet3d.workflows.dataset_check", "check_voxels"),
    ],
    "plan": [
        LISTING,
        PROBLEMS,
        USABLE,
        ("fingerprints", "unet3d.workflows.planning.planner", "fingerprint_dataset"),
    ],
    "train": [
        LISTING,
        PROBLEMS,
        USABLE,
        ("looking into the cache", "unet3d.workflows.shared.usable_cases", "preprocess_all"),
        ("verifying the cache (threads)", CACHE, "verify_volume"),
        ("checksums of arrays (threads)", "unet3d.data.preprocessing.entry", "crc32"),
        ("digests of files (threads)", CACHE, "digest_files"),
        ("preprocessing", CACHE, "collect_findings"),
        ("class frequencies", "unet3d.workflows.training.head_bias", "compute_class_fractions"),
        ("memory estimate", "unet3d.workflows.training.build", "estimate_run_memory"),
        ("training steps", "unet3d.workflows.training.fit", "fit_model"),
        ("loading batches", "unet3d.data.loading.loaders", "TrainLoader", "prefetch"),
        ("loading volumes", "unet3d.data.loading.datasets", "ValidationVolumes", "__getitem__"),
        ("validation", "lightning.pytorch.loops.evaluation_loop", "_EvaluationLoop", "run"),
    ],
}


def time_command(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Run a command in a folder; return its seconds and those of its stages."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    head = f"STAGES, STARTED = {STAGES!r}, {time.time()!r}\n"
    before, start = os.times(), time.time()
    done = subprocess.run(
        [sys.executable, "-c", head + TIMED, *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )
    wall, after = time.time() - start, os.times()
    last = (done.stderr.splitlines() or [""])[-1]
    if done.returncode or not last.startswith('{"stages"'):
        sys.exit(f"{arguments}: {done.stdout[-2000:]} {done.stderr}")
    measured = json.loads(last)
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    print(f"{arguments[0]:9} {wall:7.1f} s, {used:7.1f} of processors", file=sys.stderr)
    return {
        "seconds": round(wall, 2),
        "processor_seconds": round(used, 2),
        "load": round(os.getloadavg()[0], 2),
        "peak_rss_mib": round(measured["peak_rss_mib"]),
        "stages": {
            name: {
                "seconds": round(stage["wall"], 2),
                "processor_seconds": round(stage["cpu"], 2),
                "calls": stage["calls"],
            }
            for name, stage in measured["stages"].items()
        },
    }
