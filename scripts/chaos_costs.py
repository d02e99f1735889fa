"""What it costs that runs survive: a second rank beside one, and the callbacks' share of a step."""

import json
import os
import subprocess
import sys
import time
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

from chaos_runs import HOOKED

from unet3d.cli.train import fit_model
from unet3d.config.compose import compose_config
from unet3d.lit.callbacks.checkpoints import LastCheckpoint
from unet3d.lit.callbacks.preemption import SignalListener
from unet3d.lit.nonfinite import NonFiniteGuard
from unet3d.workflows.training.build import build_training

ROUNDS = 3
HEAVY = [
    *("data.source.size=[56,56,56]", "data.source.num_cases=15", "data.patch_size=[48,48,48]"),
    *("data.batch_size=1", "data.patches_per_case=2", "model.width=16", "trainer.max_steps=24"),
    *("trainer.check_val_every_n_epoch=1000", "trainer.num_sanity_val_steps=0"),
    *("trainer.enable_progress_bar=false", "trainer.accelerator=cpu", "memory.estimate=false"),
    *("evaluation.enabled=false", "fold=none"),
]


def timed(folder: Path, scratch: Path, cores: str, ranks: int) -> subprocess.Popen:
    """Start a run on some cores, with as many threads as ranks."""
    words = [f"data.root={scratch / 'heavy'}", f"data.cache={scratch / 'heavy-prepared'}", *HEAVY]
    words += [f"trainer.devices={ranks}", f"hydra.run.dir={folder}"]
    command = ["taskset", "-c", cores, sys.executable, "-m", "unet3d.cli.main", "train"]
    return subprocess.Popen(
        [*command, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


def step_seconds(folder: Path) -> float:
    return json.loads((folder / "report.json").read_text())["speed"]["median_step_seconds"]


def scaling(scratch: Path) -> dict[str, Any]:
    """Seconds of a step: one rank on a core, two such runs side by side, two ranks; in turns."""
    timed(scratch / "warm", scratch, "0", 1).wait()
    kinds: dict[str, list[tuple[str, int]]] = {
        "one": [("0", 1)],
        "two_apart": [("0", 1), ("1", 1)],
        "two_ranks": [("0,1", 2)],
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(ROUNDS):
        for kind, runs in kinds.items():
            folders = [scratch / f"{kind}-{turn}-{n}" for n in range(len(runs))]
            started = [
                timed(folder, scratch, cores, ranks)
                for folder, (cores, ranks) in zip(folders, runs, strict=True)
            ]
            if any(process.wait() for process in started):
                sys.exit(f"scaling: a run of {kind} failed")
            found[kind].append(median(map(step_seconds, folders)))
    one, apart, two = (median(found[kind]) for kind in kinds)
    return {
        "efficiency": round(one / two, 3),
        "efficiency_beside_two_apart": round(apart / two, 3),
        "median_step_seconds": {kind: round(median(s), 4) for kind, s in found.items()},
        "rounds": {kind: [round(s, 4) for s in seconds] for kind, seconds in found.items()},
        "note": "two_apart are two runs that know nothing of each other, on a core each; "
        "the machine was shared, rounds are interleaved",
    }


def overhead(scratch: Path, steps: int = 100) -> dict[str, Any]:
    """Seconds within the hooks, of a hundred steps of the default job."""
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            sys.exit("overhead: the run failed")
        return json.loads((scratch / "overhead.json").read_text())
    code = 1
    try:
        (scratch / "overhead.json").write_text(json.dumps(measured(scratch, steps)))
        code = 0
    finally:
        os._exit(code)


def measured(scratch: Path, steps: int) -> dict[str, Any]:
    words = [f"data.root={scratch / 'default'}", f"data.cache={scratch / 'default-prepared'}"]
    words += [f"trainer.max_steps={steps}", "trainer.enable_progress_bar=false"]
    request = compose_config([*words, "trainer.accelerator=cpu"], "train")
    spent: dict[str, float] = {}
    with SignalListener().listening() as signals:
        run = build_training(request, scratch / "overhead", signals)
        callbacks: list[Any] = vars(run.trainer)["callbacks"]
        for watched in callbacks:
            if isinstance(watched, HOOKED):
                for hook in dir(watched):
                    if hook.startswith("on_train_batch_"):
                        clocked(watched, hook, spent)
        last = next(c for c in callbacks if isinstance(c, LastCheckpoint))
        for part in ("begin", "look", "guard", "finish", "end_step"):
            clocked(run.task.finite, part, spent)
        fit_model(run, None, signals)
    whole = sum(run.speed.seconds)
    share = {name: seconds / whole for name, seconds in spent.items()}
    share["LastCheckpoint, writing"] = last.took / max(last.every_seconds, last.took / 0.01)
    finite = {k: v for k, v in share.items() if k.startswith(NonFiniteGuard.__name__)}
    return {
        "share": round(sum(share.values()), 5),
        "share_of_finite_steps": round(sum(finite.values()), 5),
        "shares": {name: round(value, 6) for name, value in sorted(share.items())},
        "checkpoint_seconds": round(last.took, 4),
        "median_step_seconds": round(median(run.speed.seconds), 4),
        "steps": steps,
        "note": "FiniteSteps.guard includes the norm of the gradients, which clipping needs anyway",
    }


def clocked(owner: Any, name: str, spent: dict[str, float]) -> None:
    """Add what a method takes to what was spent."""
    method, key = getattr(owner, name), f"{type(owner).__name__}.{name}"
    spent[key] = 0.0

    @wraps(method)
    def wrapped(*given: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        try:
            return method(*given, **named)
        finally:
            spent[key] += time.perf_counter() - begun

    setattr(owner, name, wrapped)
