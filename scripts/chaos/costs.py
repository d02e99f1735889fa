"""Measure what fault tolerance costs: scaling to two ranks, and the callbacks' share of a step."""

import json
import os
import subprocess
import sys
import time
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

from unet3d.workflows.training.fit import fit_model

from scripts.chaos.runs import FAULT_TOLERANCE_CALLBACKS
from unet3d.cli.train import build_training
from unet3d.config.compose import compose_config
from unet3d.config.settings.training import parse_training
from unet3d.lit.callbacks.checkpoints import LastCheckpoint
from unet3d.lit.nonfinite import NonFiniteGuard
from unet3d.stop_signals import SignalListener

ROUNDS, OVERHEAD_STEPS = 3, 100
LARGE_JOB = [
    *("data.layout.size=[56,56,56]", "data.layout.num_cases=15", "data.patch_size=[48,48,48]"),
    *("data.batch_size=1", "data.patches_per_case=2", "model.width=16", "trainer.max_steps=24"),
    *("trainer.check_val_every_n_epoch=1000", "trainer.num_sanity_val_steps=0"),
    *("trainer.enable_progress_bar=false", "trainer.accelerator=cpu", "memory.estimate=false"),
    *("evaluation.enabled=false", "fold=none"),
]


def start_run(folder: Path, scratch: Path, cores: str, ranks: int) -> subprocess.Popen:
    """Start a run on some cores, with one thread per rank."""
    words = [f"data.root={scratch / 'large'}", f"data.cache={scratch / 'large-preprocessed'}"]
    words += [*LARGE_JOB, f"trainer.devices={ranks}", f"hydra.run.dir={folder}"]
    command = ["taskset", "-c", cores, sys.executable, "-m", "unet3d.cli.main", "train"]
    return subprocess.Popen(
        [*command, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


def read_step_seconds(folder: Path) -> float:
    return json.loads((folder / "report.json").read_text())["speed"]["median_step_seconds"]


def measure_scaling(scratch: Path) -> dict[str, Any]:
    """Time a step of one rank, of two independent runs, and of two ranks, in interleaved rounds."""
    start_run(scratch / "warm", scratch, "0", 1).wait()
    kinds: dict[str, list[tuple[str, int]]] = {
        "one": [("0", 1)],
        "two_apart": [("0", 1), ("1", 1)],
        "two_ranks": [("0,1", 2)],
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(ROUNDS):
        for kind, runs in kinds.items():
            folders = [scratch / f"{kind}-{turn}-{n}" for n in range(len(runs))]
            processes = [
                start_run(folder, scratch, cores, ranks)
                for folder, (cores, ranks) in zip(folders, runs, strict=True)
            ]
            if any(process.wait() for process in processes):
                sys.exit(f"scaling: a run of {kind} failed")
            seconds[kind].append(median(map(read_step_seconds, folders)))
    one, apart, two = (median(seconds[kind]) for kind in kinds)
    return {
        "efficiency": round(one / two, 3),
        "efficiency_beside_two_apart": round(apart / two, 3),
        "median_step_seconds": {kind: round(median(s), 4) for kind, s in seconds.items()},
        "rounds": {kind: [round(s, 4) for s in rounds] for kind, rounds in seconds.items()},
        "note": "two_apart: two independent runs, one per core; the machine was shared, so rounds "
        "are interleaved",
    }


def measure_overhead(scratch: Path) -> dict[str, Any]:
    """Time the hooks of fault tolerance in a child that trains the default run."""
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            sys.exit("overhead: the run failed")
        return json.loads((scratch / "overhead.json").read_text())
    code = 1
    try:
        (scratch / "overhead.json").write_text(json.dumps(time_hooks(scratch)))
        code = 0
    finally:
        os._exit(code)


def time_hooks(scratch: Path) -> dict[str, Any]:
    words = [f"data.root={scratch / 'default'}", f"data.cache={scratch / 'default-preprocessed'}"]
    words += [f"trainer.max_steps={OVERHEAD_STEPS}", "trainer.enable_progress_bar=false"]
    settings = parse_training(compose_config([*words, "trainer.accelerator=cpu"], "train"))
    seconds: dict[str, float] = {}
    with SignalListener().listening() as signals:
        run = build_training(settings, scratch / "overhead", signals)
        callbacks: list[Any] = vars(run.trainer)["callbacks"]
        for callback in callbacks:
            if isinstance(callback, FAULT_TOLERANCE_CALLBACKS):
                for hook in dir(callback):
                    if hook.startswith("on_train_batch_"):
                        time_calls(callback, hook, seconds)
        last = next(c for c in callbacks if isinstance(c, LastCheckpoint))
        for method in ("begin", "check_loss", "check_gradients", "finish", "end_step"):
            time_calls(run.module.nonfinite_guard, method, seconds)
        fit_model(run, None, signals)
    total = sum(run.callbacks.timing.seconds)
    shares = {name: value / total for name, value in seconds.items()}
    shares["LastCheckpoint, writing"] = last.save_seconds / max(
        last.every_seconds, last.save_seconds / 0.01
    )
    guard = {k: v for k, v in shares.items() if k.startswith(NonFiniteGuard.__name__)}
    return {
        "share": round(sum(shares.values()), 5),
        "share_of_finite_steps": round(sum(guard.values()), 5),
        "shares": {name: round(value, 6) for name, value in sorted(shares.items())},
        "checkpoint_seconds": round(last.save_seconds, 4),
        "median_step_seconds": round(median(run.callbacks.timing.seconds), 4),
        "steps": OVERHEAD_STEPS,
        "note": "NonFiniteGuard.check_gradients includes the norm of the gradients, which "
        "clipping needs anyway",
    }


def time_calls(owner: Any, name: str, seconds: dict[str, float]) -> None:
    """Wrap a method so that the time of its calls is added up in `seconds`."""
    method, key = getattr(owner, name), f"{type(owner).__name__}.{name}"
    seconds[key] = 0.0

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[key] += time.perf_counter() - start

    setattr(owner, name, wrapped)
