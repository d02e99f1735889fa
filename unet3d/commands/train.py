"""`unet3d train`: train a network and report what it reached and what it cost."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from unet3d.build.final import evaluated
from unet3d.build.objects import Request
from unet3d.build.run import Run, build, introduction, report_of, start
from unet3d.commands.run import run
from unet3d.lit.signals import Signals
from unet3d.report import report
from unet3d.types import Misfit, Stopped


def main(arguments: Sequence[str]) -> int:
    """Train with the overrides of the command line."""
    return run("train", train, arguments)


def train(request: Request, folder: Path) -> int:
    """One run in its folder."""
    with Signals().listening() as signals:
        return trained(build(request, folder, signals), signals)


def trained(job: Run, signals: Signals) -> int:
    """Start or go on, up to the limits; then evaluate."""
    checkpoint, said = start(job)
    print(introduction(job), *said, sep="\n")
    written, done = job.folder / "report.json", False
    if checkpoint is not None and job.finished(checkpoint):
        result = json.loads(written.read_text()) if written.exists() else {}
        if not result.get("finished") or "evaluation" in result or not to_evaluate(job):
            print(f"{checkpoint}: this run is finished; raise a limit to train on")
            return 0
    else:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "config.yaml").write_text(yaml.safe_dump(job.config, sort_keys=False))
        try:
            fitted(job, checkpoint, signals)
            done = True
        except Stopped as stop:
            steps = job.trainer.global_step
            print(f"\nstopped by {stop} after {steps} steps; {job.to_go_on()} goes on from there")
            raise
        finally:
            result = report_of(job, done=done)
            report.write(result, written)
    if to_evaluate(job):
        result["evaluation"] = evaluated(job, say=print)
        report.write(result, written)
    print("\n" + report.table(result))
    return 0


def to_evaluate(job: Run) -> bool:
    """Whether there is something to evaluate, and it is wanted."""
    return bool(job.config["evaluation"]["enabled"] and job.validation)


def fitted(job: Run, checkpoint: Path | None, signals: Signals) -> None:
    """Train."""
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
    except SystemExit:  # Lightning's way out of its loops
        if signals.heard is None:
            raise
        raise Stopped(signals.heard) from None
    finally:
        signals.waits = False


def snapshot(job: Run) -> None:
    """Write what torch recorded of the GPU's memory, for pytorch.org/memory_viz."""
    if job.config["meter"]["snapshot"] and torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(str(job.folder / "memory_snapshot.pickle"))
