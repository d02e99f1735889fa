"""Rows of bench_quality.py's results, what is made of them, and the file that they are kept in."""

import fcntl
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from unet3d.atomic_write import atomic_write  # noqa: E402
from unet3d.metric.bootstrap import bootstrap_means  # noqa: E402

Row = dict[str, Any]

TAKEN = "seconds of this call: "
"""In a run's log, once for each time that it was started."""


def row(report: Row) -> Row:
    """Return what is told of a run."""
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
    """Return a run's row: its held-out evaluation where it has one, else its last validation."""
    told = row(report)
    del told["evaluation"]
    evaluated = report.get("evaluation") or {}
    scores = told["dice"]
    if evaluated:
        scores = {"mean": evaluated["mean"]["dice"]["mean"]}
        scores |= {k: of["dice"]["mean"] for k, of in evaluated["per_class"].items()}
    log = folder.with_suffix(".log")
    lines = log.read_text().splitlines() if log.is_file() else []
    taken = [float(line.removeprefix(TAKEN)) for line in lines if line.startswith(TAKEN)]
    return {
        **told,
        "dice": scores,
        "dice_from": "evaluation" if evaluated else "validation",
        "validation_dice": told["dice"],
        "cases": read_cases(folder) if evaluated else {},
        "seconds": sum(taken) or None,
        "predicted_bytes": (report["memory"].get("predicted") or {}).get("allocated"),
        "parameters": report["parameters"],
        "deep_supervision": report["config"]["model"].get("deep_supervision", False),
    }


def read_cases(folder: Path) -> dict[str, dict[str, float | None]]:
    """Return each held-out case's Dice of each class."""
    cases = json.loads((folder / "evaluation" / "evaluation.json").read_text())["cases"]
    return {
        case: {name: scores["dice"] for name, scores in found.items()}
        for case, found in cases.items()
    }


def merge(path: Path, job: str, variant: str, words: list[str], key: str, found: Row) -> Row:
    """Write a run into the result file, whoever else writes into it; return the new summary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        results = json.loads(path.read_text()) if path.is_file() else {}
        place = results.setdefault(job, {}).setdefault(variant, {})
        rows = place.get("rows", {}) if place.get("overrides") == words else {}
        rows[key] = found
        place |= {
            "overrides": words,
            "summary": summarize(rows),
            "rows": dict(sorted(rows.items())),
        }
        with atomic_write(path) as draft:
            draft.write_text(json.dumps(results, indent=1) + "\n")
        return place["summary"]
    finally:
        os.close(folder)


def summarize(rows: dict[str, Row]) -> Row:
    """Return Dice over runs with its intervals, the worst run, and that run's worst class."""
    dice = {key: found["dice"]["mean"] for key, found in rows.items()}
    values = [0.0 if d is None else d for d in dice.values()]
    worst = min(rows, key=lambda key: zero_if_undefined(dice[key]))
    classes = {
        k: zero_if_undefined(v)
        for k, v in rows[worst]["dice"].items()
        if k != "mean" and v is not None
    }
    worst_class = min(classes, key=lambda name: classes[name], default=None)
    deviation = statistics.stdev(values) if values[1:] else None
    half = None
    if deviation is not None:
        half = float(student.ppf(0.975, len(values) - 1)) * deviation / math.sqrt(len(values))
    mean = statistics.mean(values)
    peaks = [found["peak_bytes"] for found in rows.values()]
    seconds = [found["seconds"] for found in rows.values() if found["seconds"]]
    return {
        "runs": len(rows),
        "dice": mean,
        "deviation": deviation,
        "interval_over_runs": None if half is None else [mean - half, mean + half],
        "interval_over_cases": over_cases(rows),
        "per_class": {
            name: statistics.mean(
                zero_if_undefined(found["dice"].get(name)) for found in rows.values()
            )
            for name in classes
        },
        "worst_run": worst,
        "worst_dice": zero_if_undefined(dice[worst]),
        "worst_class": worst_class,
        "worst_class_dice": None if worst_class is None else classes[worst_class],
        "steps": max(found["steps"] for found in rows.values()),
        "median_step_seconds": statistics.median(f["median_step_seconds"] for f in rows.values()),
        "seconds": statistics.median(seconds) if seconds else None,
        "peak_bytes": {k: max(p[k] for p in peaks) for k in peaks[0]},
        "predicted_bytes": max(f["predicted_bytes"] or 0 for f in rows.values()) or None,
    }


def zero_if_undefined(dice: float | None) -> float:
    """Return a score; one that is undefined counts as 0."""
    return 0.0 if dice is None else dice


def over_cases(rows: dict[str, Row]) -> list[float] | None:
    """Return the bootstrap's interval over cases, each with the mean of its runs."""
    scores: dict[str, list[list[float]]] = {}
    for found in rows.values():
        for case, classes in found["cases"].items():
            each = [math.nan if d is None else d for d in classes.values()]
            scores.setdefault(case, []).append(each)
    if len(scores) < 2:
        return None
    interval = bootstrap_means(np.array([np.mean(runs, axis=0) for runs in scores.values()]))[1]
    return [interval["low"], interval["high"]]


def mean(rows: list[Row]) -> Row:
    """Return means over the runs of one pooling, or of all folds."""
    names = rows[0]["dice"]
    return {
        "dice": {name: statistics.mean(r["dice"][name] for r in rows) for name in names},
        "dice_deviation": statistics.stdev(r["dice"]["mean"] for r in rows) if rows[1:] else None,
        "median_step_seconds": statistics.median(r["median_step_seconds"] for r in rows),
        "peak_bytes": {k: max(r["peak_bytes"][k] for r in rows) for k in rows[0]["peak_bytes"]},
    }
