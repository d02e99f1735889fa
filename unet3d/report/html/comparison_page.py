"""The page of a comparison: Dice against memory and time, a table, and validation curves."""

from collections.abc import Mapping, Sequence

from unet3d.report.curves import Points
from unet3d.report.html.charts import Mark, Series, draw_curves, draw_marks, make_legend
from unet3d.report.html.elements import fold, make_table, tag
from unet3d.report.html.evaluation_page import make_warnings, to_hex
from unet3d.report.html.page import Section, make_empty, render_page
from unet3d.report.run_comparison import (
    AGAINST_BEST,
    RunSummary,
    collect_keys,
    describe_data_sets,
    find_front,
    find_pareto_optimal,
    group_by_data,
    make_comparison_rows,
)
from unet3d.report.slices import get_palette
from unet3d.text import pluralize

AXES = {"peak_mib": "peak memory of a step (MiB)", "step_seconds": "step time (s)"}

MAX_CURVES = 30
"""Runs whose curves are drawn."""

PARETO = (
    "Pareto-optimal in Dice, peak memory and step time: no other run of the same data is better in "
    "one of them and as good in the others. A dashed line is the front of such runs."
)


def render_comparison(
    runs: Sequence[RunSummary],
    *,
    curves: Sequence[Mapping[str, Points]],
    problems: Sequence[str],
    command: str,
) -> str:
    """Return the page of a comparison; `curves` holds those of each run."""
    colors = [to_hex(rgb) for rgb in get_palette(len(runs) + 1)[1:]]
    sections = []
    if problems:
        sections.append(Section(title="Not compared", content=[make_warnings(problems)]))
    if different := describe_data_sets(runs):
        sections.append(Section(title="Different data", content=[make_warnings(different)]))
    notes = [PARETO] if len(group_by_data(runs)) < len(runs) else []
    notes += [AGAINST_BEST] if any(run.against_best for run in runs) else []
    sections += [
        Section(title="Dice against cost", content=make_charts(runs, colors)),
        Section(
            title="Runs, highest Dice first",
            content=[make_runs_table(runs), *(tag("p", note, class_="note") for note in notes)],
        ),
        Section(title="Validations", content=make_curves(runs, curves, colors)),
        Section(
            title="How it was made",
            content=[tag("pre", command), fold("Machines and versions", make_machine_table(runs))],
        ),
    ]
    subtitle = pluralize(len(runs), "run")
    if len(group_by_data(runs)) == 1 < len(runs):
        subtitle += f", {sum(find_pareto_optimal(runs))} of them Pareto-optimal"
    return render_page(
        kind="Comparison", title="Runs compared", subtitle=subtitle, sections=sections
    )


def make_runs_table(runs: Sequence[RunSummary]) -> object:
    """Return the rows that the command prints."""
    return make_table(make_comparison_rows(runs), left=1 + len(runs[0].differs))


def make_machine_table(runs: Sequence[RunSummary]) -> object:
    """Return the device and the versions of each run."""
    names = collect_keys([run.report.get("versions", {}) for run in runs])
    rows = [("run", "device", *names)]
    for run in runs:
        versions = [str(run.report.get("versions", {}).get(name, "-")) for name in names]
        rows.append((str(run.folder), str(run.report.get("device", "-")), *versions))
    return make_table(rows, left=2 + len(names))


def make_charts(runs: Sequence[RunSummary], colors: Sequence[str]) -> list[object]:
    """Return Dice against memory and against time, with the Pareto front of each."""
    charts, marks = [], []
    for key, label in AXES.items():
        marks, points = [], {}
        for run, color in zip(runs, colors, strict=True):
            metrics = run.headline_metrics
            if "dice" in metrics and key in metrics:
                place = {"x": metrics[key], "y": metrics["dice"], "interval": run.interval}
                marks.append(Mark(name=run.label, color=color, **place))
                points.setdefault(run.data, []).append((metrics[key], metrics["dice"]))
        if marks:
            fronts = [find_front(same) for same in points.values()]
            charts.append(draw_marks(marks, x_label=label, y_label="mean Dice", fronts=fronts))
    if not charts:
        return [make_empty("No run has Dice and peak memory or step time.")]
    return [tag("div", *charts, class_="charts"), make_legend(marks)]


def make_curves(
    runs: Sequence[RunSummary], curves: Sequence[Mapping[str, Points]], colors: Sequence[str]
) -> list[object]:
    """Return the mean Dice and the loss of all runs over their steps."""
    charts, shown = [], list(zip(runs, curves, colors, strict=True))[:MAX_CURVES]
    for name, label in (("val/dice", "mean Dice of validations"), ("train/loss", "training loss")):
        series = [
            Series(name=run.label, points=points[name], color=color)
            for run, points, color in shown
            if points.get(name)
        ]
        if series:
            charts.append(draw_curves(series, x_label="step", y_label=label))
    if not charts:
        return [make_empty("These runs have no curves.json.")]
    best = tag("p", f"The {MAX_CURVES} runs with the highest Dice are drawn.", class_="note")
    return [tag("div", *charts, class_="charts"), *([best] if len(runs) > MAX_CURVES else [])]
