"""Compare runs in a table, as JSON and in a page: scores, memory, time, settings that differ."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any

import numpy as np

from unet3d.config.names import rename_option, rename_saved_keys
from unet3d.errors import UsageError
from unet3d.files import read_json
from unet3d.metric.bootstrap import compute_bootstrap_difference, compute_bootstrap_means
from unet3d.report.charts import Line, draw_chart
from unet3d.report.figures import make_figure, to_svg
from unet3d.report.page import format_mean, format_score, render_page
from unet3d.report.run_report import replace_nan, select_headline_metrics
from unet3d.report.slices import get_palette
from unet3d.text import GIB, MIB, escape_mathtext, flatten_keys, join_first, pluralize, select_worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS_WITHOUT_EFFECT = (
    *("resume", "data.root", "data.cache", "data.cache_format", "debug", "save_every_seconds"),
    *("trainer.enable_progress_bar", "data.num_workers", "logger"),
)
"""Keys that do not affect a run's result."""

DATA_KEYS = ("fold", "data.layout.", "data.num_classes", "data.regions", "data.label_values")
DATA_KEYS += ("data.ignore_label", "data.annotated", "data.invalid_cases", "data.splits")
DATA_KEYS += ("data.group_by", "data.spacing_mm", "data.crop")
"""Beginnings of the keys that decide on which cases, labels and voxels validation scores."""

AGAINST_BEST = "against best: difference of Dice in the same cases, with its 95% bootstrap interval"
PARETO = (
    "Pareto-optimal in Dice, peak memory and step time: no other run of the same data is better in "
    "one of them and as good in the others"
)
OBJECTIVES = {"dice": -1, "peak_mib": 1, "step_seconds": 1}  # less of metric x sign is better
CURVES = {"val/dice": "mean Dice of validations", "train/loss": "training loss"}
MAX_CURVES = 30  # runs whose curves are drawn


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run's report, its evaluation, and where its settings differ from those of other runs."""

    folder: Path
    report: Mapping[str, Any]
    differs: Mapping[str, str]  # key: this run's value
    evaluation: Mapping[str, Any] = field(default_factory=dict)  # evaluation.json, if there is one
    against_best: Mapping[str, float] | None = None  # paired difference of Dice, and its interval

    @property
    def label(self) -> str:
        """Return the settings that differ, or the folder's name if none do."""
        return ", ".join(f"{k}={v}" for k, v in self.differs.items()) or self.folder.name

    @property
    def cases(self) -> Mapping[str, Any]:
        """Return case -> class -> score of the cases that were evaluated."""
        return self.evaluation.get("cases", {})

    @cached_property
    def data(self) -> str:
        """Return a text that is the same for the same cases with the same reference labels.

        Of runs without an evaluation it is the same for the same dataset and fold.
        """
        values: dict[str, Any] = {
            case: {name: s["reference_ml"] for name, s in scores.items()}
            for case, scores in self.cases.items()
        }
        if not values:
            config = flatten_keys(self.report["config"])
            values = {key: value for key, value in config if key.startswith(DATA_KEYS)}
        return json.dumps(values, sort_keys=True)

    @cached_property
    def headline_metrics(self) -> dict[str, float]:
        return select_headline_metrics(self.report)

    @property
    def has_costs(self) -> bool:
        """Return whether the run can be drawn: it has Dice, peak memory and step time."""
        return OBJECTIVES.keys() <= self.headline_metrics.keys()

    @property
    def dice(self) -> dict[str, dict[str, float]]:
        """Return each class's Dice: `mean`, and `low` and `high` if cases were evaluated."""
        per_class = (self.report.get("evaluation") or {}).get("per_class")
        if per_class:
            return {name: scores["dice"] for name, scores in per_class.items()}
        prefix = "val/dice/"
        return {
            key.removeprefix(prefix): {"mean": value}
            for key, value in self.report.get("metrics", {}).items()
            if key.startswith(prefix)
        }

    @property
    def mean_dice(self) -> Mapping[str, float | None]:
        """Return `mean`, and `low` and `high`, its 95% interval, if cases were evaluated."""
        evaluation = self.report.get("evaluation") or {}
        mean = (evaluation.get("mean") or {}).get("dice")
        return mean or {"mean": self.headline_metrics.get("dice")}

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95% confidence interval of the mean Dice, if cases were evaluated."""
        low, high = self.mean_dice.get("low"), self.mean_dice.get("high")
        return None if low is None or high is None else (low, high)


def find_runs(paths: Sequence[Path]) -> tuple[list[RunSummary], list[str]]:
    """Return the runs in these folders, and a message per unreadable report.

    Runs of the same data follow each other, best Dice first, with their difference from that one.
    """
    reports: dict[Path, Mapping[str, Any]] = {}
    problems = []
    for path in paths:
        files = sorted(path.rglob("report.json"))
        if not files:
            problems.append(f"{path}: no report.json in this folder or below; has the run ended?")
        for file in files:
            try:
                report = read_json(file)
                if "config" not in report:
                    raise ValueError("not the report of a run")
                choices = {g: rename_option(g, o) for g, o in report.get("choices", {}).items()}
                config = rename_saved_keys(report["config"])
                reports[file.parent] = report | {"choices": choices, "config": config}
            except (OSError, ValueError) as error:
                problems.append(f"{file}: {error}")
    differences = find_config_differences(list(reports.values()))
    runs = []
    for (folder, report), differs in zip(reports.items(), differences, strict=True):
        file = folder / "evaluation" / "evaluation.json"
        scores = read_json(file) if file.exists() else {}
        runs.append(RunSummary(folder=folder, report=report, differs=differs, evaluation=scores))
    runs.sort(key=lambda run: -run.headline_metrics.get("dice", -1))
    compared = []
    for best, *others in group_by_data(runs):
        compared.append(best)
        for run in others:
            difference = compute_difference(run, best) if run.cases else None
            compared.append(replace(run, against_best=difference))
    return compared, problems


def find_config_differences(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return, for each run, its values of the options and keys in which the runs differ.

    Where options of a group differ, its keys count if they differ among runs of one option.
    """
    choices: list[dict[str, Any]] = [dict(report["choices"]) for report in reports]
    groups = sorted(find_differing_keys(choices))
    configs = [
        {k: v for k, v in flatten_keys(report["config"]) if k not in KEYS_WITHOUT_EFFECT}
        for report in reports
    ]

    def differs_within_options(key: str) -> bool:
        options = [chosen.get(key.split(".")[0]) for chosen in choices]
        pairs = {
            (json.dumps(o), json.dumps(c.get(key))) for o, c in zip(options, configs, strict=True)
        }
        return len(pairs) > len({option for option, _ in pairs})

    keys = [*groups, *filter(differs_within_options, find_differing_keys(configs))]

    def format_value(value: Any) -> str:
        return "null" if value is None else str(value).replace(" ", "")

    values = [chosen | config for chosen, config in zip(choices, configs, strict=True)]
    return [{key: format_value(value.get(key)) for key in keys} for value in values]


def find_differing_keys(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ, or that one of the mappings does not have."""
    keys = collect_keys(values)
    return [key for key in keys if len({json.dumps(value.get(key)) for value in values}) > 1]


def compute_difference(run: RunSummary, best: RunSummary) -> dict[str, float]:
    """Return the difference of mean Dice, of the same cases, and its interval."""
    cells = [(case, name) for case, classes in best.cases.items() for name in classes]
    dice = [
        [scores[case][name]["dice"] for case, name in cells] for scores in (run.cases, best.cases)
    ]
    of_run, of_best = np.array(dice, float).reshape(2, len(best.cases), -1)  # None becomes NaN
    known = best.evaluation.get("groups") or run.evaluation.get("groups")
    groups = [known[case] for case in best.cases] if known else None
    return compute_bootstrap_difference(of_run, of_best, groups)


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
    """List which runs were scored on which data; nothing if it is the same for all."""
    groups = group_by_data(runs)
    if len(groups) < 2:
        return []
    lines = [f"not ranked together: runs were scored on {len(groups)} different sets of cases"]
    for same in groups:
        settings, cases = same[0].differs.items(), list(same[0].cases)
        about = [f"{k}={v}" for k, v in settings if k == "data" or k.startswith(DATA_KEYS)]
        about.append(f"cases {join_first(cases, 2)}" if cases else "not evaluated")
        lines.append(f"{join_first([str(run.folder) for run in same])}: {', '.join(about)}")
    return lines


def explain_comparison(runs: Sequence[RunSummary]) -> list[str]:
    """Say what columns of the table mean, and what the folds of runs have reached together."""
    notes = [AGAINST_BEST] if any(run.against_best for run in runs) else []
    notes += [PARETO] if len(group_by_data(runs)) < len(runs) else []
    return notes + describe_folds(runs)


def describe_folds(runs: Sequence[RunSummary]) -> list[str]:
    """Return the cross-validated Dice of runs that differ in nothing but their fold."""
    by_settings: dict[str, list[RunSummary]] = {}
    for run in runs:
        config = dict(flatten_keys(run.report["config"]))
        others = {k: v for k, v in config.items() if k not in (*KEYS_WITHOUT_EFFECT, "fold")}
        others["init_from"] = bool(config.get("init_from"))  # each fold has its own
        if run.cases:
            key = json.dumps([others, run.report.get("choices")], sort_keys=True, default=str)
            by_settings.setdefault(key, []).append(run)
    lines = []
    for folds in by_settings.values():
        cases = {case: scores for run in folds for case, scores in run.cases.items()}
        if len(folds) < 2 or len(cases) < sum(len(run.cases) for run in folds):
            continue
        known = {k: v for run in folds for k, v in (run.evaluation.get("groups") or {}).items()}
        dice = [[score["dice"] for score in scores.values()] for scores in cases.values()]
        groups = [known.get(case, case) for case in cases] if known else None
        mean = format_mean(compute_bootstrap_means(np.array(dice, float), groups)[1])
        numbers = ", ".join(map(str, sorted(run.report["config"]["fold"] for run in folds)))
        shared = set.intersection(*(set(run.differs.items()) for run in folds))
        about = ", ".join(f"{k}={v}" for k, v in folds[0].differs.items() if (k, v) in shared)
        leaks = [str(run.folder) for run in folds if run.report.get("pretrained_on_validation")]
        lines.append(
            f"{'not cross-validated' if leaks else 'cross-validated'}, folds {numbers}"
            f"{f' of {about}' if about else ''}: Dice {mean} over {len(cases)} cases"
            + (f"; init_from= of {join_first(leaks)} was trained on some of them" if leaks else "")
        )
    return lines


def find_pareto_optimal(runs: Sequence[RunSummary]) -> list[bool]:
    """Return whether each run is Pareto-optimal among the runs of the same data."""
    data, metrics = np.array([run.data for run in runs]), [run.headline_metrics for run in runs]
    costs = np.array([[sign * m.get(k, inf) for k, sign in OBJECTIVES.items()] for m in metrics])
    others = costs[:, None]  # (other, run, objective)
    is_better = (others <= costs).all(-1) & (others < costs).any(-1) & (data[:, None] == data)
    return (~is_better.any(0)).tolist()


def make_comparison_rows(runs: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    """Return a header and one row per run; of many classes, show those that a run does worst."""
    means = [(n, dice["mean"]) for run in runs for n, dice in run.dice.items()]
    means = [(n, inf if mean is None else mean) for n, mean in means]
    classes = select_worst(dict(means) | dict(sorted(means, key=lambda pair: -pair[1])))
    keys = collect_keys([run.differs for run in runs])
    paired = ["against best [95 %]"] if any(run.against_best for run in runs) else []
    rows = [("run", *keys, "cases", "Dice [95 %]", *paired, *classes, "HD95 mm", "peak MiB",
            "s/step", "parameters", "steps", "")]  # fmt: skip
    counts = Counter(run.data for run in runs)
    for run, is_optimal in zip(runs, find_pareto_optimal(runs), strict=True):
        metrics = run.headline_metrics
        status = ["Pareto-optimal"] if is_optimal and counts[run.data] > 1 else []
        if warnings := run.report.get("warnings"):
            status.append(pluralize(len(warnings), "warning"))
        rows.append(
            (
                str(run.folder),
                *(run.differs.get(key, "-") for key in keys),
                str(len(run.cases) or "-"),
                format_mean(run.mean_dice),
                *([format_mean(run.against_best, "+")] if paired else []),
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
    runs: Sequence[RunSummary], compared: Sequence[Path], problems: Sequence[str]
) -> str:
    """Return the page of the runs that these paths hold, with the curves in the runs' folders."""
    subtitle = pluralize(len(runs), "run")
    if len(group_by_data(runs)) == 1 < len(runs):
        subtitle += f", {sum(find_pareto_optimal(runs))} of them Pareto-optimal"
    return render_page(
        "comparison.html",
        title="Runs compared",
        subtitle=subtitle,
        problems=problems,
        data_sets=describe_data_sets(runs),
        costs=to_svg(plot_runs(runs)) if any(run.has_costs for run in runs) else None,
        rows=make_comparison_rows(runs),
        left=1 + len(runs[0].differs),
        notes=explain_comparison(runs),
        curves=draw_run_curves(runs),
        max_curves=MAX_CURVES,
        command=join(["unet3d", "compare", *map(str, compared)]),
        runs=runs,
        packages=collect_keys([run.report.get("versions", {}) for run in runs]),
    )


def draw_run_curves(runs: Sequence[RunSummary]) -> dict[str, str]:
    """Return charts of the first runs by heading."""
    palette = get_palette(len(runs))
    lines: dict[str, list[Line]] = {label: [] for label in CURVES.values()}
    for run, color in list(zip(runs, palette, strict=True))[:MAX_CURVES]:
        file = run.folder / "curves.json"
        curves = read_json(file)["curves"] if file.exists() else {}
        for key, label in CURVES.items():
            if curves.get(key):
                lines[label].append(Line(run.label, curves[key], color))
    return {label: draw_chart(drawn, label) for label, drawn in lines.items() if drawn}


def plot_runs(runs: Sequence[RunSummary]) -> "Figure":
    """Plot Dice against peak memory and against step time; runs of the same data have a front."""
    colors = get_palette(len(runs))
    drawn = {run.folder: color for run, color in zip(runs, colors, strict=True) if run.has_costs}
    if not drawn:
        raise UsageError("cannot draw a figure: no run has Dice, peak memory and step time")
    figure = make_figure(11, 4.6 + 0.2 * len(drawn))
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
        axes.set(xlabel=label, xlim=(0, 1.06 * axes.dataLim.x1))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("mean Dice")
    handles, names = figure.axes[0].get_legend_handles_labels()
    columns = max(1, int(13 * figure.get_figwidth()) // (5 + max(map(len, names))))
    place = {"loc": "outside lower center", "ncols": columns}
    figure.legend(handles, names, fontsize=9, frameon=False, **place)
    figure.suptitle(f"{len(drawn)} runs; a line is the Pareto front of those of the same data")
    return figure
