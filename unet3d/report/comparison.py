"""Compare runs in a table, as JSON and in a page: scores, memory, time, settings that differ."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unet3d.errors import UsageError
from unet3d.report.evaluation import format_score
from unet3d.report.figures import Points, add_legend, plot_curves, to_svg
from unet3d.report.page import render_page
from unet3d.report.run_report import replace_nan, select_headline_metrics
from unet3d.report.slices import get_palette
from unet3d.text import GIB, MIB, escape_mathtext, join_first, pluralize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA_KEYS = ("data.layout.", "data.num_classes", "data.regions", "data.splits", "fold")
"""Beginnings of the keys that decide on which cases a run is evaluated."""

AGAINST_BEST = (
    "against best: the mean difference of Dice from the best run in the same cases, with its 95% "
    "bootstrap interval"
)
PARETO = (
    "Pareto-optimal in Dice, peak memory and step time: no other run of the same data is better in "
    "one of them and as good in the others"
)
OBJECTIVES = {"dice": -1, "peak_mib": 1, "step_seconds": 1}  # less of metric x sign is better
CURVES = {"val/dice": "mean Dice of validations", "train/loss": "training loss"}
MAX_CURVES = 30  # runs whose curves are drawn


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run's report, and where its settings differ from those of the other runs."""

    folder: Path
    report: Mapping[str, Any]
    differs: Mapping[str, str] = field(default_factory=dict)  # key: this run's value
    cases: Mapping[str, Any] = field(default_factory=dict)  # evaluated case -> class -> score
    groups: Mapping[str, str] = field(default_factory=dict)  # of the cases, such as patients
    data: str = ""  # the same for runs whose Dice can be compared
    against_best: Mapping[str, float] | None = None  # paired difference of Dice, and its interval

    @property
    def label(self) -> str:
        """Return the settings that differ, or the folder's name if none do."""
        return ", ".join(f"{k}={v}" for k, v in self.differs.items()) or self.folder.name

    @property
    def headline_metrics(self) -> dict[str, float]:
        return select_headline_metrics(self.report)

    @property
    def has_costs(self) -> bool:
        """Return whether the run has all metrics of a figure of runs."""
        return OBJECTIVES.keys() <= self.headline_metrics.keys()

    @property
    def dice(self) -> dict[str, dict[str, float]]:
        """Return each class's Dice: `mean`, and `low` and `high` if cases were evaluated."""
        evaluation = self.report.get("evaluation") or {}
        if evaluation.get("per_class"):
            return {name: scores["dice"] for name, scores in evaluation["per_class"].items()}
        metrics, prefix = self.report.get("metrics", {}), "val/dice/"
        return {
            key.removeprefix(prefix): {"mean": value}
            for key, value in metrics.items()
            if key.startswith(prefix)
        }

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95% confidence interval of the mean Dice, if cases were evaluated."""
        mean = ((self.report.get("evaluation") or {}).get("mean") or {}).get("dice") or {}
        low, high = mean.get("low"), mean.get("high")
        return None if low is None or high is None else (low, high)


def collect_keys(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of all mappings without duplicates, in order of appearance."""
    return list(dict.fromkeys(key for value in values for key in value))


def group_by_data(runs: Sequence[RunSummary]) -> list[list[RunSummary]]:
    """Return the runs of each data set."""
    groups: dict[str, list[RunSummary]] = {}
    for run in runs:
        groups.setdefault(run.data, []).append(run)
    return list(groups.values())


def describe_data_sets(runs: Sequence[RunSummary]) -> list[str]:
    """Say which runs have other data than the others; nothing if all have the same."""
    groups = group_by_data(runs)
    if len(groups) < 2:
        return []
    count = len(groups)
    lines = [f"not ranked together: these runs were scored on {count} different sets of cases"]
    for same in groups:
        settings, cases = same[0].differs.items(), list(same[0].cases)
        about = [f"{k}={v}" for k, v in settings if k == "data" or k.startswith(DATA_KEYS)]
        about.append(f"cases {join_first(cases, 2)}" if cases else "not evaluated")
        lines.append(f"{join_first([str(run.folder) for run in same])}: {', '.join(about)}")
    return lines


def find_pareto_optimal(runs: Sequence[RunSummary]) -> list[bool]:
    """Return whether each run is Pareto-optimal among the runs of the same data."""
    data = np.array([run.data for run in runs])
    costs = np.array(
        [
            [sign * run.headline_metrics.get(k, inf) for k, sign in OBJECTIVES.items()]
            for run in runs
        ]
    )
    others = costs[:, None]  # (other, run, objective)
    is_better = (others <= costs).all(-1) & (others < costs).any(-1) & (data[:, None] == data)
    return (~is_better.any(0)).tolist()


def make_comparison_rows(runs: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    """Return a header and one row per run."""
    classes = collect_keys([run.dice for run in runs])
    keys = collect_keys([run.differs for run in runs])
    paired = ["against best [95 %]"] if any(run.against_best for run in runs) else []
    header = ("run", *keys, "Dice [95 %]", *paired, *classes, "HD95 mm", "peak MiB", "s/step",
            "parameters", "steps", "")  # fmt: skip
    rows = [header]
    counts = Counter(run.data for run in runs)
    for run, is_optimal in zip(runs, find_pareto_optimal(runs), strict=True):
        metrics, interval = run.headline_metrics, run.interval
        status = ["Pareto-optimal"] if is_optimal and counts[run.data] > 1 else []
        if warnings := run.report.get("warnings"):
            status.append(pluralize(len(warnings), "warning"))
        rows.append(
            (
                str(run.folder),
                *(run.differs.get(key, "-") for key in keys),
                format_score(metrics.get("dice"))
                + (f" [{interval[0]:.4f}, {interval[1]:.4f}]" if interval else ""),
                *([format_difference(run.against_best)] if paired else []),
                *(format_score(run.dice.get(name, {}).get("mean")) for name in classes),
                format_score(metrics.get("hd95_mm"), 2),
                format_score(metrics.get("peak_mib"), 0),
                format_score(metrics.get("step_seconds"), 3),
                f"{run.report.get('parameters', 0):,}",
                str(run.report.get("steps", "-")),
                ", ".join(status) if run.report.get("finished") else "stopped",
            )
        )
    return rows


def format_difference(difference: Mapping[str, float] | None) -> str:
    """Return a difference with its sign and its interval, or a dash if there is none."""
    if difference is None:
        return "-"
    low, high = difference["low"], difference["high"]
    return f"{difference['mean']:+.4f}" + ("" if isnan(low) else f" [{low:+.4f}, {high:+.4f}]")


def comparison_to_dict(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Return the comparison as plain values, for JSON."""
    return [
        {
            "run": str(run.folder),
            "finished": bool(run.report.get("finished")),
            "differs": dict(run.differs),
            **run.headline_metrics,
            "dice_interval": run.interval,
            "against_best": replace_nan(run.against_best),
            "dice_by_class": run.dice,
            "parameters": run.report.get("parameters"),
            "steps": run.report.get("steps"),
            "warnings": run.report.get("warnings", []),
            "device": run.report.get("device"),
            "pareto_optimal": best,
        }
        for run, best in zip(runs, find_pareto_optimal(runs), strict=True)
    ]


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
    drawn = list(zip(runs, curves, get_palette(len(runs)), strict=True))[:MAX_CURVES]
    charts = {}
    for key, label in CURVES.items():
        if lines := [(run.label, points[key], c) for run, points, c in drawn if points.get(key)]:
            charts[label] = to_svg(plot_curves(lines, label))
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
        curves=charts,
        max_curves=MAX_CURVES,
        command=command,
        runs=runs,
        packages=collect_keys([run.report.get("versions", {}) for run in runs]),
    )


def plot_runs(runs: Sequence[RunSummary]) -> "Figure":
    """Plot Dice against peak memory and against step time; runs of the same data have a front."""
    from matplotlib.figure import Figure

    colors = get_palette(len(runs))
    drawn = {run.folder: color for run, color in zip(runs, colors, strict=True) if run.has_costs}
    if not drawn:
        raise UsageError("cannot draw a figure: no run has Dice, peak memory and step time")
    figure = Figure(figsize=(11, 4.6 + 0.2 * len(drawn)), layout="constrained")
    panels = {"peak_mib": "peak memory of a step (GiB)", "step_seconds": "step time (s)"}
    for axes, (key, label) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        for same in group_by_data([run for run in runs if run.has_costs]):
            points = []
            for run in same:
                x = run.headline_metrics[key] / (GIB / MIB if key == "peak_mib" else 1)
                points.append((x, run.headline_metrics["dice"]))
                style = {"color": drawn[run.folder], "label": escape_mathtext(run.label)}
                axes.plot(*points[-1], "o", markersize=8, **style)
                if run.interval is not None:
                    axes.plot([x, x], run.interval, linewidth=1.5, alpha=0.5, color=style["color"])
            xs, dice = zip(*sorted(points), strict=True)
            front = np.maximum.accumulate(dice)
            axes.step(xs, front, where="post", color="grey", linewidth=1, zorder=0)
        axes.set_xlabel(label)
        axes.set_xlim(0, 1.06 * axes.dataLim.x1)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("mean Dice")
    add_legend(figure)
    figure.suptitle(f"{len(drawn)} runs; a line is the Pareto front of those of the same data")
    return figure
