"""Compare runs: scores, memory, time, and the settings in which they differ."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet3d.errors import UsageError
from unet3d.files import read_json
from unet3d.report.evaluation import format_score
from unet3d.report.run_report import replace_nan, select_headline_metrics
from unet3d.text import escape_mathtext, flatten_keys, join_first, pluralize
from unet3d.units import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HIDDEN_KEYS = (
    *("resume", "init_from", "data.root", "data.cache", "debug", "save_every_seconds"),
    *("trainer.enable_progress_bar", "data.num_workers", "logger"),
)
"""Keys that do not affect a run's result."""

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


def find_runs(paths: Sequence[Path]) -> tuple[list[RunSummary], list[str]]:
    """Return the runs in these folders, and a message per unreadable report.

    Runs of the same data follow each other, best Dice first.
    """
    reports: dict[Path, Mapping[str, Any]] = {}
    problems = []
    for path in paths:
        files = [path / "report.json"]
        if not files[0].is_file():
            files = sorted(path.rglob("report.json"))
        if not files:
            problems.append(
                f"{path}: no report.json in this folder or below: give run folders, or folders "
                "that contain them; has the run ended?"
            )
        for file in files:
            try:
                report = read_json(file)
                if not isinstance(report, dict) or "config" not in report:
                    raise ValueError("not the report of a run")
                reports[file.parent] = report
            except (OSError, ValueError) as error:
                problems.append(f"{file}: {error}")
    differences = find_config_differences(list(reports.values()))
    runs = []
    for (folder, report), differs in zip(reports.items(), differences, strict=True):
        cases, groups = read_cases(folder / "evaluation" / "evaluation.json")
        run = RunSummary(folder=folder, report=report, differs=differs, cases=cases, groups=groups)
        runs.append(replace(run, data=identify_data(report["config"], cases)))
    runs.sort(key=lambda run: -run.headline_metrics.get("dice", -1))
    return [run for same in group_by_data(runs) for run in same], problems


def read_cases(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return Dice and reference volume per case and class, and groups; none if not evaluated."""
    try:
        evaluation = read_json(path)
        cases = {
            case: {name: {k: s[k] for k in ("dice", "reference_ml")} for name, s in scores.items()}
            for case, scores in evaluation["cases"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, {}
    return cases, evaluation.get("groups") or {}


def identify_data(config: Mapping[str, Any], cases: Mapping[str, Any]) -> str:
    """Return a text that is the same for the same cases with the same reference labels.

    Of runs without an evaluation it is the same for the same dataset and fold.
    """
    if cases:
        volumes = {
            case: {name: s["reference_ml"] for name, s in scores.items()}
            for case, scores in cases.items()
        }
        return json.dumps(volumes, sort_keys=True)
    values = {key: v for key, v in flatten_keys(config) if key.startswith(DATA_KEYS)}
    return json.dumps(values, sort_keys=True)


def group_by_data(runs: Sequence[RunSummary]) -> list[list[RunSummary]]:
    """Return the runs of each data set."""
    groups: dict[str, list[RunSummary]] = {}
    for run in runs:
        groups.setdefault(run.data, []).append(run)
    return list(groups.values())


def describe_data_sets(runs: Sequence[RunSummary]) -> list[str]:
    """Say which runs have other data than the others; nothing if all have the same."""
    groups = group_by_data(runs)
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
    return lines if len(groups) > 1 else []


def find_config_differences(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return, for each run, its values of the options and keys in which the runs differ.

    Where the options of a group differ, the keys of that group are not compared.
    """
    choices: list[dict[str, Any]] = [dict(report.get("choices", {})) for report in reports]
    groups = sorted(find_differing_keys(choices))
    configs = [
        {
            key: value
            for key, value in flatten_keys(report["config"])
            if key not in HIDDEN_KEYS and key.split(".")[0] not in groups
        }
        for report in reports
    ]
    keys = [*groups, *find_differing_keys(configs)]
    values = [chosen | config for chosen, config in zip(choices, configs, strict=True)]
    return [
        {
            key: "null" if value.get(key) is None else str(value[key]).replace(" ", "")
            for key in keys
        }
        for value in values
    ]


def collect_keys(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of all mappings without duplicates, in order of appearance."""
    return list(dict.fromkeys(key for value in values for key in value))


def find_differing_keys(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ, or that one of the mappings does not have."""
    keys = collect_keys(values)
    return [key for key in keys if len({json.dumps(value.get(key)) for value in values}) > 1]


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
    for run, best in zip(runs, find_pareto_optimal(runs), strict=True):
        rows.append(
            (
                str(run.folder),
                *(run.differs.get(key, "-") for key in keys),
                format_score(run.headline_metrics.get("dice"), 4) + format_interval(run.interval),
                *([format_difference(run.against_best)] if is_paired else []),
                *(format_score(run.dice.get(name, {}).get("mean"), 4) for name in classes),
                format_score(run.headline_metrics.get("hd95_mm"), 2),
                format_score(run.headline_metrics.get("peak_mib"), 0),
                format_score(run.headline_metrics.get("step_seconds"), 3),
                f"{run.report.get('parameters', 0):,}",
                str(run.report.get("steps", "-")),
                format_status(run, pareto_optimal=best and counts[run.data] > 1),
            )
        )
    return rows


def format_status(run: RunSummary, *, pareto_optimal: bool) -> str:
    """Return "stopped", or whether the run is Pareto-optimal and how many warnings it has."""
    if not run.report.get("finished"):
        return "stopped"
    status = ["Pareto-optimal"] if pareto_optimal else []
    if warnings := run.report.get("warnings"):
        status.append(pluralize(len(warnings), "warning"))
    return ", ".join(status)


def format_difference(difference: Mapping[str, float] | None) -> str:
    """Return a difference with its sign and its interval, or a dash if there is none."""
    if difference is None:
        return "-"
    low, high = difference["low"], difference["high"]
    interval = "" if isnan(low) else f" [{low:+.4f}, {high:+.4f}]"
    return f"{difference['mean']:+.4f}{interval}"


def format_interval(interval: tuple[float, float] | None) -> str:
    """Return the interval in brackets, to append to a mean."""
    return "" if interval is None else f" [{interval[0]:.4f}, {interval[1]:.4f}]"


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


def has_costs(run: RunSummary) -> bool:
    """Return whether a run has all metrics of a figure of runs."""
    return OBJECTIVES.keys() <= run.headline_metrics.keys()


def plot_runs(runs: Sequence[RunSummary]) -> "Figure":
    """Plot Dice against peak memory and against step time; runs of the same data have a front."""
    from matplotlib.figure import Figure

    from unet3d.report.slices import get_palette

    colors = get_palette(len(runs))
    drawn = [(run, color) for run, color in zip(runs, colors, strict=True) if has_costs(run)]
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
