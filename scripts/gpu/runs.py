"""Rows of the GPU report that are runs: tests, the overhead of callbacks, trainings."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from scripts.bench.quality import POOLS
from scripts.bench.quality_results import read_report
from scripts.gpu.rows import ROOT, Context, Row
from unet3d.cli.train import build_training
from unet3d.config.compose import compose_config
from unet3d.config.settings.training import parse_training
from unet3d.lit.callbacks.checkpoints import LastCheckpoint
from unet3d.lit.callbacks.prefetch import Prefetch
from unet3d.lit.callbacks.resume_state import ResumeState
from unet3d.lit.callbacks.step_memory import StepMemory
from unet3d.lit.nonfinite import NonFiniteGuard
from unet3d.workflows.training.run import TrainingRun

GOAL = 0.88
"""The Dice for `seconds_to_goal`."""

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""Calls in which the host waits for the GPU."""

STOP_SECONDS = 40
"""Time that a run has to stop, and this process to report it."""


# Tests.


def tests(context: Context) -> dict[str, Row]:
    """Run the tests that need a GPU, and those that depend on internals of torch."""
    if context.tiny:
        return {"memory": partial(run_tests, context, ["tests/memory/test_allocator.py"])}
    ignored = [] if find_spec("nnunetv2") else ["--ignore=tests/workflows/planning"]
    return {
        "gpu": partial(run_tests, context, ["tests", "-m", "gpu", *ignored]),
        "memory": partial(run_tests, context, ["tests/memory", "tests/checkpointing"]),
    }


def run_tests(context: Context, arguments: list[str]) -> dict[str, Any]:
    """Run pytest; warnings are not errors, because they depend on the versions of packages."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-W", "default"]
    command += arguments
    if find_spec("xdist") and not context.tiny:
        command += ["-n", "4", "--dist", "worksteal"]
    code, output = run_command(context, command, context.remaining_seconds() - STOP_SECONDS)
    failures = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    counts = {
        kind: int(n)
        for n, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", output[-500:])
    }
    good = code == 0 and counts.get("passed", 0) > 0
    row: dict[str, Any] = {"good": good, "exit_code": code, **counts, "failures": failures}
    return row if good else row | {"output": output[-6000:]}


def run_command(
    context: Context, command: list[str], timeout_seconds: float
) -> tuple[int | None, str]:
    """Return a command's exit code (None if it was stopped at its time limit) and output."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    log = context.scratch / "command.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        code: int | None = None
        try:
            code = process.wait(max(1.0, timeout_seconds))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS / 2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return code, log.read_text(errors="replace")


# Overhead of callbacks, effect of prefetching and offload.


def callbacks(context: Context) -> dict[str, Row]:
    """Time a step under Lightning, with all callbacks and without some."""
    cases: dict[str, Callable[[TrainingRun], None]] = {
        "all": lambda run: None,
        "without memory measurement": partial(remove_callbacks, kinds=(StepMemory,)),
        "without fault tolerance": remove_fault_tolerance,
        "all, again": lambda run: None,
        "prefetching off": partial(remove_callbacks, kinds=(Prefetch,)),
    }
    rows: dict[str, Row] = {
        name: partial(time_steps, context, name, change) for name, change in cases.items()
    }
    offload = "checkpointing=offload"
    rows["offload"] = partial(time_steps, context, "offload", lambda run: None, offload)
    graph = "trainer.cuda_graph=true"
    rows["CUDA graph"] = partial(time_steps, context, "graph", lambda run: None, graph)
    rows["trace of prefetching"] = partial(trace_prefetching, context)
    if context.tiny:
        return {name: rows[name] for name in ("without fault tolerance", "trace of prefetching")}
    return rows


def time_steps(
    context: Context, name: str, change: Callable[[TrainingRun], None], *overrides: str
) -> dict[str, Any]:
    """Train a few steps; return their times and their peak."""
    run = build_run(context, name, *overrides)
    change(run)
    run.trainer.fit(run.module, run.data.train_loader)
    memory = run.callbacks.memory.peak
    return run.callbacks.timing.summarize() | {"peak": None if memory is None else memory.known()}


def trace_prefetching(context: Context) -> dict[str, Any]:
    """Profile steps; return how much of the time in which batches are fetched the GPU works."""
    from torch.profiler import ProfilerActivity, record_function
    from torch.profiler import profile as Profiler

    run = build_run(context, "trace")
    fetch = run.data.train_loader.prefetch

    def fetch_recorded() -> None:
        with record_function("prefetch"):
            fetch()

    run.data.train_loader.prefetch = fetch_recorded
    if not context.cuda:
        vars(run.trainer)["callbacks"].insert(0, Prefetch())
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.cuda else [])]
    with Profiler(activities=activities) as profiler:
        run.trainer.fit(run.module, run.data.train_loader)
        context.synchronize()
    events = profiler.events() or []
    spans: dict[str, list[tuple[float, float]]] = {"prefetch": [], "kernels": []}
    for event in events:
        on_gpu = event.device_type.name == "CUDA"
        name = "kernels" if on_gpu else event.name
        if name in spans:
            spans[name].append((event.time_range.start, event.time_range.end))
    waits = Counter(event.name for event in events if event.name in WAITS)
    fetching = sum(end - start for start, end in spans["prefetch"])
    overlap = measure_overlap(spans["prefetch"], spans["kernels"])
    return {
        "steps": run.trainer.global_step,
        "prefetch_us": fetching,
        "overlap_fraction": overlap / fetching if fetching else None,
        "waits_per_step": {k: n / run.trainer.global_step for k, n in waits.items()},
    }


def measure_overlap(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Return the time that lies in both lists of spans; those of one list may overlap.

    >>> measure_overlap([(0, 4), (10, 12)], [(1, 3), (2, 11)])
    4
    """
    merged: list[list[float]] = []
    for start, end in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return sum(
        max(0, min(end, other_end) - max(start, other_start))
        for start, end in spans
        for other_start, other_end in merged
    )


def build_run(context: Context, name: str, *overrides: str) -> TrainingRun:
    """Build a run of a few steps on synthetic volumes with all augmentations."""
    side, steps, workers = (16, 2, 0) if context.tiny else (128, 60, 4)
    size = f"[{side},{side},{side}]"
    scratch = context.scratch
    words = [
        *(f"data.root={scratch / 'volumes'}", f"data.cache={scratch / 'preprocessed'}"),
        *(f"data.layout.size={size}", f"data.patch_size={size}", "data.layout.num_cases=4"),
        *("data.batch_size=2", "data.patches_per_case=16", f"data.num_workers={workers}"),
        *("augmentation=nnunet", "model=unet_small", f"trainer.max_steps={steps}", "fold=none"),
        *("trainer.enable_progress_bar=false", "memory.estimate=false", "evaluation.enabled=false"),
        f"trainer.accelerator={'gpu' if context.cuda else 'cpu'}",
        f"precision={'16' if context.cuda else '32'}",
        *(["model.width=2"] if context.tiny else []),
        *overrides,
    ]
    folder = scratch / name.replace(" ", "-").replace(",", "")
    return build_training(parse_training(compose_config(words, "train")), folder)


def remove_callbacks(run: TrainingRun, kinds: tuple[type[Callback], ...]) -> None:
    """Remove callbacks of these classes from a run."""
    callbacks: list[Callback] = vars(run.trainer)["callbacks"]
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, kinds)]


def remove_fault_tolerance(run: TrainingRun) -> None:
    """Remove checkpoints, resume state and the checks for non-finite values from a run."""
    remove_callbacks(run, (LastCheckpoint, ResumeState))
    run.module.nonfinite_guard = NoGuard()


class NoGuard(NonFiniteGuard):
    """A guard that checks nothing."""

    def begin(self, *_: Any) -> None:
        """Do nothing."""

    def check_loss(self, *_: Any) -> None:
        """Do nothing."""

    def check_gradients(self, *_: Any) -> None:
        """Leave the norm of gradients to clipping."""

    def finish(self, *_: Any) -> None:
        """Do nothing."""


# Two GPUs.


def nccl(context: Context) -> dict[str, Row]:
    """Train on two GPUs, and stop one of the processes."""
    if context.cuda and torch.cuda.device_count() < 2:
        return {}
    rows: dict[str, Row] = {"trains": partial(train_two, context, "trains")}
    if not context.tiny:
        sync = "trainer.sync_batchnorm=true"
        rows["batch norm"] = partial(train_two, context, "batch-norm", "model.norm=batch", sync)
        rows["a rank stops"] = partial(train_two, context, "stops", stop_rank=True)
    return rows


def train_two(
    context: Context, name: str, *overrides: str, stop_rank: bool = False
) -> dict[str, Any]:
    """Train in two processes; with `stop_rank`, the error must name the rank that was stopped."""
    folder, accelerator = context.scratch / f"nccl-{name}", "gpu" if context.cuda else "cpu"
    words = [
        *("trainer.devices=2", f"trainer.accelerator={accelerator}", "trainer.timeout_seconds=30"),
        *(f"data.root={context.scratch / 'nccl'}", f"data.cache={context.scratch / 'cache'}"),
        *("data.layout.size=[16,16,16]", "data.patch_size=[16,16,16]", "data.layout.num_cases=6"),
        *("data.num_workers=0", "memory.estimate=false", "trainer.enable_progress_bar=false"),
        f"trainer.max_steps={10**6 if stop_rank else 6}",
        f"hydra.run.dir={folder}",
    ]
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "train.py", *words, *overrides]
    stopper = threading.Timer(60, stop_one_rank, [str(folder)]) if stop_rank else None
    if stopper is not None:
        stopper.start()
    code, output = run_command(context, command, context.remaining_seconds() - STOP_SECONDS)
    if stopper is not None:
        stopper.cancel()
    named = "stopped responding" in output
    good = (code == 4 and named) if stop_rank else code == 0
    return {"good": good, "exit_code": code} | ({} if good else {"output": output[-3000:]})


def stop_one_rank(word: str) -> None:
    """Send SIGSTOP to the process of rank 1 whose command has this word."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
            environment = (folder / "environ").read_text().split("\0")
        except OSError:
            continue
        if word in command and "RANK=1" in environment:
            os.kill(int(folder.name), signal.SIGSTOP)


# Trainings.


def hippocampus(context: Context) -> dict[str, Row]:
    """Measure Dice over time on Task04_Hippocampus."""
    max_time = "00:00:00:05" if context.tiny else "00:00:05:00"
    return {"fold 0": partial(train, context, "hippocampus", f"trainer.max_time={max_time}")}


def pools(context: Context) -> dict[str, Row]:
    """Train with each pooling for the same number of steps, on one fold."""
    rows: dict[str, Row] = {}
    for name in POOLS[: 1 if context.tiny else None]:
        limit = "trainer.max_steps=3" if context.tiny else "trainer.max_steps=1500"
        rows[name] = partial(train, context, f"pool-{name}", limit, f"pool={name}")
    return rows


def train(context: Context, name: str, *overrides: str) -> dict[str, Any]:
    """Train in a process of its own, stopped before the deadline; return Dice over time."""
    data = context.data / "Task04_Hippocampus"
    folder, cache = context.scratch / name, f"data.cache={context.scratch / 'cache'}"
    words = ["experiment=hippocampus", f"data.root={data}", cache]
    if context.tiny:
        words = ["trainer.accelerator=cpu", f"data.root={context.scratch / 'synthetic'}", cache]
        words += ["data.layout.size=[16,16,16]", "data.layout.num_cases=5", "data.batch_size=2"]
        words += ["data.patch_size=[16,16,16]"]
    elif not (data / "dataset.json").is_file():
        raise FileNotFoundError(f"{data} is missing: run `unet3d download task=Task04_Hippocampus`")
    command = [sys.executable, "train.py", *words, f"hydra.run.dir={folder}", *overrides]
    command += ["trainer.enable_progress_bar=false"]
    shutil.rmtree(folder, ignore_errors=True)  # a resumed run would have a wrong time to the goal
    code, output = run_command(context, command, context.remaining_seconds() - STOP_SECONDS)
    report = folder / "report.json"
    if not report.is_file():
        raise RuntimeError(f"exit code {code}: {output[-800:]}")
    curve = read_dice_curve(folder)
    reached = [seconds for seconds, dice in curve if dice >= GOAL]
    return read_report(json.loads(report.read_text())) | {
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
