"""The page of a comparison: Dice against memory and time, a table, and validation curves."""

from collections.abc import Mapping, Sequence

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
    has_costs,
    make_comparison_rows,
    plot_runs,
)
from unet3d.report.slices import get_palette
from unet3d.text import pluralize

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
    subtitle = pluralize(len(runs), "run")
    if len(group_by_data(runs)) == 1 < len(runs):
        subtitle += f", {sum(find_pareto_optimal(runs))} of them Pareto-optimal"
    notes = [f"{PARETO}. A line is the front of such runs."]
    notes = notes if len(group_by_data(runs)) < len(runs) else []
    notes += [AGAINST_BEST] if any(run.against_best for run in runs) else []
    return render_page(
        "comparison.html",
        title="Runs compared",
        subtitle=subtitle,
        problems=problems,
        data_sets=describe_data_sets(runs),
        costs=to_svg(plot_runs(runs)) if any(map(has_costs, runs)) else None,
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
