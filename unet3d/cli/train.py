"""`unet3d train`: train a network and report what it reached and what it cost."""

import json
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import yaml

from unet3d.cli.launch import launch_ranks
from unet3d.config.compose import ComposedConfig
from unet3d.errors import DoesNotFitError, Interrupted, RunError
from unet3d.lit.callbacks.preemption import SignalListener
from unet3d.lit.distributed import is_communication_error, process_group
from unet3d.machine.device import resolve_device
from unet3d.machine.distributed_env import read_ranks
from unet3d.report import run_report
from unet3d.workflows.training.build import (
    TrainingRun,
    build_report,
    build_training,
    resolve_start,
    summarize_run,
)
from unet3d.workflows.training.final_evaluation import evaluate_best_checkpoint
from unet3d.workflows.training.preflight import count_local_processes


def main(request: ComposedConfig, folder: Path) -> int:
    """One run in its folder, in this process or several."""
    choice = request.config.trainer
    ranks = read_ranks(choice.launch)
    if ranks.world == 1 and choice.launch == "local" and count_local_processes(request.config) > 1:
        fits = ["memory.if_too_large=stop"] if request.sweeping else []
        return launch_ranks(
            [*request.overrides, *fits], folder, count_local_processes(request.config)
        )
    device = resolve_device(str(choice.accelerator))
    meeting = process_group(
        ranks, launch=choice.launch, device=device, timeout_seconds=choice.timeout_seconds
    )
    silence = nullcontext() if ranks.rank == 0 else redirect_stdout(StringIO())
    # While it waits for the others to meet, a process cannot listen: a signal just ends it.
    with silence, meeting as pulse, SignalListener().listening() as signals:
        try:
            return run_training(build_training(request, folder, signals, ranks), signals)
        except Exception as error:
            if pulse is not None and is_communication_error(error):
                raise RunError(
                    f"{pulse.find_unresponsive()} does not answer any more; resume=auto goes on"
                ) from error
            raise


def run_training(job: TrainingRun, signals: SignalListener) -> int:
    """Start or go on, up to the limits; then evaluate."""
    checkpoint, said = resolve_start(job)
    print(summarize_run(job), *said, sep="\n")
    path, done, fault = job.folder / "report.json", False, None
    if checkpoint is not None and job.finished(checkpoint):
        result = json.loads(path.read_text()) if path.exists() else {}
        if not result.get("finished") or "evaluation" in result or not should_evaluate(job):
            print(f"{checkpoint}: this run is finished; raise a limit to train on")
            return 0
        missing = []
    else:
        if job.ranks.rank == 0:
            job.folder.mkdir(parents=True, exist_ok=True)
            (job.folder / "config.yaml").write_text(yaml.safe_dump(job.config, sort_keys=False))
        try:
            fit_model(job, checkpoint, signals)
            done = True
        except Interrupted as stop:
            steps = job.trainer.global_step
            print(
                f"\nstopped by {stop} after {steps} steps; {job.format_resume_overrides()} goes on from there"
            )
            raise
        except RunError as error:
            fault = str(error)
            raise
        finally:
            result = build_report(job, done=done, fault=fault)
            missing = job.list_unwritten_checkpoints() + (
                try_write_report(result, path) if job.ranks.rank == 0 else []
            )
            if not done:
                job.dashboard.finish({}, 0)
    if job.ranks.rank > 0:
        return 0
    if should_evaluate(job) and not missing:
        result["evaluation"] = evaluate_best_checkpoint(job, say=print)
        missing = try_write_report(result, path)
    job.dashboard.finish(run_report.select_headline_metrics(result), result["steps"])
    print("\n" + run_report.format_report_table(result))
    if missing:
        raise RunError("; ".join(missing))
    return 0


def should_evaluate(job: TrainingRun) -> bool:
    """Whether there is something to evaluate, and it is wanted."""
    return bool(job.config["evaluation"]["enabled"] and job.validation)


def try_write_report(result: dict[str, Any], path: Path) -> list[str]:
    """Write the report; what came in between, if anything."""
    try:
        run_report.write_report(result, path)
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    return []


def fit_model(job: TrainingRun, checkpoint: Path | None, signals: SignalListener) -> None:
    """Train."""
    if job.config["memory"]["snapshot"] and torch.cuda.is_available():
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
        dump_memory_snapshot(job)
        raise DoesNotFitError(job.out_of_memory(error)) from error
    except RuntimeError as error:
        fault = job.worker_fault(error)
        if fault is None:
            raise
        raise fault from error
    except SystemExit:  # Lightning's way out of its loops
        if signals.heard is None:
            raise
        raise Interrupted(signals.heard) from None
    finally:
        signals.waits = False


def dump_memory_snapshot(job: TrainingRun) -> None:
    """Write what torch recorded of the GPU's memory, for pytorch.org/memory_viz."""
    if job.config["memory"]["snapshot"] and torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(str(job.folder / "memory_snapshot.pickle"))
