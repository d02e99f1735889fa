"""Read runs of scripts.bench.quality, and summarize them."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.metric.bootstrap import compute_bootstrap_means

Row = dict[str, Any]


def read_report(report: Row) -> Row:
    """Return what a run's report.json contributes to a row; Dice is that of its validations."""
    memory = report["memory"]["steady_step"]
    return {
        "dice": {
            name.removeprefix("val/dice").strip("/") or "mean": value
            for name, value in report["metrics"].items()
            if name.startswith("val/dice")
        },
        "steps": report["steps"],
        "median_step_seconds": report["speed"]["median_step_seconds"],
        "peak_bytes": {k: v for k, v in memory.items() if k != "phases"},
    }


def read_run(folder: Path, report: Row) -> Row:
    """Return a run's row: Dice of the final evaluation if there is one, else of validation."""
    row = {
        **read_report(report),
        "cases": {},
        "predicted_bytes": (report["memory"].get("estimated") or {}).get("allocated"),
        "parameters": report["parameters"],
        "deep_supervision": report["config"]["model"].get("deep_supervision", False),
    }
    if evaluation := report.get("evaluation"):
        classes = evaluation["per_class"].items()
        row["dice"] = {"mean": evaluation["mean"]["dice"]["mean"]}
        row["dice"] |= {name: scores["dice"]["mean"] for name, scores in classes}
        content = json.loads((folder / "evaluation" / "evaluation.json").read_text())
        row["cases"] = {
            case: {name: scores["dice"] for name, scores in by_class.items()}
            for case, by_class in content["cases"].items()
        }
    return row


def summarize(rows: dict[str, Row]) -> Row:
    """Return mean Dice over runs, its spread, and the worst run with its worst class."""
    dice = {
        name: {key: value or 0.0 for key, value in row["dice"].items()}  # 0 if undefined
        for name, row in rows.items()
    }
    means = [scores["mean"] for scores in dice.values()]
    worst = min(dice.values(), key=lambda scores: scores["mean"])
    values = {key: value for key, value in worst.items() if key != "mean"}
    worst_class = min(values, key=lambda name: values[name], default=None)
    return {
        "runs": len(rows),
        "dice": statistics.mean(means),
        "deviation": statistics.stdev(means) if means[1:] else None,
        "interval_over_cases": bootstrap_cases(rows),
        "worst_dice": worst["mean"],
        "worst_class": worst_class,
        "worst_class_dice": None if worst_class is None else values[worst_class],
        "steps": max(row["steps"] for row in rows.values()),
        "median_step_seconds": statistics.median(r["median_step_seconds"] for r in rows.values()),
        "predicted_bytes": max(row["predicted_bytes"] or 0 for row in rows.values()) or None,
    }


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
