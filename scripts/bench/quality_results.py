"""Read runs of scripts.bench.quality, summarize them, and write the result file."""

import fcntl
import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from unet3d.atomic_write import atomic_write
from unet3d.metric.bootstrap import compute_bootstrap_means

Row = dict[str, Any]

SECONDS_LINE = "seconds of this call: "
"""Start of a line in a run's log, written each time that the run was started."""


def read_report(report: Row) -> Row:
    """Return what a run's report.json contributes to a row."""
    memory = report["memory"]["steady_step"]
    return {
        "dice": {
            name.removeprefix("val/dice").strip("/") or "mean": value
            for name, value in report["metrics"].items()
            if name.startswith("val/dice")
        },
        "evaluation": (report.get("evaluation") or {}).get("per_class"),
        "steps": report["steps"],
        "median_step_seconds": report["speed"]["median_step_seconds"],
        "peak_bytes": {k: v for k, v in memory.items() if k != "phases"},
        "precision": report["precision"],
        "device": report["device"],
        "versions": report["versions"],
    }


def read_run(folder: Path, report: Row) -> Row:
    """Return a run's row: Dice of the final evaluation if there is one, else of validation."""
    row = read_report(report)
    del row["evaluation"]
    evaluation = report.get("evaluation") or {}
    dice = row["dice"]
    if evaluation:
        dice = {"mean": evaluation["mean"]["dice"]["mean"]}
        dice |= {name: scores["dice"]["mean"] for name, scores in evaluation["per_class"].items()}
    log = folder.with_suffix(".log")
    lines = log.read_text().splitlines() if log.is_file() else []
    seconds = [float(s.removeprefix(SECONDS_LINE)) for s in lines if s.startswith(SECONDS_LINE)]
    return {
        **row,
        "dice": dice,
        "dice_from": "evaluation" if evaluation else "validation",
        "validation_dice": row["dice"],
        "cases": read_cases(folder) if evaluation else {},
        "seconds": sum(seconds) or None,
        "predicted_bytes": (report["memory"].get("estimated") or {}).get("allocated"),
        "parameters": report["parameters"],
        "deep_supervision": report["config"]["model"].get("deep_supervision", False),
    }


def read_cases(folder: Path) -> dict[str, dict[str, float | None]]:
    """Return the Dice of each class of each validation case."""
    cases = json.loads((folder / "evaluation" / "evaluation.json").read_text())["cases"]
    return {
        case: {name: scores["dice"] for name, scores in classes.items()}
        for case, classes in cases.items()
    }


def write_run(path: Path, job: str, variant: str, overrides: list[str], name: str, row: Row) -> Row:
    """Add a run to the result file, which other processes may write too; return the summary.

    Rows of the same job and variant with other overrides are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        results = json.loads(path.read_text()) if path.is_file() else {}
        entry = results.setdefault(job, {}).setdefault(variant, {})
        rows = entry.get("rows", {}) if entry.get("overrides") == overrides else {}
        rows[name] = row
        entry |= {
            "overrides": overrides,
            "summary": summarize(rows),
            "rows": dict(sorted(rows.items())),
        }
        with atomic_write(path) as draft:
            draft.write_text(json.dumps(results, indent=1) + "\n")
        return entry["summary"]
    finally:
        os.close(folder)


def summarize(rows: dict[str, Row]) -> Row:
    """Return mean Dice over runs with confidence intervals, the worst run and its worst class."""
    dice = {name: row["dice"]["mean"] for name, row in rows.items()}
    values = [zero_if_undefined(d) for d in dice.values()]
    worst = min(rows, key=lambda name: zero_if_undefined(dice[name]))
    classes = {
        k: zero_if_undefined(v)
        for k, v in rows[worst]["dice"].items()
        if k != "mean" and v is not None
    }
    worst_class = min(classes, key=lambda name: classes[name], default=None)
    deviation = statistics.stdev(values) if values[1:] else None
    half_width = None
    if deviation is not None:
        quantile = float(student.ppf(0.975, len(values) - 1))
        half_width = quantile * deviation / math.sqrt(len(values))
    mean = statistics.mean(values)
    peaks = [row["peak_bytes"] for row in rows.values()]
    seconds = [row["seconds"] for row in rows.values() if row["seconds"]]
    return {
        "runs": len(rows),
        "dice": mean,
        "deviation": deviation,
        "interval_over_runs": None
        if half_width is None
        else [mean - half_width, mean + half_width],
        "interval_over_cases": bootstrap_cases(rows),
        "per_class": {
            name: statistics.mean(zero_if_undefined(row["dice"].get(name)) for row in rows.values())
            for name in classes
        },
        "worst_run": worst,
        "worst_dice": zero_if_undefined(dice[worst]),
        "worst_class": worst_class,
        "worst_class_dice": None if worst_class is None else classes[worst_class],
        "steps": max(row["steps"] for row in rows.values()),
        "median_step_seconds": statistics.median(r["median_step_seconds"] for r in rows.values()),
        "seconds": statistics.median(seconds) if seconds else None,
        "peak_bytes": {k: max(p[k] for p in peaks) for k in peaks[0]},
        "predicted_bytes": max(row["predicted_bytes"] or 0 for row in rows.values()) or None,
    }


def zero_if_undefined(dice: float | None) -> float:
    """Return a Dice; 0 if it is undefined."""
    return 0.0 if dice is None else dice


def bootstrap_cases(rows: dict[str, Row]) -> list[float] | None:
    """Return the bootstrap interval of the mean over cases, after averaging each case over runs."""
    scores: dict[str, list[list[float]]] = {}
    for row in rows.values():
        for case, classes in row["cases"].items():
            values = [math.nan if d is None else d for d in classes.values()]
            scores.setdefault(case, []).append(values)
    if len(scores) < 2:
        return None
    interval = compute_bootstrap_means(
        np.array([np.mean(runs, axis=0) for runs in scores.values()])
    )[1]
    return [interval["low"], interval["high"]]


def average_runs(rows: list[Row]) -> Row:
    """Return the mean Dice, median step time and maximum peak of runs."""
    names = rows[0]["dice"]
    return {
        "dice": {name: statistics.mean(r["dice"][name] for r in rows) for name in names},
        "dice_deviation": statistics.stdev(r["dice"]["mean"] for r in rows) if rows[1:] else None,
        "median_step_seconds": statistics.median(r["median_step_seconds"] for r in rows),
        "peak_bytes": {k: max(r["peak_bytes"][k] for r in rows) for k in rows[0]["peak_bytes"]},
    }
