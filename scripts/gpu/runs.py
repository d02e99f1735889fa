"""Rows of the GPU report that are runs: tests, steps with Lightning, and a whole scan."""

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from scripts.bench.results import ROOT
from scripts.gpu.rows import Context, Row
from scripts.gpu.steps import compose_step
from unet3d.inference.networks import ReplayedNetwork, get_inference_fn, record_networks
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.machine import Precision
from unet3d.step.training_step import build_configured_step

STOP_SECONDS = 40
"""Time that a run has to stop, and this process to report it."""


def run_command(context: Context, command: list[str]) -> tuple[int, str]:
    """Return a command's exit code (124 if it was stopped before the deadline) and output."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    seconds = max(1, context.remaining_seconds() - STOP_SECONDS)
    done = subprocess.run(
        ["timeout", "--foreground", str(seconds), sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.returncode, done.stdout


def tests(context: Context) -> dict[str, Row]:
    """Run the tests that need a GPU, and those that depend on internals of torch."""
    if not context.cuda:
        return {"memory": partial(run_tests, context, ["tests/memory/test_allocator.py"])}
    ignored = [] if find_spec("nnunetv2") else ["--ignore=tests/planning/test_topology.py"]
    return {
        "gpu": partial(run_tests, context, ["tests", "-m", "gpu", *ignored]),
        "memory": partial(run_tests, context, ["tests/memory", "tests/checkpointing"]),
    }


def run_tests(context: Context, arguments: list[str]) -> dict[str, Any]:
    """Run pytest; warnings are not errors, because they depend on the versions of packages."""
    command = ["-m", "pytest", "-q", "-rfE", "--tb=short", "-W", "default", *arguments]
    if find_spec("xdist") and context.cuda:
        command += ["-n", "4", "--dist", "worksteal"]
    code, output = run_command(context, command)
    failures = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    counts = {
        kind: int(n)
        for n, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", output[-500:])
    }
    good = code == 0 and counts.get("passed", 0) > 0
    row: dict[str, Any] = {"good": good, "exit_code": code, **counts, "failures": failures}
    return row if good else row | {"output": output[-6000:]}


def lightning(context: Context) -> dict[str, Row]:
    """Measure peak and time of steps in runs with Lightning; of two processes on two GPUs."""
    graphs = {"fused": "trainer.cuda_graph=false", "CUDA graph": "trainer.cuda_graph=true"}
    rows: dict[str, Row] = {n: partial(measure_run, context, o) for n, o in graphs.items()}
    for name, option in graphs.items() if torch.cuda.device_count() > 1 else ():
        rows[f"{name}, 2 GPUs"] = partial(measure_run, context, option, "trainer.devices=2")
    return rows


def measure_run(context: Context, *options: str) -> dict[str, Any]:
    """Train a few steps on synthetic volumes with all augmentations."""
    side, steps, workers = (128, 60, 4) if context.cuda else (16, 2, 0)
    size, folder = f"[{side},{side},{side}]", context.scratch / "-".join(options).replace("=", "-")
    words = [
        *(f"data.root={context.scratch / 'volumes'}", f"data.cache={context.scratch / 'cache'}"),
        *(f"data.layout.size={size}", f"data.patch_size={size}", "data.layout.num_cases=4"),
        *("data.batch_size=2", "data.patches_per_case=16", f"data.num_workers={workers}"),
        *("augmentation=nnunet", "model=unet_small", f"trainer.max_steps={steps}", "fold=none"),
        *(f"trainer.accelerator={context.accelerator}", "trainer.enable_progress_bar=false"),
        *("memory.estimate=false", "evaluation.enabled=false", f"precision={context.precision}"),
        *(*options, f"hydra.run.dir={folder}", *([] if context.cuda else ["model.width=2"])),
    ]
    code, output = run_command(context, ["train.py", *words])
    if code != 0:
        raise RuntimeError(f"exit code {code}: {output[-800:]}")
    report = json.loads((folder / "report.json").read_text())
    peak = {k: v for k, v in report["memory"]["steady_step"].items() if k != "phases"}
    return {**report["speed"], "peak": peak}


def inference(context: Context) -> dict[str, Row]:
    """Time all windows of a scan, launched and replayed as CUDA graphs."""
    return {name: partial(time_scan, context, name) for name in ("launched", "replayed")}


def time_scan(context: Context, way: str) -> dict[str, Any]:
    """Segment a scan of noise three times with the network of nnU-Net's default plans."""
    size, window = ((512, 512, 300), (128,) * 3) if context.cuda else ((40, 32, 32), (32,) * 3)
    words = [
        "model=unet_nnunet",
        "data.num_classes=5",
        f"trainer.accelerator={context.accelerator}",
    ]
    model = build_configured_step(compose_step(words), context.device).model.eval()
    precision = Precision(context.precision, context.precision)
    network = get_inference_fn(model, precision, context.device)
    image = torch.rand(1, 1, *size, device=context.device)
    network(image[..., : window[0], : window[1], : window[2]])
    if way == "replayed":
        (network,) = record_networks([network], (1, 1, *window), context.device)
    seconds = []
    for _ in range(3):
        context.synchronize()
        start = time.perf_counter()
        SlidingWindow(window)(image, network)
        context.synchronize()
        seconds.append(time.perf_counter() - start)
    is_wrong = context.cuda and way == "replayed" and not isinstance(network, ReplayedNetwork)
    return {"scan_seconds": seconds, "good": not is_wrong}
