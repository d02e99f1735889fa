"""What a run reports: report.json, report.html (also while it trains), and a result in Python."""

import time
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from unet3d.config.compose import list_config_groups
from unet3d.errors import Interrupted, RunError, UsageError, describe_os_error, summarize_error
from unet3d.files import read_report, write_text
from unet3d.machine import summarize_machine
from unet3d.memory.report import plot_timeline
from unet3d.model.weights import count_parameters
from unet3d.report.run_report import (
    collect_versions,
    get_step_memory,
    select_headline_metrics,
    write_report,
)
from unet3d.training.callbacks.checkpoints import BestCheckpoint
from unet3d.training.callbacks.dashboard import CaseImages
from unet3d.training.config import list_choices
from unet3d.training.loggers import warn
from unet3d.training.pretrained import find_leak
from unet3d.training.run import TrainingRun
from unet3d.training.run_folder import Log

MAX_TIME_FRACTION = 0.05
"""Largest fraction of a run's time that may go into pages of the running run."""


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


def make_result(run: TrainingRun, report: Mapping[str, Any]) -> TrainingResult:
    """Return what a run has reached."""
    best, last = (run.folder / "checkpoints" / name for name in ("best.ckpt", "last.ckpt"))
    return TrainingResult(
        folder=run.folder,
        checkpoint=best if best.exists() else last,
        metrics=select_headline_metrics(report),
        report=report,
    )


def build_report(
    run: TrainingRun, *, steps: int, finished: bool, error: str | None = None
) -> dict[str, Any]:
    """Return the content of report.json."""
    skipped, device = run.module.nonfinite_guard.skipped, run.data.device
    warnings = run.callbacks.training_warnings.warnings(done=finished, steps=steps, skipped=skipped)
    metrics = {name: float(value) for name, value in run.trainer.callback_metrics.items()}
    groups = list_config_groups()
    seen, leak = find_leak(run.data, run.module.metadata.get("pretrained_on", []))
    return {
        "finished": finished,
        **({} if error is None else {"error": error}),
        "folder": str(run.folder),
        "steps": steps,
        "skipped_steps": skipped,
        "best_step": next(
            (c.step for c in list_callbacks(run) if isinstance(c, BestCheckpoint)), None
        ),
        "seconds": run.callbacks.limits.time_elapsed(),
        "parameters": count_parameters(run.module.model),
        "skipped_cases": [finding.describe() for finding in run.data.skipped],
        "warnings": [*filter(None, [*run.data.data_warnings, leak]), *warnings],
        "pretrained_on_validation": seen,
        "metrics": {k: v for k, v in metrics.items() if k.startswith(("val/", "train/"))},
        "memory": run.callbacks.memory.summarize(),
        "speed": run.callbacks.timing.summarize(),
        "precision": {"requested": run.precision.requested, "used": run.precision.used},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": collect_versions(),
        "choices": {k: v for k, v in list_choices(run.settings).items() if k in groups},
        "config": dict(run.config),
    }


def reopen_report(run: TrainingRun, steps: int) -> dict[str, Any]:
    """Return the report of a run that has reached its limits; rebuild what a kill prevented."""
    report = build_report(run, steps=steps, finished=True) | read_report(run.folder)
    report.pop("error", None)
    return report | {"finished": True, "steps": steps}


def is_complete(run: TrainingRun) -> bool:
    """Return whether a run that has reached its limits has its report and its evaluation."""
    report = read_report(run.folder)
    part = "evaluation" if run.data.validation else "postprocessing"
    is_evaluated = part in report and not report[part].get("errors")
    needs_evaluation = run.settings.evaluation.enabled and not is_evaluated
    return bool(report.get("finished")) and "error" not in report and not needs_evaluation


def report_early_end(run: TrainingRun, error: BaseException, log: Log) -> None:
    """Write the report of a run that an error or a signal ends before its limits."""
    steps = run.trainer.global_step
    if isinstance(error, Interrupted):
        log(
            f"\ninterrupted by {error} after {steps} steps; resume with resume=auto "
            f"output={run.folder}"
        )
        error.is_reported = True
    reason = str(error) if isinstance(error, RunError | UsageError) else None
    report = build_report(run, steps=steps, finished=False, error=reason)
    run.callbacks.dashboard.finish({}, 0, finished=False)
    if run.is_main:
        try_write_report(run, report)
        write_page(run, report, log)


def try_write_report(run: TrainingRun, report: dict[str, Any]) -> list[str]:
    """Write the report; return what prevented it, if anything."""
    path = run.folder / "report.json"
    try:
        write_report(report, path)
    except OSError as error:
        return [describe_os_error(error, path)]
    return []


def write_page(run: TrainingRun, report: Mapping[str, Any], log: Log) -> None:
    """Write report.html, and the curves that comparisons draw; the run does not fail if that fails.

    It shows what the run has recorded, and its evaluation if there is one.
    """
    path = run.folder / "report.html"
    try:
        curves = run.callbacks.curves.list_points()
        write_report({"curves": curves}, run.folder / "curves.json", indent=None)
        write_text(path, render_report(run, report, draw_timeline(run, report)))
        log(f"report: {path}")
    except Exception as error:
        log(f"{path} was not written: {summarize_error(error)}")


def render_report(
    run: TrainingRun, report: Mapping[str, Any], timeline: str | None, *, is_running: bool = False
) -> str:
    """Return the page of a run."""
    # Imported here to keep the start of a run fast.
    from unet3d.report.evaluation import embed_worst_cases, read_result
    from unet3d.report.page import render_page
    from unet3d.report.run_report import describe_run

    evaluation = run.folder / "evaluation"
    result = read_result(evaluation / "evaluation.json") if report.get("evaluation") else None
    content = describe_run(
        report,
        title=run.folder.resolve().name,
        curves=run.callbacks.curves.list_points(),
        timeline=timeline,
        kinds_at_peak={} if run.estimate is None else run.estimate.kinds,
        result=result,
        command=run.settings.composition.format_command(f"output={run.folder}"),
        machine=summarize_machine(),
        picture=embed_case(run),
        is_running=is_running,
    )
    content |= embed_worst_cases("run.html", content, result, evaluation)
    return render_page("run.html", **content)


def list_callbacks(run: TrainingRun) -> list[Callback]:
    """Return the callbacks of the trainer, which does not declare them."""
    trainer: Any = run.trainer
    return trainer.callbacks


def embed_case(run: TrainingRun) -> tuple[str, str] | None:
    """Return the latest picture of a validation case with its title, as a page embeds it."""
    for callback in list_callbacks(run):
        if isinstance(callback, CaseImages) and callback.latest is not None:
            from PIL import Image

            title, rgb = callback.latest
            Image.fromarray(rgb).save(file := BytesIO(), "PNG")
            return title, b64encode(file.getvalue()).decode("ascii")
    return None


def draw_timeline(run: TrainingRun, report: Mapping[str, Any]) -> str | None:
    """Plot the estimated memory of a step, on a GPU with the measured peak of each phase."""
    if run.estimate is None:
        return None
    from unet3d.report.figures import to_svg

    phases = get_step_memory(report).get("phases", {})
    measured = {name: peak["allocated"] for name, peak in phases.items() if "allocated" in peak}
    figure = plot_timeline(run.estimate, "", measured=measured)
    figure.set_size_inches(12, 4.5)
    for layer in figure.axes[0].collections:
        layer.set_rasterized(True)  # thousands of steps would make a large file
    return to_svg(figure)


class GrowingReport(Callback):
    """Write report.html of a running run at the end of epochs, which validations precede."""

    def __init__(self, run: TrainingRun):
        self.run = run
        self.timeline: str | None = None
        self.due_at = 0.0

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        start, steps = time.monotonic(), trainer.global_step
        if not self.run.is_main or start < self.due_at:
            return
        try:
            report = build_report(self.run, steps=steps, finished=False)
            self.timeline = self.timeline or draw_timeline(self.run, report)
            page = render_report(self.run, report, self.timeline, is_running=True)
            write_text(self.run.folder / "report.html", page)
        except Exception as error:  # the run goes on; its end says why there is no page
            if self.due_at == 0:
                warn(f"report.html of the running run was not written: {summarize_error(error)}")
        self.due_at = time.monotonic() + (time.monotonic() - start) / MAX_TIME_FRACTION
