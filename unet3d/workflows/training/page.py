"""Write report.html of a run, and curves.json, from which comparisons draw its curves."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unet3d.errors import summarize_error
from unet3d.machine.system import summarize_machine
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.plots import COLORS, compute_kinds_over_time, find_large_events
from unet3d.report.html.run_page import StepTimeline, render_run
from unet3d.report.html.viewer import Viewer
from unet3d.report.run_report import write_report
from unet3d.workflows.evaluation.page import NAME, read_result, write_page
from unet3d.workflows.training.run import TrainingRun

MAX_EVENTS = 400
"""Points of the timeline of a step."""


def try_write_run_page(
    run: TrainingRun, report: Mapping[str, Any], log: Callable[[str], None]
) -> None:
    """Write report.html and curves.json, and say where; the run does not fail if that fails."""
    try:
        write_run_page(run, report)
        log(f"report: {run.folder / NAME}")
    except Exception as error:
        log(f"{run.folder / NAME} was not written: {summarize_error(error)}")


def write_run_page(run: TrainingRun, report: Mapping[str, Any]) -> None:
    """Write what the run has recorded, and its evaluation if there is one."""
    curves = run.callbacks.curves.list_points()
    write_report({"curves": curves}, run.folder / "curves.json", indent=None)
    timeline = None if run.estimate is None else make_timeline(run.estimate)
    folder = run.folder.resolve()
    result = None
    if report.get("evaluation"):
        result = read_result(folder / "evaluation" / "evaluation.json")
    command = run.settings.composition.format_command(f"hydra.run.dir={run.folder}")
    machine = summarize_machine()

    def render(viewer: Viewer | None) -> str:
        return render_run(
            report,
            title=folder.name,
            curves=curves,
            timeline=timeline,
            result=result,
            command=command,
            machine=machine,
            viewer=viewer,
        )

    write_page(run.folder / NAME, render, result)


def make_timeline(estimate: MemoryEstimate) -> StepTimeline:
    """Return the bytes by kind after the events of a step; of many, the highest of each part."""
    start, stop = estimate.steady_step
    large = find_large_events(estimate)
    curve = estimate.curve[start:stop]
    parts = np.array_split(large, min(MAX_EVENTS, len(large)))
    shown = np.array([part[curve[part].argmax()] for part in parts])
    phases = [
        (span.phase, *(int(np.searchsorted(shown, at - start)) for at in (span.start, span.stop)))
        for span in estimate.trace.phases
        if start <= span.start < span.stop <= stop
    ]
    kinds = {k: values[shown].tolist() for k, values in compute_kinds_over_time(estimate).items()}
    last = len(shown) - 1
    return StepTimeline(
        kinds=kinds,
        colors=COLORS,
        phases=[(name, min(a, last), min(b, last)) for name, a, b in phases],
        is_cuda=estimate.trace.cuda,
    )
