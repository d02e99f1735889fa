"""Rows of the GPU report that are runs: tests, Lightning's steps, two GPUs, trainings."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from scripts.bench.quality import POOLS
from scripts.bench.quality_results import read_report
from scripts.gpu.rows import ROOT, Context, Row

GOAL = 0.88
"""The Dice for `seconds_to_goal`."""

STOP_SECONDS = 40
"""Time that a run has to stop, and this process to report it."""


def run_command(context: Context, command: list[str]) -> tuple[int | None, str]:
    """Return a command's exit code (None if it was stopped before the deadline) and output."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    log = context.scratch / "command.log"
    with log.open("w") as file:
        environ = {**os.environ, "PYTHONPATH": path}
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environ, stdout=file, stderr=file
        )
        code: int | None = None
        try:
            code = process.wait(max(1.0, context.remaining_seconds() - STOP_SECONDS))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS / 2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return code, log.read_text(errors="replace")


def tests(context: Context) -> dict[str, Row]:
    """Run the tests that need a GPU, and those that depend on internals of torch."""
    if context.tiny:
        return {"memory": partial(run_tests, context, ["tests/memory/test_allocator.py"])}
    ignored = [] if find_spec("nnunetv2") else ["--ignore=tests/planning/test_topology.py"]
    return {
        "gpu": partial(run_tests, context, ["tests", "-m", "gpu", *ignored]),
        "memory": partial(run_tests, context, ["tests/memory", "tests/checkpointing"]),
    }


def run_tests(context: Context, arguments: list[str]) -> dict[str, Any]:
    """Run pytest; warnings are not errors, because they depend on the versions of packages."""
    command = ["-m", "pytest", "-q", "-rfE", "--tb=short", "-W", "default", *arguments]
    if find_spec("xdist") and not context.tiny:
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
    """Measure peak and time of steps in runs with Lightning."""
    options = {
        "fused": "checkpointing=fused",
        "offload": "checkpointing=offload",
        "CUDA graph": "trainer.cuda_graph=true",
    }
    rows: dict[str, Row] = {
        name: partial(measure_run, context, name, option) for name, option in options.items()
    }
    return {"fused": rows["fused"]} if context.tiny else rows


def measure_run(context: Context, name: str, option: str) -> dict[str, Any]:
    """Train a few steps on synthetic volumes with all augmentations."""
    side, steps, workers = (16, 2, 0) if context.tiny else (128, 60, 4)
    size = f"[{side},{side},{side}]"
    words = [
        *(f"data.layout.size={size}", f"data.patch_size={size}", "data.layout.num_cases=4"),
        *("data.batch_size=2", "data.patches_per_case=16", f"data.num_workers={workers}"),
        *("augmentation=nnunet", "model=unet_small", f"trainer.max_steps={steps}", "fold=none"),
        *("memory.estimate=false", "evaluation.enabled=false", option),
        f"precision={'16' if context.cuda else '32'}",
        *(["model.width=2"] if context.tiny else []),
    ]
    report, _ = run_training(context, name.replace(" ", "-"), words)
    peak = {k: v for k, v in report["memory"]["steady_step"].items() if k != "phases"}
    return {**report["speed"], "peak": peak}


def nccl(context: Context) -> dict[str, Row]:
    """Train on two GPUs."""
    if context.cuda and torch.cuda.device_count() < 2:
        return {}
    rows: dict[str, Row] = {"trains": partial(train_two, context, "trains")}
    if not context.tiny:
        sync = "trainer.sync_batchnorm=true"
        rows["batch norm"] = partial(train_two, context, "batch-norm", "model.norm=batch", sync)
    return rows


def train_two(context: Context, name: str, *overrides: str) -> dict[str, Any]:
    """Train in two processes."""
    size = "[16,16,16]"
    words = [
        *("trainer.devices=2", f"data.layout.size={size}", f"data.patch_size={size}"),
        *("data.layout.num_cases=6", "data.num_workers=0", "memory.estimate=false"),
        *("trainer.max_steps=6", "evaluation.enabled=false", *overrides),
        *(["model.width=2"] if context.tiny else []),
    ]
    report, code = run_training(context, f"nccl-{name}", words)
    return {"good": code == 0 and report["steps"] == 6, "exit_code": code}


def run_training(
    context: Context, name: str, words: list[str]
) -> tuple[dict[str, Any], int | None]:
    """Run train.py, stopped before the deadline; return its report and its exit code."""
    folder = context.scratch / name
    shutil.rmtree(folder, ignore_errors=True)  # a resumed run would have a wrong time to the goal
    common = [f"data.root={context.scratch / 'volumes'}", f"data.cache={context.scratch / 'cache'}"]
    common += [f"trainer.accelerator={'gpu' if context.cuda else 'cpu'}"]
    common += ["trainer.enable_progress_bar=false", f"hydra.run.dir={folder}"]
    code, output = run_command(context, ["train.py", *common, *words])
    report = folder / "report.json"
    if not report.is_file():
        raise RuntimeError(f"exit code {code}: {output[-800:]}")
    return json.loads(report.read_text()), code


def hippocampus(context: Context) -> dict[str, Row]:
    """Measure Dice over time on Task04_Hippocampus."""
    max_time = "00:00:00:05" if context.tiny else "00:00:05:00"
    return {"fold 0": partial(train, context, "hippocampus", f"trainer.max_time={max_time}")}


def pools(context: Context) -> dict[str, Row]:
    """Train with each pooling for the same number of steps, on one fold."""
    limit = "trainer.max_steps=3" if context.tiny else "trainer.max_steps=1500"
    names = POOLS[:1] if context.tiny else POOLS
    return {name: partial(train, context, f"pool-{name}", limit, f"pool={name}") for name in names}


def train(context: Context, name: str, *overrides: str) -> dict[str, Any]:
    """Train the hippocampus; return Dice over time."""
    data = context.data / "Task04_Hippocampus"
    words = ["experiment=hippocampus", f"data.root={data}"]
    if context.tiny:
        words = ["data.layout.size=[16,16,16]", "data.layout.num_cases=5", "data.batch_size=2"]
        words += ["data.patch_size=[16,16,16]"]
    elif not (data / "dataset.json").is_file():
        raise FileNotFoundError(f"{data} is missing: run `unet3d download task=Task04_Hippocampus`")
    report, code = run_training(context, name, [*words, *overrides])
    curve = read_dice_curve(context.scratch / name)
    reached = [seconds for seconds, dice in curve if dice >= GOAL]
    return read_report(report) | {
        "stopped_early": code is None,
        "goal": GOAL,
        "seconds_to_goal": reached[0] if reached else None,
        "dice_by_seconds": curve,
    }


def read_dice_curve(folder: Path) -> list[tuple[float, float]]:
    """Return (seconds since the first step, Dice) of every validation of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    if "train/loss" not in tags or "val/dice" not in tags:
        return []
    start = events.Scalars("train/loss")[0].wall_time
    return [(round(e.wall_time - start, 1), e.value) for e in events.Scalars("val/dice")]
