"""Train: start or resume, recover from a lack of memory, evaluate, and write the report."""

import gc
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
import yaml

from unet3d.atomic_write import write_text
from unet3d.config.settings.training import TrainingSettings
from unet3d.data.loading.worker_errors import end_workers_on_error
from unet3d.errors import (
    DoesNotFitError,
    Interrupted,
    RunError,
    UsageError,
    describe_os_error,
    summarize_error,
)
from unet3d.json_file import read_json
from unet3d.lit.callbacks.trial_report import TrialReport
from unet3d.lit.distributed import (
    is_communication_error,
    is_set_on_any_rank,
    leave_process_group,
    process_group,
    run_on_rank_zero,
)
from unet3d.lit.lightning_internals import is_restoring
from unet3d.machine.device import resolve_device
from unet3d.machine.distributed_env import ProcessRank
from unet3d.report import run_report
from unet3d.stop_signals import SignalListener
from unet3d.workflows.memory.strategies import list_leaner_strategies
from unet3d.workflows.shared.run_folder import open_run_folder, write_records
from unet3d.workflows.training.build import build_training
from unet3d.workflows.training.compile_kernels import prepare_kernels
from unet3d.workflows.training.final_evaluation import evaluate_best_checkpoint
from unet3d.workflows.training.run import (
    TrainingRun,
    build_report,
    resolve_start,
    summarize_run,
)

Log = Callable[[str], None]

RESTORE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What the content of a checkpoint can raise; devices and networks raise others meanwhile."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """A run that has been trained up to its limits.

    Attributes:
        folder: the run folder.
        checkpoint: the best checkpoint, or the last one where nothing was validated.
        metrics: ``dice`` and ``hd95_mm`` of the best checkpoint on the validation cases,
            ``peak_mib`` and ``step_seconds`` of a training step; those that were measured.
        report: the content of report.json.
    """

    folder: Path
    checkpoint: Path
    metrics: Mapping[str, float]
    report: Mapping[str, Any]


def train_as_rank(
    settings: TrainingSettings, folder: Path, process: ProcessRank, log: Log
) -> TrainingResult:
    """Train as one rank of a run, which may be the only one."""
    device = resolve_device(settings.trainer.accelerator)
    if device == "cuda":
        process = process.assign_gpu(torch.cuda.device_count())
    group = process_group(
        process,
        launch=settings.trainer.launch,
        device=device,
        timeout_seconds=settings.trainer.timeout_seconds,
    )
    stdout = nullcontext() if process.rank == 0 else redirect_stdout(StringIO())
    with stdout, group as heartbeat, SignalListener().listening() as signals:
        try:
            with ExitStack() as stack:

                def open_folder() -> str:
                    own = open_run_folder(
                        folder,
                        resume=settings.resume,
                        composition=settings.composition,
                        log=log,
                        inputs=settings.list_inputs(),
                        launcher=process.launcher_pid,
                    )
                    return str(stack.enter_context(own))

                own_folder = Path(run_on_rank_zero(process, open_folder))
                return train_within_memory(settings, own_folder, signals, process, log=log)
        except Exception as error:
            if heartbeat is not None and is_communication_error(error):
                ranks = heartbeat.wait_for_unresponsive()
                raise RunError(f"{ranks} stopped responding; rerun with resume=auto") from error
            raise


def train_within_memory(
    settings: TrainingSettings,
    folder: Path,
    signals: SignalListener,
    process: ProcessRank,
    reports: Sequence[TrialReport] = (),
    *,
    log: Log,
) -> TrainingResult:
    """Train; where checkpointing=auto runs out of memory, go on with a leaner strategy.

    `reports` follow the validations, after all callbacks of the run.
    """
    is_auto = settings.strategy == "auto" and process.world_size == 1
    while True:
        run = build_training(settings, folder, signals, process)
        cast(Any, run.trainer).callbacks.extend(reports)
        try:
            return run_training(run, signals, log)
        except DoesNotFitError as error:
            leaner = list_leaner_strategies(run.settings)
            if not is_auto or not leaner:
                raise
            saved = run.callbacks.last.saved_step
            log(f"{error}\ncontinuing from step {max(saved, 0)} with checkpointing={leaner[0]}")
        settings = settings.with_strategy(leaner[0])
        if saved > 0:
            settings = replace(settings, resume="auto")
        del run
        gc.collect()  # autograd's graph of the failed step
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_training(run: TrainingRun, signals: SignalListener, log: Log) -> TrainingResult:
    """Start or resume, train up to the limits, then evaluate."""
    start = resolve_start(run)
    log("\n".join([summarize_run(run), *start.messages]))
    path, message = run.folder / "report.json", None
    finished = goes_on = False
    is_main = run.process.rank == 0
    if start.is_finished:
        report = read_report(path)
        failed = report.pop("error", None) is not None
        if report.get("finished") and not failed and not needs_evaluation(run, report):
            log(
                f"{start.checkpoint}: this run is already finished; raise trainer.max_epochs, "
                "max_steps or max_time, or the patience of early stopping, to continue"
            )
            return make_result(run, report)
        if not report.get("finished"):  # a run that was killed after its last step
            rebuilt = build_report(run, steps=start.steps, finished=True)
            known = ("finished", "steps", "skipped_steps", "warnings")  # from the checkpoint
            report = rebuilt | report | {key: rebuilt[key] for key in known}
        unwritten = try_write_report(report, path) if is_main else []
    else:
        if is_main:
            run.folder.mkdir(parents=True, exist_ok=True)
            config = yaml.safe_dump(dict(run.config), sort_keys=False)
            write_text(run.folder / "config.yaml", config)
            write_records(run.folder, run.settings.composition.records)
        device = run.trainer.strategy.root_device
        prepare_kernels(run.settings, run.precision, device, log=log)
        try:
            fit_model(run, start.checkpoint, signals)
            finished = True
            exit_if_interrupted(run, signals)  # after the last step
            goes_on = True
        except Interrupted as stop:
            steps = run.trainer.global_step
            log(
                f"\ninterrupted by {stop} after {steps} steps; resume with "
                f"{run.format_resume_overrides()}"
            )
            stop.is_reported = True
            raise
        except (RunError, UsageError) as error:
            message = str(error)
            raise
        finally:
            steps = run.trainer.global_step
            report = build_report(run, steps=steps, finished=finished, error=message)
            unwritten = run.list_unwritten_checkpoints()
            unwritten += try_write_report(report, path) if is_main else []
            if not goes_on:
                run.callbacks.dashboard.finish({}, 0, finished=False)
                if is_main:
                    write_page(run, report, log)
    leave_process_group()  # the other ranks do not wait for the evaluation
    if not is_main:
        return make_result(run, report)
    problems, skipped = list(unwritten), run.module.nonfinite_guard.skipped
    failure = run.callbacks.training_warnings.find_failure(report["steps"], skipped)
    if failure is not None:
        report["error"] = failure
        problems.append(failure)
    elif run.settings.evaluation.enabled and not unwritten:
        report |= evaluate_best_checkpoint(run, log=log)
    if not unwritten:
        problems += try_write_report(report, path)
    result = make_result(run, report)
    run.callbacks.dashboard.finish(result.metrics, report["steps"], finished=True)
    log("\n" + run_report.format_report_table(report))
    write_page(run, report, log)
    if problems:
        raise RunError("; ".join(problems))
    return result


def read_report(path: Path) -> dict[str, Any]:
    """Return the report of a run that has ended; nothing if it has none that can be read."""
    try:
        report = read_json(path)
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def make_result(run: TrainingRun, report: Mapping[str, Any]) -> TrainingResult:
    """Return what a run has reached, with the checkpoint that was evaluated if one was."""
    evaluated = (report.get("evaluation") or {}).get("checkpoint")
    names = [*([Path(evaluated).name] if evaluated else []), "best.ckpt", "last.ckpt"]
    checkpoints = [run.folder / "checkpoints" / name for name in names]
    return TrainingResult(
        folder=run.folder,
        checkpoint=next((path for path in checkpoints if path.exists()), checkpoints[-1]),
        metrics=run_report.select_headline_metrics(report),
        report=report,
    )


def needs_evaluation(run: TrainingRun, report: Mapping[str, Any]) -> bool:
    """Return whether the evaluation is enabled and the report of a run that has ended has none."""
    part = "evaluation" if run.validation else "postprocessing"
    is_done = part in report and not report[part].get("errors")
    return run.settings.evaluation.enabled and not is_done


def try_write_report(report: dict[str, Any], path: Path) -> list[str]:
    """Write the report; return what prevented it, if anything."""
    try:
        run_report.write_report(report, path)
    except OSError as error:
        return [describe_os_error(error, path)]
    return []


def write_page(run: TrainingRun, report: Mapping[str, Any], log: Log) -> None:
    """Write report.html; what it needs is imported now, so that runs start as soon as before."""
    from unet3d.workflows.training.page import try_write_run_page

    try_write_run_page(run, report, log)


def exit_if_interrupted(run: TrainingRun, signals: SignalListener) -> None:
    """Raise Interrupted on all ranks if one has received a signal."""
    if is_set_on_any_rank(run.trainer, signals.received is not None):
        raise Interrupted(signals.received or signal.SIGTERM)


def fit_model(run: TrainingRun, checkpoint: Path | None, signals: SignalListener) -> None:
    """Train; explain what went wrong."""
    take_snapshot = run.settings.memory.snapshot and torch.cuda.is_available()
    if take_snapshot:
        torch.cuda.memory._record_memory_history()
    try:
        with end_workers_on_error():
            run.trainer.fit(
                run.module,
                run.train_loader,
                run.val_loader,
                # Lightning would take "last" for a keyword.
                ckpt_path=None if checkpoint is None else str(checkpoint.absolute()),
                weights_only=True,
            )
    except torch.OutOfMemoryError as error:
        if take_snapshot:  # for pytorch.org/memory_viz
            torch.cuda.memory._dump_snapshot(str(run.folder / "memory_snapshot.pickle"))
        raise DoesNotFitError(run.format_oom_report(error)) from error
    except Exception as error:
        is_restored = is_restoring(run.trainer) and isinstance(error, RESTORE_ERRORS)
        if is_restored and not isinstance(error, UsageError):  # a callback's state
            reason = f"{type(error).__name__}: {summarize_error(error)}"
            raise UsageError(f"resume={checkpoint}: it cannot be restored: {reason}") from error
        is_explained = isinstance(error, UsageError | RunError | DoesNotFitError)
        worker_error = None if is_explained else run.explain_worker_error(error)
        if worker_error is None:
            raise
        raise worker_error from error
    except SystemExit:  # how Lightning leaves its loops
        if signals.received is None:
            raise
        raise Interrupted(signals.received) from None
    finally:
        signals.defers_exit = False
