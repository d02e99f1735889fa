"""Compare runs in a table and as JSON: scores, memory, time, and the settings that differ."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

from unet3d.report.evaluation import format_score
from unet3d.report.run_report import replace_nan, select_headline_metrics
from unet3d.text import join_first, pluralize

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

OBJECTIVES = {"dice": -1, "peak_mib": 1, "step_seconds": 1}
"""Metrics to compare runs by; less of metric x sign is better."""


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
        """Return the run's headline metrics."""
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
    lines = [
        f"not ranked together: these runs were scored on {len(groups)} different sets of cases"
    ]
    for same in groups:
        first, names = same[0], list(same[0].cases)
        about = [
            f"{k}={v}" for k, v in first.differs.items() if k == "data" or k.startswith(DATA_KEYS)
        ]
        about.append(f"cases {join_first(names, 2)}" if names else "not evaluated")
        lines.append(f"{join_first([str(run.folder) for run in same])}: {', '.join(about)}")
    return lines


def find_pareto_optimal(runs: Sequence[RunSummary]) -> list[bool]:
    """Return, for each run, whether it is Pareto-optimal in Dice, peak memory and step time.

    It is compared with runs of the same data.
    """
    costs = [
        [sign * run.headline_metrics.get(key, float("inf")) for key, sign in OBJECTIVES.items()]
        for run in runs
    ]
    pairs = list(zip(runs, costs, strict=True))
    return [
        not any(
            all(o <= c for o, c in zip(other_cost, cost, strict=True)) and other_cost != cost
            for other, other_cost in pairs
            if other.data == run.data
        )
        for run, cost in pairs
    ]


def make_comparison_rows(runs: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    """Return a header and one row per run."""
    classes = collect_keys([run.dice for run in runs])
    keys = collect_keys([run.differs for run in runs])
    is_paired = any(run.against_best for run in runs)
    paired = ["against best [95 %]"] if is_paired else []
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
                *([format_difference(run.against_best)] if is_paired else []),
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
    interval = "" if isnan(low) else f" [{low:+.4f}, {high:+.4f}]"
    return f"{difference['mean']:+.4f}{interval}"


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
