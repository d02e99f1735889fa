"""`unet3d train`: train a network and report what it reached and what it cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from unet3d.build.final import evaluated
from unet3d.build.objects import Request
from unet3d.build.run import Run, build, introduction, report_of, start
from unet3d.commands.run import run
from unet3d.report import report
from unet3d.types import Fault, Misfit


def main(arguments: Sequence[str]) -> int:
    """Train with the overrides of the command line."""
    return run("train", train, arguments)


def train(request: Request, folder: Path) -> int:
    """One run in its folder."""
    job = build(request, folder)
    checkpoint, said = start(job)
    print(introduction(job), *said, sep="\n")
    if checkpoint is not None and job.finished(checkpoint):
        print(f"{checkpoint}: this run is finished; raise a limit to train on")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(job.config, sort_keys=False))
    try:
        code = fitted(job, checkpoint)
    except Fault as fault:
        left = report_of(job, done=False) | {"fault": str(fault)}
        written(left, folder)
        raise
    result = report_of(job, done=code == 0)
    unwritten = job.missing() + written(result, folder)
    if code == 0 and not unwritten and job.config["evaluation"]["enabled"]:
        result["evaluation"] = evaluated(job, say=print)
        unwritten = written(result, folder)
    print("\n" + report.table(result))
    if unwritten:
        raise Fault("; ".join(unwritten))
    return code


def written(result: dict[str, Any], folder: Path) -> list[str]:
    """Write the report; what came in between, if anything."""
    path = folder / "report.json"
    try:
        report.write(result, path)
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    return []


def fitted(job: Run, checkpoint: Path | None) -> int:
    """Train; 130 if Ctrl-C stopped it."""
    if job.config["meter"]["snapshot"] and torch.cuda.is_available():
        torch.cuda.memory._record_memory_history()
    try:
        job.trainer.fit(
            job.task,
            job.train_loader,
            job.val_loader,
            ckpt_path=None if checkpoint is None else str(checkpoint),
            weights_only=True,
        )
    except torch.OutOfMemoryError as error:
        snapshot(job)
        raise Misfit(job.out_of_memory(error)) from error
    except RuntimeError as error:
        fault = job.worker_fault(error)
        if fault is None:
            raise
        raise fault from error
    except SystemExit:  # Lightning's answer to Ctrl-C
        if not job.trainer.interrupted:
            raise
        return 130
    return 0


def snapshot(job: Run) -> None:
    """Write what torch recorded of the GPU's memory, for pytorch.org/memory_viz."""
    if job.config["meter"]["snapshot"] and torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(str(job.folder / "memory_snapshot.pickle"))
