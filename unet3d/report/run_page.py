"""The page of a run: headline, curves, memory, scores, config, and how it was made."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from unet3d.report.curves import Points
from unet3d.report.evaluation import format_interval, format_score, make_scores
from unet3d.report.figures import plot_curves, to_svg
from unet3d.report.run_report import (
    describe_selection,
    format_report_table,
    get_step_memory,
    select_headline_metrics,
)
from unet3d.report.slices import get_class_colors
from unet3d.text import MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_CONFIG = 300_000
"""Characters of a config."""

ACCENT = "#3b5bdb"

MEMORY_LABELS = {
    "allocated": "allocated, MiB",
    "reserved": "reserved, MiB",
    "resident": "RAM of the process, MiB",
}


def describe_run(
    report: Mapping[str, Any],
    *,
    title: str,
    curves: Mapping[str, Points],
    timeline: "Figure | None",
    kinds_at_peak: Mapping[str, int],
    result: Mapping[str, Any] | None,
    command: str,
    machine: Mapping[str, str],
) -> dict[str, Any]:
    """Return the content of run.html; `result` is that of the run's evaluation.json."""
    measured = get_step_memory(report)
    return {
        "title": title,
        "subtitle": describe_state(report),
        "headline": make_headline(report, result),
        "numbers": format_report_table(report),
        "warnings": report.get("warnings", []),
        "curves": draw_curves(curves, result),
        "timeline": None if timeline is None else to_svg(timeline),
        "peak": describe_peak(kinds_at_peak),
        "memory": make_memory_rows(report),
        "is_cpu": "resident" in measured and "allocated" not in measured,
        "is_evaluated": result is not None,
        "scores": None if result is None else make_scores(result),
        "command": command,
        "machine": machine,
        "versions": report["versions"],
        "config": yaml.safe_dump(report["config"], sort_keys=False)[:MAX_CONFIG],
    }


def describe_state(report: Mapping[str, Any]) -> str:
    """Say in one line what ran, and whether it finished."""
    state = "finished" if report.get("finished") else "stopped"
    choices = report.get("choices", {})
    chosen = [f"{k}={choices[k]}" for k in ("data", "model", "checkpointing") if k in choices]
    words = [f"{state} after {report['steps']:,} steps", *chosen, f"on {report['device']}"]
    return ", ".join(words) + (f": {report['error']}" if report.get("error") else "")


def make_headline(
    report: Mapping[str, Any], result: Mapping[str, Any] | None
) -> list[tuple[str, str, str]]:
    """Return the metrics by which runs are compared, each with a label and a remark."""
    metrics = select_headline_metrics(report)
    mean = {} if result is None else result["mean"]
    evaluation = report.get("evaluation")
    selection = describe_selection(evaluation) if evaluation else "of the last validation"
    peak, seconds = metrics.get("peak_mib"), metrics.get("step_seconds")
    kind = "allocated" if "allocated" in get_step_memory(report) else "of the process"
    waiting = report.get("speed", {}).get("median_data_wait_fraction")

    def describe(score: str) -> str:
        return "; ".join(filter(None, [selection, format_interval(mean, score)]))

    return [
        ("Dice", format_score(metrics.get("dice")), describe("dice")),
        ("HD95 (mm)", format_score(metrics.get("hd95_mm"), 2), describe("hd95_mm")),
        ("Peak memory", "-" if peak is None else format_bytes(peak * MIB), kind),
        (
            "Step time",
            "-" if seconds is None else f"{seconds:.3f} s",
            "" if waiting is None else f"{100 * waiting:.1f}% waiting for data",
        ),
        ("Parameters", f"{report['parameters']:,}", "trained"),
    ]


def draw_curves(
    curves: Mapping[str, Points], result: Mapping[str, Any] | None
) -> dict[str, object]:
    """Return charts of the loss, the Dice of validations, HD95 and the learning rate.

    A single point is no chart: the table of the page has its value.
    """
    prefix = "val/dice/"
    names = [name.removeprefix(prefix) for name in curves if name.startswith(prefix)]
    classes = {name: [n] for n, name in enumerate(names, start=1)}
    colors = get_class_colors(classes if result is None else result["classes"])
    dice = {"mean": "val/dice"} | {name: prefix + name for name in names}
    charts = {
        "Loss": ("training loss", {"loss": "train/loss"}),
        "Dice of validations": ("Dice", dice),
        "HD95 of validations": ("mm", {"HD95": "val/hd95_mm"}),
        "Learning rate": ("rate", {"rate": "train/lr"}),
    }
    drawn = {}
    for heading, (unit, keys) in charts.items():
        shown = [
            (name, curves[key], colors[name] if key.startswith(prefix) else ACCENT)
            for name, key in keys.items()
            if curves.get(key)
        ]
        if any(len(points) > 1 for _, points, _ in shown):
            drawn[heading] = to_svg(plot_curves(shown, unit))
    return drawn


def make_memory_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a header, and the estimated and measured peaks in MiB."""
    memory, measured = report["memory"], get_step_memory(report)
    records = {
        "estimated peak of a step": memory.get("estimated"),
        "measured peak of a step": measured,
        **{f"measured in {phase}": peak for phase, peak in measured.get("phases", {}).items()},
        "measured peak of validation": memory.get("validation"),
    }
    known = measured.keys() | (memory.get("estimated") or {}).keys()
    shown = [key for key in MEMORY_LABELS if key in known]
    rows = [
        (name, *(f"{record[key] / MIB:,.0f}" if key in record else "-" for key in shown))
        for name, record in records.items()
        if record
    ]
    return [("", *(MEMORY_LABELS[key] for key in shown)), *rows] if shown else []


def describe_peak(kinds: Mapping[str, int]) -> str:
    """Say what the bytes at the peak are, the most first."""
    top = sum(kinds.values())
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    parts = [f"{k} {n / MIB:,.1f} MiB ({100 * n / top:.0f}%)" for k, n in ordered if n > top / 200]
    return f"At the estimated peak: {', '.join(parts)}."
