"""Rows of the GPU's report that are runs of their own: tests, callbacks, trainings."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench_quality import POOLS
from gpu_rows import ROOT, Row, Where
from lightning.pytorch.callbacks import Callback
from quality_results import row as told_of

from unet3d.config.compose import compose_config
from unet3d.lit.callbacks.checkpoints import LastCheckpoint
from unet3d.lit.callbacks.prefetch import Prefetch
from unet3d.lit.callbacks.resume_state import ResumeState
from unet3d.lit.callbacks.step_memory import StepMemory
from unet3d.lit.nonfinite import NonFiniteGuard
from unet3d.workflows.training.build import TrainingRun, build_training

GOAL = 0.88
"""The Dice whose time is told."""

LEAVING = 40
"""Seconds that a run has to stop and this process to tell of it."""


# Tests.


def tests(where: Where) -> dict[str, Row]:
    """Those that need a GPU, and those of the meter, which knows torch from inside."""
    if where.tiny:
        return {"meter": partial(tested, where, ["tests/memory/test_allocator.py"])}
    return {
        "gpu": partial(tested, where, ["tests", "-m", "gpu"]),
        "meter": partial(tested, where, ["tests/meter", "tests/checkpointing"]),
    }


def tested(where: Where, words: list[str]) -> dict[str, Any]:
    """A warning fails no test here: other versions of what is used have others."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-W", "default", *words]
    if find_spec("xdist") and not where.tiny:
        command += ["-n", "4", "--dist", "worksteal"]
    code, said = ended(where, command, where.left() - LEAVING)
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    counts = {
        kind: int(n)
        for n, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", said[-500:])
    }
    good = code == 0 and counts.get("passed", 0) > 0
    found: dict[str, Any] = {"good": good, "exit_code": code, **counts, "failures": failed}
    return found if good else found | {"said": said[-6000:]}


def ended(where: Where, command: list[str], seconds: float) -> tuple[int | None, str]:
    """Exit code and words of a command; None: it had to be stopped, as a user would stop it."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    log = where.scratch / "command.log"
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
            code = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(LEAVING / 2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return code, log.read_text(errors="replace")


# What callbacks cost, and what fetching ahead saves.


def callbacks(where: Where) -> dict[str, Row]:
    """Seconds of a step under Lightning: as it is, and with a part left out."""
    cases: dict[str, Callable[[TrainingRun], None]] = {
        "all": lambda run: None,
        "without the meter": partial(without, kinds=(StepMemory,)),
        "without what survives": unguarded,
        "all, again": lambda run: None,
        "not fetched ahead": partial(without, kinds=(Prefetch,)),
    }
    rows: dict[str, Row] = {name: partial(stepped, where, name, cut) for name, cut in cases.items()}
    rows["offload"] = partial(stepped, where, "offload", lambda run: None, "checkpointing=offload")
    return rows if not where.tiny else {"without what survives": rows["without what survives"]}


def stepped(
    where: Where, name: str, cut: Callable[[TrainingRun], None], *words: str
) -> dict[str, Any]:
    """A short run on volumes that are made for it, with every augmentation."""
    side, steps, workers = (16, 2, 0) if where.tiny else (128, 60, 4)
    size = f"[{side},{side},{side}]"
    given = [
        *(f"data.root={where.scratch / 'volumes'}", f"data.cache={where.scratch / 'prepared'}"),
        *(f"data.source.size={size}", f"data.patch_size={size}", "data.source.num_cases=4"),
        *("data.batch_size=2", "data.patches_per_case=16", f"data.num_workers={workers}"),
        *("augmentation=nnunet", "model=unet_small", f"trainer.max_steps={steps}", "fold=none"),
        *("trainer.enable_progress_bar=false", "memory.estimate=false", "evaluation.enabled=false"),
        f"trainer.accelerator={'gpu' if where.cuda else 'cpu'}",
        f"precision={'16' if where.cuda else '32'}",
        *(["model.width=2"] if where.tiny else []),
        *words,
    ]
    run = build_training(
        compose_config(given, "train"), where.scratch / name.replace(" ", "-").replace(",", "")
    )
    cut(run)
    run.trainer.fit(run.task, run.train_loader)
    memory = run.memory.peak
    return run.speed.summary() | {"peak": None if memory is None else memory.known()}


def without(run: TrainingRun, kinds: tuple[type[Callback], ...]) -> None:
    """Leave callbacks out."""
    here: list[Callback] = vars(run.trainer)["callbacks"]
    here[:] = [callback for callback in here if not isinstance(callback, kinds)]


def unguarded(run: TrainingRun) -> None:
    """Without what looks at losses and gradients, keeps checkpoints and says where a run is."""
    without(run, (LastCheckpoint, ResumeState))
    run.task.finite = Careless()


class Careless(NonFiniteGuard):
    """Looks at nothing."""

    def begin(self, *_: Any) -> None:
        """Remember nothing."""

    def look(self, *_: Any) -> None:
        """Trust the loss."""

    def guard(self, *_: Any) -> None:
        """Leave the norm to who clips."""

    def finish(self, *_: Any) -> None:
        """Look at nothing."""


# Trainings.


def hippocampus(where: Where) -> dict[str, Row]:
    """Dice against time on the Decathlon's Task04."""
    minutes = "00:00:00:05" if where.tiny else "00:00:05:00"
    return {"fold 0": partial(trained, where, "hippocampus", f"trainer.max_time={minutes}")}


def pools(where: Where) -> dict[str, Row]:
    """Max, median and approximate median after as many steps, on one fold."""
    rows: dict[str, Row] = {}
    for name in POOLS[: 1 if where.tiny else None]:
        limit = "trainer.max_steps=3" if where.tiny else "trainer.max_steps=1500"
        rows[name] = partial(trained, where, f"pool-{name}", limit, f"pool={name}")
    return rows


def trained(where: Where, name: str, *words: str) -> dict[str, Any]:
    """A training of its own process, stopped in time: what it reached, and when."""
    data = where.data / "Task04_Hippocampus"
    folder = where.scratch / name
    given = ["experiment=hippocampus", f"data.root={data}", f"data.cache={where.scratch / 'cache'}"]
    if where.tiny:
        given = ["trainer.accelerator=cpu", f"data.root={where.scratch / 'synthetic'}"]
        given += ["data.source.size=[16,16,16]", "data.source.num_cases=5", "data.batch_size=2"]
        given += ["data.patch_size=[16,16,16]", f"data.cache={where.scratch / 'cache'}"]
    elif not (data / "dataset.json").is_file():
        raise FileNotFoundError(f"{data} is not there: unet3d download task=Task04_Hippocampus")
    command = [sys.executable, "train.py", *given, f"hydra.run.dir={folder}", *words]
    command += ["trainer.enable_progress_bar=false"]
    shutil.rmtree(folder, ignore_errors=True)  # time to a goal has no breaks
    code, said = ended(where, command, where.left() - LEAVING)
    report = folder / "report.json"
    if not report.is_file():
        raise RuntimeError(f"exit code {code}: {said[-800:]}")
    curve = validations(folder)
    reached = [seconds for seconds, dice in curve if dice >= GOAL]
    return told_of(json.loads(report.read_text())) | {
        "stopped_early": code is None,
        "goal": GOAL,
        "seconds_to_goal": reached[0] if reached else None,
        "dice_by_seconds": curve,
    }


def validations(folder: Path) -> list[tuple[float, float]]:
    """(seconds since the first step, Dice) of every validation of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    if "train/loss" not in tags or "val/dice" not in tags:
        return []
    begun = events.Scalars("train/loss")[0].wall_time
    return [(round(e.wall_time - begun, 1), e.value) for e in events.Scalars("val/dice")]
