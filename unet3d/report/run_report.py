"""Show the results of a run: report.json, a table, the content of its page, the model card."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from textwrap import indent
from typing import Any

import yaml

from unet3d import __version__
from unet3d.files import write_text
from unet3d.report.charts import ACCENT, Line, Points, draw_chart
from unet3d.report.evaluation import make_score_cards, make_scores
from unet3d.report.page import format_score, render_page
from unet3d.report.slices import get_class_colors, get_palette
from unet3d.text import (
    MANY_CLASSES,
    MIB,
    format_bytes,
    format_columns,
    format_time,
    join_first,
    pluralize,
    select_worst,
)

PACKAGES = ("torch", "lightning", "monai", "hydra-core", "nibabel", "numpy")

MEMORY_LABELS = {
    "allocated": "allocated, MiB",
    "reserved": "reserved, MiB",
    "above_start": "RAM above the start, MiB",
    "resident": "RAM of the process, MiB",
}


def collect_versions() -> dict[str, str]:
    """Return the versions of Python, this package and the libraries that affect results."""
    return {"unet3d": __version__, "python": platform.python_version()} | {
        name: version(name) for name in PACKAGES
    }


def write_report(report: Mapping[str, Any], path: Path, *, indent: int | None = 2) -> None:
    """Write a report as JSON; NaN and infinities become null."""
    write_text(path, json.dumps(replace_nan(report), indent=indent, allow_nan=False) + "\n")


def replace_nan(value: Any) -> Any:
    """Return plain values with NaN and infinities replaced by None."""
    if isinstance(value, Mapping):
        return {str(k): replace_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def select_headline_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that runs are compared by, without those that the run did not log.

    Scores are of the best checkpoint if it was evaluated, else of the last validation.
    """
    evaluation, metrics = report.get("evaluation") or {}, report.get("metrics", {})
    headline: dict[str, float | None] = {}
    for score in ("dice", "hd95_mm"):
        mean = (evaluation.get("mean") or {}).get(score)
        headline[score] = mean["mean"] if mean else metrics.get(f"val/{score}")
    headline["peak_mib"] = get_peak_mib(report)
    headline["step_seconds"] = report.get("speed", {}).get("median_step_seconds")
    return {k: v for k, v in headline.items() if v is not None and math.isfinite(v)}


def get_step_memory(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the measured peaks of a training step; of the first one if it was the only one."""
    memory = report.get("memory", {})
    return memory.get("steady_step") or memory.get("first_step") or {}


def get_peak_mib(report: Mapping[str, Any]) -> float | None:
    """Return the measured peak of a training step, on a GPU that of tensors."""
    step = get_step_memory(report)
    peak = step.get("allocated", step.get("resident"))
    return None if peak is None else peak / MIB


def describe_selection(evaluation: Mapping[str, Any]) -> str:
    """Describe which cases were scored, and from how many checkpoints they chose the best one.

    >>> describe_selection({"best_of": 20}), describe_selection({"best_of": None})
    ('validation, best of 20 checkpoints', 'validation, last checkpoint')
    """
    count = evaluation["best_of"]
    chosen = "last checkpoint" if count is None else f"best of {pluralize(count, 'checkpoint')}"
    return f"validation, {chosen}"


def format_report_table(report: Mapping[str, Any]) -> str:
    """Summarize a run in two columns, to print when it ends."""
    rows = make_dice_rows(report)
    speed = report["speed"]
    if speed:
        step, slow = speed["median_step_seconds"], speed["p95_step_seconds"]
        rows.append(("step time", f"{step:.3f} s (95% below {slow:.3f} s)"))
        share = speed["median_data_wait_fraction"]
        rows.append(("waiting for data", f"{100 * share:.1f}% of the step time"))
    peaks = {"a step": get_step_memory(report), "validation": report["memory"].get("validation")}
    for task, peak in peaks.items():
        if peak:
            values = {k.replace("_", " the "): v for k, v in peak.items() if k != "phases"}
            parts = [f"{v / MIB:.0f} MiB {k}" for k, v in values.items()]
            rows.append((f"peak memory of {task}", ", ".join(parts) or "not measured"))
    if estimate := describe_estimate(report):
        rows.append(("estimated peak", estimate))
    rows.append(("parameters", f"{report['parameters']:,}"))
    rows.append(("run folder", report["folder"]))
    if "tensorboard" in (report["config"].get("logger") or {}):
        # Runs are named by their path below --logdir: the run's own folder would have no name.
        parent = quote(str(Path(report["folder"]).parent))
        rows.append(("TensorBoard", f"tensorboard --logdir {parent}"))
    rows += [("warning", message) for message in report.get("warnings", [])]
    return indent(format_columns(rows, left=2), "  ")


def make_dice_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the scores of the best checkpoint, or else the Dice of the last validation."""
    evaluation = report.get("evaluation")
    if not evaluation:
        metrics, prefix = report["metrics"], "val/dice/"
        dice = {n.removeprefix(prefix): v for n, v in metrics.items() if n.startswith(prefix)}
        shown = [("mean", metrics["val/dice"])] if "val/dice" in metrics else []
        shown += [(name, dice[name]) for name in select_worst(dice)]
        return [
            (f"Dice, {name}", "class absent" if math.isnan(value) else f"{value:.4f}")
            for name, value in shown
        ]
    if not evaluation["per_class"]:
        return [("Dice", "no validation case could be evaluated")]
    rows, per_class = [], evaluation["per_class"]
    worst = select_worst({name: scores["dice"]["mean"] for name, scores in per_class.items()})
    for name in (None, *worst):
        scores = evaluation["mean"] if name is None else per_class[name]
        dice, hd95, surface = (scores[s]["mean"] for s in ("dice", "hd95_mm", "surface_dice"))
        text = f"{dice:.4f}, HD95 {format_score(hd95, 2)} mm, surface Dice {surface:.4f}"
        # The cases that are scored have chosen the checkpoint.
        note = f" ({describe_selection(evaluation)})" if name is None else ""
        rows.append(
            (f"Dice, {name or 'mean'}", "class absent" if math.isnan(dice) else text + note)
        )
    if len(worst) < len(per_class):
        rows.append((f"of {len(per_class)} classes", "these are the worst; report.json has all"))
    return rows


def describe_estimate(report: Mapping[str, Any]) -> str | None:
    """Compare estimated and measured memory; on a CPU the estimate covers tensors only."""
    estimated = report["memory"].get("estimated", {}).get("allocated")
    if estimated is None:
        return None
    measured = get_step_memory(report).get("allocated")
    what = "of tensors"
    if measured is not None:
        what = f"allocated ({100 * (estimated / measured - 1):+.1f}% versus measured)"
    return f"{estimated / MIB:.0f} MiB {what}"


def describe_run(
    report: Mapping[str, Any],
    *,
    title: str,
    curves: Mapping[str, Points],
    timeline: str | None,
    kinds_at_peak: Mapping[str, int],
    result: Mapping[str, Any] | None,
    command: str,
    machine: Mapping[str, str],
    picture: tuple[str, str] | None = None,
    is_running: bool = False,
) -> dict[str, Any]:
    """Return the content of run.html; `result` is that of the run's evaluation.json.

    `picture` is that of a case, in base64, with its title.
    """
    choices = report.get("choices", {})
    state = f"{'finished' if report.get('finished') else 'stopped'} after {report['steps']:,} steps"
    if is_running:
        state = f"running, {report['steps']:,} steps at {datetime.now():%Y-%m-%d %H:%M:%S}"
    chosen = [f"{k}={choices[k]}" for k in ("data", "model", "checkpointing") if k in choices]
    error = f": {report['error']}" if report.get("error") else ""
    return {
        "report": report,
        "result": result,
        "title": title,
        "subtitle": ", ".join([state, *chosen, f"on {report['device']}"]) + error,
        "headline": make_headline(report, {} if result is None else result["mean"]),
        "numbers": format_report_table(report),
        "curves": draw_curves(curves, result, report.get("best_step")),
        "timeline": timeline,
        "picture": picture,
        "is_running": is_running,
        "peak": describe_peak(kinds_at_peak),
        "memory": make_memory_rows(report),
        "measured": get_step_memory(report),
        "scores": None if result is None else make_scores(result),
        "command": command,
        "machine": machine,
        "config": yaml.safe_dump(report["config"], sort_keys=False),
    }


def make_headline(report: Mapping[str, Any], mean: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the metrics by which runs are compared, each with a label and a remark."""
    metrics, evaluation = select_headline_metrics(report), report.get("evaluation")
    selection = describe_selection(evaluation) if evaluation else "of the last validation"
    peak, seconds = metrics.get("peak_mib"), metrics.get("step_seconds")
    kind = "allocated" if "allocated" in get_step_memory(report) else "of the process"
    waiting = report.get("speed", {}).get("median_data_wait_fraction")
    remark = "" if waiting is None else f"{100 * waiting:.1f}% waiting for data"
    return [
        *make_score_cards(metrics, mean, [selection, selection]),
        ("Peak memory", "-" if peak is None else format_bytes(peak * MIB), kind),
        ("Step time", "-" if seconds is None else f"{seconds:.3f} s", remark),
        ("Training time", format_time(report.get("seconds", 0)), "with validations"),
        ("Parameters", f"{report['parameters']:,}", "trained"),
    ]


def draw_curves(
    curves: Mapping[str, Points], result: Mapping[str, Any] | None, best: float | None
) -> dict[str, str]:
    """Return charts by heading; a single point is no chart: the page's table has its value.

    `best` is the step of the best checkpoint.
    """
    prefix = "val/dice/"
    names = [name.removeprefix(prefix) for name in curves if name.startswith(prefix)]
    classes = {name: [n] for n, name in enumerate(names, start=1)}
    colors = get_class_colors(classes if result is None else result["classes"])
    dice = {"mean": "val/dice"} | {name: prefix + name for name in names}
    charts = {
        "Loss": ("loss", {"training": "train/loss", "validation": "val/loss"}),
        "Dice of validations": ("Dice", dice),
        "HD95 of validations": ("mm", {"HD95": "val/hd95_mm"}),
        "Learning rate": ("rate", {"rate": "train/lr"}),
    }
    colors["validation"] = get_palette(1)[0]
    drawn = {}
    for heading, (unit, keys) in charts.items():
        shown = [
            Line(name, curves[key], colors.get(name, ACCENT))
            for name, key in keys.items()
            if curves.get(key)
        ]
        if any(len(line.points) > 1 for line in shown):
            drawn[heading] = draw_chart(shown, unit, best=best if unit != "rate" else None)
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
    """List what takes the bytes at the peak, the most first."""
    top = sum(kinds.values())
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    parts = [f"{k} {n / MIB:,.1f} MiB ({100 * n / top:.0f}%)" for k, n in ordered if n > top / 200]
    return f"At the estimated peak: {', '.join(parts)}."


def make_model_card(
    pipeline: Mapping[str, Any],
    members: Sequence[Mapping[str, Any]],
    reports: Sequence[Mapping[str, Any] | None],
) -> str:
    """Return a bundle's model card in Markdown; `reports` are those of its runs, if they exist."""
    spacing, classes = pipeline["spacing_mm"], pipeline["classes"]
    values = pipeline["labels"] if pipeline["regions"] is None else range(len(classes))
    labeled = [f"{value} {name}" for value, name in zip(values, classes, strict=True)]
    content = {
        **pipeline,
        "outputs": [name for name in pipeline["outputs"] if name != "background"],
        "labeled": join_first(labeled, MANY_CLASSES),
        "resampled": f"resampled to {format_mm(spacing)}" if spacing else "at their own spacing",
        "members": map(describe_training, members),
        "runs": [
            describe_scores(report, f"Network {number}: " if len(reports) > 1 else "")
            for number, report in enumerate(reports)
            if report is not None
        ],
    }
    return render_page("model_card.md.jinja", **content) + "\n"


def describe_training(metadata: Mapping[str, Any]) -> str:
    """Describe a network and the cases that it was trained on."""
    config, statistics = metadata["config"], metadata.get("training_statistics")
    network = str(config["model"].get("_target_", "")).rpartition(".")[2]
    text = f"{network}, precision {config['precision']}, seed {config.get('seed')}"
    if config.get("fold") is not None:
        text += f", fold {config['fold']}"
    if statistics is not None:
        low, median, high = zip(*statistics["spacing_mm"], strict=True)
        sizes = f"{format_mm(low)} to {format_mm(high)}" if low != high else format_mm(median)
        text += f"; {pluralize(statistics['cases'], 'case')} with voxels of {sizes}"
    return text


def describe_scores(report: Mapping[str, Any], title: str) -> dict[str, Any]:
    """Return the scores of a run's validation cases, and what its steps took."""
    evaluation = report.get("evaluation") or {}
    per_class = evaluation.get("per_class") or {}
    means = {name: (own.get("dice") or {}).get("mean") for name, own in per_class.items()}
    dice = {name: math.nan if mean is None else mean for name, mean in means.items()}
    scores = {name: per_class[name] for name in select_worst(dice)}
    if per_class:
        scores["mean"] = evaluation.get("mean") or {}
    peak = get_peak_mib(report)
    cost = "" if peak is None else f"; a training step took {peak:.0f} MiB"
    versions = ", ".join(f"{k} {v}" for k, v in report.get("versions", {}).items())
    return {
        "title": title,
        "scores": [(n, s.get("dice") or {}, s.get("hd95_mm") or {}) for n, s in scores.items()],
        "cost": f"{report.get('steps')} steps on {report.get('device')}{cost}; {versions}",
    }


def format_mm(sizes: Sequence[float]) -> str:
    """Return a voxel's size.

    >>> format_mm((1, 1, 1.25))
    '1 x 1 x 1.25 mm'
    """
    return f"{' x '.join(f'{size:.3g}' for size in sizes)} mm"
