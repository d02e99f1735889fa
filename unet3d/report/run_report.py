"""Write report.json and format the table printed at the end of a run."""

import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from textwrap import indent
from typing import Any

from unet3d import __version__
from unet3d.files import atomic_write
from unet3d.text import MIB, format_columns, pluralize

PACKAGES = ("torch", "lightning", "monai", "hydra-core", "nibabel", "numpy")


def collect_versions() -> dict[str, str]:
    """Return the versions of Python, this package and the libraries that affect results."""
    return {"unet3d": __version__, "python": platform.python_version()} | {
        name: version(name) for name in PACKAGES
    }


def write_report(report: Mapping[str, Any], path: Path, *, indent: int | None = 2) -> None:
    """Write a report as JSON; NaN and infinities become null."""
    text = json.dumps(replace_nan(report), indent=indent, allow_nan=False)
    with atomic_write(path) as draft:
        draft.write_text(text + "\n", "utf-8")


def replace_nan(value: Any) -> Any:
    """Return plain values with NaN and infinities replaced by None."""
    if isinstance(value, Mapping):
        return {str(k): replace_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def select_headline_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that runs are compared by, without those that the run did not log.

    `dice` and `hd95_mm` of the best checkpoint if it was evaluated, else of the last validation;
    `peak_mib` and `step_seconds` of a training step.
    """
    evaluation, metrics = report.get("evaluation") or {}, report.get("metrics", {})
    headline: dict[str, float | None] = {}
    for score in ("dice", "hd95_mm"):
        mean = (evaluation.get("mean") or {}).get(score)
        headline[score] = mean["mean"] if mean else metrics.get(f"val/{score}")
    step = get_step_memory(report)
    peak = step.get("allocated", step.get("resident"))
    headline["peak_mib"] = None if peak is None else peak / MIB
    headline["step_seconds"] = report.get("speed", {}).get("median_step_seconds")
    return {k: v for k, v in headline.items() if v is not None and math.isfinite(v)}


def get_step_memory(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the measured peaks of a training step; of the first one if it was the only one."""
    memory = report.get("memory", {})
    return memory.get("steady_step") or memory.get("first_step") or {}


def make_estimate_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Compare estimated and measured memory; on a CPU the estimate covers tensors only."""
    estimated = report["memory"].get("estimated", {}).get("allocated")
    if estimated is None:
        return []
    measured = get_step_memory(report).get("allocated")
    what = "of tensors"
    if measured is not None:
        what = f"allocated ({100 * (estimated / measured - 1):+.1f}% versus measured)"
    return [("estimated peak", f"{estimated / MIB:.0f} MiB {what}")]


def make_validation_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """List the Dice of the last validation."""
    return [
        (
            "Dice, mean" if name == "val/dice" else f"Dice, {name.removeprefix('val/dice/')}",
            "class absent" if math.isnan(value) else f"{value:.4f}",
        )
        for name, value in metrics.items()
        if name.startswith("val/dice")
    ]


def make_evaluation_rows(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the scores of the best checkpoint, and say that the same cases chose it."""
    if not evaluation["per_class"]:
        return [("Dice", "no validation case could be evaluated")]
    rows = []
    for name, scores in {"mean": evaluation["mean"], **evaluation["per_class"]}.items():
        dice, hd95, surface = (scores[s]["mean"] for s in ("dice", "hd95_mm", "surface_dice"))
        text = f"{dice:.4f}, HD95 {hd95:.2f} mm, surface Dice {surface:.4f}"
        note = f" ({describe_selection(evaluation)})" if name == "mean" else ""
        rows.append((f"Dice, {name}", "class absent" if math.isnan(dice) else text + note))
    return rows


def describe_selection(evaluation: Mapping[str, Any]) -> str:
    """Say which cases were scored, and how many checkpoints they had chosen the best one from.

    >>> describe_selection({"best_of": 20}), describe_selection({"best_of": None})
    ('validation, best of 20 checkpoints', 'validation, last checkpoint')
    """
    count = evaluation["best_of"]
    chosen = "last checkpoint" if count is None else f"best of {pluralize(count, 'checkpoint')}"
    return f"validation, {chosen}"


def format_report_table(report: Mapping[str, Any]) -> str:
    """Summarize a run in two columns, to print when it ends."""
    rows: list[tuple[str, str]] = []
    if report.get("evaluation"):
        rows += make_evaluation_rows(report["evaluation"])
    else:
        rows += make_validation_rows(report["metrics"])
    postprocessing = report.get("postprocessing", {})
    if postprocessing.get("largest_component"):
        names = ", ".join(postprocessing["largest_component"])
        rows.append(
            ("largest component kept for", f"{names}; judged by {postprocessing['evidence']}")
        )
    speed = report["speed"]
    if speed:
        step, slow = speed["median_step_seconds"], speed["p95_step_seconds"]
        rows.append(("step time", f"{step:.3f} s (95% below {slow:.3f} s)"))
        share = speed["median_data_wait_fraction"]
        rows.append(("waiting for data", f"{100 * share:.1f}% of the step time"))
    peaks = {"a step": get_step_memory(report), "validation": report["memory"].get("validation")}
    for task, peak in peaks.items():
        if peak:
            parts = [f"{v / MIB:.0f} MiB {k}" for k, v in peak.items() if k != "phases"]
            rows.append((f"peak memory of {task}", ", ".join(parts) or "not measured"))
    rows += make_estimate_rows(report)
    rows.append(("parameters", f"{report['parameters']:,}"))
    rows.append(("run folder", report["folder"]))
    if "tensorboard" in (report["config"].get("logger") or {}):
        # Runs are named by their path below --logdir: the run's own folder would have no name.
        parent = quote(str(Path(report["folder"]).parent))
        rows.append(("TensorBoard", f"tensorboard --logdir {parent}"))
    rows += [("warning", message) for message in report.get("warnings", [])]
    return indent(format_columns(rows, left=2), "  ")
