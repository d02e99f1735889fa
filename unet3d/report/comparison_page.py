"""The page of a comparison: Dice against memory and time, a table, and validation curves."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unet3d.errors import UsageError
from unet3d.report.curves import Points
from unet3d.report.figures import plot_curves, to_svg
from unet3d.report.page import render_page
from unet3d.report.run_comparison import (
    AGAINST_BEST,
    PARETO,
    RunSummary,
    collect_keys,
    describe_data_sets,
    find_pareto_optimal,
    group_by_data,
    make_comparison_rows,
)
from unet3d.report.slices import get_palette
from unet3d.text import GIB, MIB, escape_mathtext, pluralize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_CURVES = 30
"""Runs whose curves are drawn."""

CURVES = {"val/dice": "mean Dice of validations", "train/loss": "training loss"}


def render_comparison(
    runs: Sequence[RunSummary],
    *,
    curves: Sequence[Mapping[str, Points]],
    problems: Sequence[str],
    command: str,
) -> str:
    """Return the page of a comparison; `curves` holds those of each run."""
    groups = group_by_data(runs)
    subtitle = pluralize(len(runs), "run")
    if len(groups) == 1 < len(runs):
        subtitle += f", {sum(find_pareto_optimal(runs))} of them Pareto-optimal"
    notes = [f"{PARETO}. A line is the front of such runs."] if len(groups) < len(runs) else []
    notes += [AGAINST_BEST] if any(run.against_best for run in runs) else []
    return render_page(
        "comparison.html",
        title="Runs compared",
        subtitle=subtitle,
        problems=problems,
        data_sets=describe_data_sets(runs),
        costs=to_svg(plot_runs(runs)) if any(run.has_costs for run in runs) else None,
        rows=make_comparison_rows(runs),
        left=1 + len(runs[0].differs),
        notes=notes,
        curves=draw_curves(runs, curves),
        max_curves=MAX_CURVES,
        runs_left_out=len(runs) > MAX_CURVES,
        command=command,
        machines=make_machine_rows(runs),
    )


def make_machine_rows(runs: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    """Return a header, and the device and the versions of each run."""
    names = collect_keys([run.report.get("versions", {}) for run in runs])
    rows = [("run", "device", *names)]
    for run in runs:
        versions = [str(run.report.get("versions", {}).get(name, "-")) for name in names]
        rows.append((str(run.folder), str(run.report.get("device", "-")), *versions))
    return rows


def draw_curves(
    runs: Sequence[RunSummary], curves: Sequence[Mapping[str, Points]]
) -> dict[str, object]:
    """Return the mean Dice and the loss of all runs over their steps."""
    drawn = list(zip(runs, curves, get_palette(len(runs)), strict=True))[:MAX_CURVES]
    charts = {}
    for key, label in CURVES.items():
        known = [(run.label, points[key], color) for run, points, color in drawn if points.get(key)]
        if known:
            charts[label] = to_svg(plot_curves(known, label))
    return charts


def plot_runs(runs: Sequence[RunSummary]) -> "Figure":
    """Plot Dice against peak memory and against step time; runs of the same data have a front."""
    from matplotlib.figure import Figure

    colors = get_palette(len(runs))
    drawn = [(run, color) for run, color in zip(runs, colors, strict=True) if run.has_costs]
    if not drawn:
        raise UsageError("cannot draw a figure: no run has Dice, peak memory and step time")
    figure = Figure(figsize=(11, 4.6 + 0.2 * len(drawn)), layout="constrained")
    panels = {"peak_mib": "peak memory of a step (GiB)", "step_seconds": "step time (s)"}
    for axes, (key, label) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        points: dict[str, list[tuple[float, float]]] = {}
        for run, color in drawn:
            x = run.headline_metrics[key] / (GIB / MIB if key == "peak_mib" else 1)
            y = run.headline_metrics["dice"]
            points.setdefault(run.data, []).append((x, y))
            if run.interval is not None:
                axes.plot([x, x], run.interval, color=color, linewidth=1.5, alpha=0.5)
            axes.plot([x], [y], "o", color=color, markersize=8, label=escape_mathtext(run.label))
        for same in points.values():
            line = zip(*find_front(same), strict=True)
            axes.step(*line, where="post", color="grey", linewidth=1, zorder=0)
        axes.set_xlabel(label)
        axes.set_xlim(0, 1.06 * axes.dataLim.x1)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("mean Dice")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.suptitle(f"{len(drawn)} runs; a line is the Pareto front of those of the same data")
    return figure


def find_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points with a higher y than all with a smaller x.

    >>> find_front([(3, 0.9), (1, 0.5), (2, 0.4)])
    [(1, 0.5), (3, 0.9)]
    """
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front
