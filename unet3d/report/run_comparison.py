"""Runs side by side: what each reached, what it cost, and in what its config differs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unet3d.atomic_write import atomic_write
from unet3d.errors import UsageError
from unet3d.report.diagnosis import plural
from unet3d.report.run_report import select_headline_metrics

HIDDEN_KEYS = (
    *("resume", "init_from", "data.root", "data.cache", "debug", "save_every_seconds"),
    *("trainer.enable_progress_bar", "data.num_workers"),
)
"""Keys that make no difference to what a run is."""

BEATEN_BY = {"dice": -1, "peak_mib": 1, "step_seconds": 1}
"""Of two runs the better one has less of figure x sign."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run, as its report tells it."""

    folder: Path
    report: Mapping[str, Any]
    differs: Mapping[str, str] = field(default_factory=dict)  # key: this run's value

    @property
    def label(self) -> str:
        """What tells it from the others, or its folder's name."""
        return ", ".join(f"{k}={v}" for k, v in self.differs.items()) or self.folder.name

    @property
    def figures(self) -> dict[str, float]:
        """See `report.figures`."""
        return select_headline_metrics(self.report)

    @property
    def dice(self) -> dict[str, dict[str, float]]:
        """Of each class: `mean`, and if it was evaluated `low` and `high`."""
        evaluation = self.report.get("evaluation") or {}
        if evaluation.get("per_class"):
            return {name: scores["dice"] for name, scores in evaluation["per_class"].items()}
        found = self.report.get("metrics", {})
        start = "val/dice/"
        return {k.removeprefix(start): {"mean": v} for k, v in found.items() if k.startswith(start)}

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % of the mean Dice, if cases were evaluated."""
        mean = ((self.report.get("evaluation") or {}).get("mean") or {}).get("dice") or {}
        low, high = mean.get("low"), mean.get("high")
        return None if low is None or high is None else (low, high)


def find_runs(paths: Sequence[Path]) -> tuple[list[RunSummary], list[str]]:
    """The runs that these folders are or hold, the best Dice first; and what is no run, and why."""
    found: dict[Path, Mapping[str, Any]] = {}
    faults = []
    for path in paths:
        files = [path / "report.json"]
        if not files[0].is_file():
            files = sorted(path.rglob("report.json"))
        if not files:
            faults.append(f"{path}: no report.json in it or below, as a run leaves as it ends")
        for file in files:
            try:
                report = json.loads(file.read_text())
                if not isinstance(report, dict) or "config" not in report:
                    raise ValueError("not a run's report")
                found[file.parent] = report
            except (OSError, ValueError) as error:
                faults.append(f"{file}: {error}")
    told = find_config_differences(list(found.values()))
    runs = [
        RunSummary(folder=folder, report=report, differs=differs)
        for (folder, report), differs in zip(found.items(), told, strict=True)
    ]
    return sorted(runs, key=lambda run: -run.figures.get("dice", -1)), faults


def find_config_differences(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Of each run, the options and keys in which not all runs agree.

    An option stands for all its keys; where two runs chose the same one, its keys are compared.
    """
    told: list[dict[str, Any]] = [dict(report.get("choices", {})) for report in reports]
    apart = {key for key in collect_keys(told) if values_differ(told, key)}
    flat = [
        {
            key: value
            for key, value in flatten_keys(report["config"])
            if key not in HIDDEN_KEYS and key.split(".")[0] not in apart
        }
        for report in reports
    ]
    keys = [*sorted(apart), *(key for key in collect_keys(flat) if values_differ(flat, key))]
    values = [choices | config for choices, config in zip(told, flat, strict=True)]
    return [{key: to_override_value(value.get(key)) for key in keys} for value in values]


def collect_keys(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of all of them, each once."""
    return list(dict.fromkeys(key for value in values for key in value))


def values_differ(values: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Whether they have different values, or one has none."""
    return len({json.dumps(value.get(key)) for value in values}) > 1


def flatten_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with values that have no keys of their own.

    >>> dict(flatten_keys({"model": {"depth": 3, "kernel": [1, 3, 3]}}))
    {'model.depth': 3, 'model.kernel_size': [1, 3, 3]}
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def to_override_value(value: Any) -> str:
    """As it would be typed."""
    return "null" if value is None else str(value).replace(" ", "")


def find_pareto_optimal(runs: Sequence[RunSummary]) -> list[bool]:
    """Whether no other run is as good in Dice, memory and seconds, and better in one of them."""
    told = [
        [sign * run.figures.get(key, float("inf")) for key, sign in BEATEN_BY.items()]
        for run in runs
    ]
    return [
        not any(
            all(o <= m for o, m in zip(other, mine, strict=True)) and other != mine
            for other in told
        )
        for mine in told
    ]


def make_comparison_rows(runs: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    """A head, and a row per run."""
    classes = collect_keys([run.dice for run in runs])
    keys = collect_keys([run.differs for run in runs])
    head = ("run", *keys, "Dice [95 %]", *classes, "HD95 mm", "peak MiB", "s/step", "parameters",
            "steps", "")  # fmt: skip
    found = [head]
    for run, best in zip(runs, find_pareto_optimal(runs), strict=True):
        found.append(
            (
                str(run.folder),
                *(run.differs.get(key, "-") for key in keys),
                format_number(run.figures.get("dice"), 4) + format_interval(run.interval),
                *(format_number(run.dice.get(name, {}).get("mean"), 4) for name in classes),
                format_number(run.figures.get("hd95_mm"), 2),
                format_number(run.figures.get("peak_mib"), 0),
                format_number(run.figures.get("step_seconds"), 3),
                f"{run.report.get('parameters', 0):,}",
                str(run.report.get("steps", "-")),
                format_status(run, unbeaten=best and len(runs) > 1),
            )
        )
    return found


def format_status(run: RunSummary, *, unbeaten: bool) -> str:
    """What to know of a run beside its figures."""
    if not run.report.get("finished"):
        return "stopped"
    told = ["unbeaten"] if unbeaten else []
    if warnings := run.report.get("warnings"):
        told.append(plural(len(warnings), "warning"))
    return ", ".join(told)


def format_number(value: float | None, digits: int) -> str:
    """A dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def format_interval(interval: tuple[float, float] | None) -> str:
    """Behind a mean."""
    return "" if interval is None else f" [{interval[0]:.4f}, {interval[1]:.4f}]"


def comparison_to_dict(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """For other programs."""
    return [
        {
            "run": str(run.folder),
            "finished": bool(run.report.get("finished")),
            "differs": dict(run.differs),
            **run.figures,
            "dice_interval": run.interval,
            "dice_by_class": run.dice,
            "parameters": run.report.get("parameters"),
            "steps": run.report.get("steps"),
            "warnings": run.report.get("warnings", []),
            "device": run.report.get("device"),
            "unbeaten": best,
        }
        for run, best in zip(runs, find_pareto_optimal(runs), strict=True)
    ]


def draw_runs(runs: Sequence[RunSummary], path: Path) -> None:
    """Dice against memory and against seconds: what is up and to the left is better."""
    from matplotlib.figure import Figure

    from unet3d.report.slices import palette

    drawn = [run for run in runs if BEATEN_BY.keys() <= run.figures.keys()]
    if not drawn:
        raise UsageError(
            "a picture needs runs that have Dice, a peak and seconds; none of these has"
        )
    figure = Figure(figsize=(11, 4.6 + 0.2 * len(drawn)), layout="constrained")
    colours = palette(len(drawn) + 1)[1:]
    panels = {"peak_mib": "peak of a step in GiB", "step_seconds": "seconds of a step"}
    for axes, (key, label) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        places = []
        for run, colour in zip(drawn, colours, strict=True):
            x = run.figures[key] / (1024 if key == "peak_mib" else 1)
            y = run.figures["dice"]
            places.append((x, -y))
            if run.interval is not None:
                axes.plot([x, x], run.interval, color=colour, linewidth=1.5, alpha=0.5)
            axes.plot([x], [y], "o", color=colour, markersize=8, label=run.label)
        best, front = float("inf"), []
        for x, y in sorted(places):
            if y < best:
                front.append((x, -y))
                best = y
        axes.step(*zip(*front, strict=True), where="post", color="grey", linewidth=1, zorder=0)
        axes.set_xlabel(label)
        axes.set_xlim(0, 1.06 * max(x for x, _ in places))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("Dice, mean of the classes")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.suptitle(f"{len(drawn)} runs; the line joins those that none beats in both")
    with atomic_write(path) as draft:
        figure.savefig(draft, dpi=110, format="png")
