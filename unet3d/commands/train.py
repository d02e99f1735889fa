"""`unet3d train`: train a network and report what it reached and what it cost."""

import json
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import yaml

from unet3d.build.final import evaluated
from unet3d.build.preflight import processes
from unet3d.build.request import Request
from unet3d.build.run import Run, build, introduction, report_of, start
from unet3d.commands.launch import launched
from unet3d.lit.ranks import connected, lost_contact
from unet3d.lit.signals import Signals
from unet3d.machine.device import accelerator
from unet3d.machine.ranks import ranks_of
from unet3d.report import report
from unet3d.types import Fault, Misfit, Stopped


def main(request: Request, folder: Path) -> int:
    """One run in its folder, in this process or several."""
    choice = request.config.trainer
    ranks = ranks_of(choice.launch)
    if ranks.world == 1 and choice.launch == "here" and processes(request.config) > 1:
        fits = ["meter.on_misfit=stop"] if request.sweeping else []
        return launched([*request.overrides, *fits], folder, processes(request.config))
    device = accelerator(str(choice.accelerator))
    meeting = connected(
        ranks, launch=choice.launch, device=device, timeout_seconds=choice.timeout_seconds
    )
    silence = nullcontext() if ranks.rank == 0 else redirect_stdout(StringIO())
    # While it waits for the others to meet, a process cannot listen: a signal just ends it.
    with silence, meeting as pulse, Signals().listening() as signals:
        try:
            return trained(build(request, folder, signals, ranks), signals)
        except Exception as error:
            if pulse is not None and lost_contact(error):
                raise Fault(
                    f"{pulse.silent()} does not answer any more; resume=auto goes on"
                ) from error
            raise


def trained(job: Run, signals: Signals) -> int:
    """Start or go on, up to the limits; then evaluate."""
    checkpoint, said = start(job)
    print(introduction(job), *said, sep="\n")
    path, done, fault = job.folder / "report.json", False, None
    if checkpoint is not None and job.finished(checkpoint):
        result = json.loads(path.read_text()) if path.exists() else {}
        if not result.get("finished") or "evaluation" in result or not to_evaluate(job):
            print(f"{checkpoint}: this run is finished; raise a limit to train on")
            return 0
        missing = []
    else:
        if job.ranks.rank == 0:
            job.folder.mkdir(parents=True, exist_ok=True)
            (job.folder / "config.yaml").write_text(yaml.safe_dump(job.config, sort_keys=False))
        try:
            fitted(job, checkpoint, signals)
            done = True
        except Stopped as stop:
            steps = job.trainer.global_step
            print(f"\nstopped by {stop} after {steps} steps; {job.to_go_on()} goes on from there")
            raise
        except Fault as error:
            fault = str(error)
            raise
        finally:
            result = report_of(job, done=done, fault=fault)
            missing = job.missing() + (written(result, path) if job.ranks.rank == 0 else [])
            if not done:
                job.dashboard.finish({}, 0)
    if job.ranks.rank > 0:
        return 0
    if to_evaluate(job) and not missing:
        result["evaluation"] = evaluated(job, say=print)
        missing = written(result, path)
    job.dashboard.finish(report.figures(result), result["steps"])
    print("\n" + report.table(result))
    if missing:
        raise Fault("; ".join(missing))
    return 0


def to_evaluate(job: Run) -> bool:
    """Whether there is something to evaluate, and it is wanted."""
    return bool(job.config["evaluation"]["enabled"] and job.validation)


def written(result: dict[str, Any], path: Path) -> list[str]:
    """Write the report; what came in between, if anything."""
    try:
        report.write(result, path)
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    return []


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
    except RuntimeError as error:
        fault = job.worker_fault(error)
        if fault is None:
            raise
        raise fault from error
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
