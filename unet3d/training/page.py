"""Write report.html of a run, and curves.json, from which comparisons draw its curves."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unet3d.evaluation.page import NAME, embed_worst_cases, read_result
from unet3d.files import write_text
from unet3d.machine import summarize_machine
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.plots import plot_timeline
from unet3d.report.page import render_page
from unet3d.report.run_report import describe_run, get_step_memory, write_report
from unet3d.training.run import TrainingRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_run_page(run: TrainingRun, report: Mapping[str, Any]) -> None:
    """Write what the run has recorded, and its evaluation if there is one."""
    curves = run.callbacks.curves.list_points()
    write_report({"curves": curves}, run.folder / "curves.json", indent=None)
    evaluation = run.folder / "evaluation"
    result = read_result(evaluation / "evaluation.json") if report.get("evaluation") else None
    content = describe_run(
        report,
        title=run.folder.resolve().name,
        curves=curves,
        timeline=None if run.estimate is None else draw_timeline(run.estimate, report),
        kinds_at_peak={} if run.estimate is None else run.estimate.kinds,
        result=result,
        command=run.settings.composition.format_command(f"hydra.run.dir={run.folder}"),
        machine=summarize_machine(),
    )
    content |= embed_worst_cases("run.html", content, result, evaluation)
    write_text(run.folder / NAME, render_page("run.html", **content))


def draw_timeline(estimate: MemoryEstimate, report: Mapping[str, Any]) -> "Figure":
    """Plot the estimated memory of a step, on a GPU with the measured peak of each phase."""
    phases = get_step_memory(report).get("phases", {})
    measured = {name: peak["allocated"] for name, peak in phases.items() if "allocated" in peak}
    figure = plot_timeline(estimate, "", measured=measured)
    figure.set_size_inches(12, 4.5)
    for layer in figure.axes[0].collections:
        layer.set_rasterized(True)  # thousands of steps would make a large file
    return figure
