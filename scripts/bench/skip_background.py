"""Measure what skip_background= costs in Dice and saves in windows, on scans with references.

    python -m scripts.bench.skip_background hippocampus outputs/hippocampus data/Task04_Hippocampus

Arguments are a name for the row, a run, and its dataset with imagesTr and labelsTr, of which most
scans were trained on: only the change of Dice is of interest. Results are added to
benchmarks/cpu-skip-background.json.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import nibabel
import numpy as np

from unet3d.data.layouts.scans import find_scans
from unet3d.report.run_report import collect_versions, write_report
from unet3d.workflows.inference.build import build_predictor
from unet3d.workflows.inference.ensemble import load_ensemble
from unet3d.workflows.inference.predictor import Predictor, PreparedScan, ScanTask

ROOT = Path(__file__).resolve().parents[2]
LEVELS = (None, 0.0, 0.1, 0.2)


def build(run: Path, level: float | None) -> Predictor:
    """Build the predictor of a run that skips windows up to a level."""
    return build_predictor(
        load_ensemble([run]),
        device="cpu",
        precision=None,
        overlap=0.5,
        batch_size=1,
        flip_axes=(),
        keep_largest_component=None,
        memory_bytes=None,
        skip_background=level,
    )[0]


def segment(predictor: Predictor, prepared: PreparedScan) -> tuple[np.ndarray, int]:
    """Return the labels, and how many windows were skipped."""
    messages: list[str] = []
    labels = predictor.segment(prepared, on_windows=lambda count: None, log=messages.append)
    skipped = [int(line.split("skipped ")[1].split()[0]) for line in messages]
    return labels, sum(skipped)


def compute_dice(labels: np.ndarray, reference: np.ndarray, classes: int) -> float:
    """Return the mean Dice of the classes that occur in either."""
    scores = []
    for label in range(1, classes):
        a, b = labels == label, reference == label
        if a.any() or b.any():
            scores.append(2 * (a & b).sum() / (a.sum() + b.sum()))
    return float(mean(scores)) if scores else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.skip_background",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name")
    parser.add_argument("run", type=Path)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--scans", type=int, default=20, help="at most")
    output = ROOT / "benchmarks" / "cpu-skip-background.json"
    parser.add_argument("--output", type=Path, default=output)
    options = parser.parse_args()
    predictors = [build(options.run, level) for level in LEVELS]
    first = predictors[0]
    rows: list[dict[str, Any]] = [{"level": level, "skipped": 0, "dice": []} for level in LEVELS]
    windows = 0
    scans = find_scans(options.dataset / "imagesTr", first.ensemble.channels)[: options.scans]
    for scan in scans:
        task = ScanTask(scan=scan, labels=Path("unused.nii"), probabilities=None)
        prepared = first.prepare(task)
        windows += prepared.plan.windows
        image: Any = nibabel.load(options.dataset / "labelsTr" / f"{scan.name}.nii.gz")
        reference = np.asarray(image.dataobj)
        for row, predictor in zip(rows, predictors, strict=True):
            labels, skipped = segment(predictor, prepared)
            row["skipped"] += skipped
            row["dice"].append(compute_dice(labels, reference, len(first.ensemble.classes)))
    for row in rows:
        row["dice"] = round(mean(row["dice"]), 5)
    report = json.loads(options.output.read_text("utf-8")) if options.output.exists() else {}
    report["versions"] = collect_versions()
    report[options.name] = {
        "scans": len(scans),
        "windows": windows,
        "patch": list(first.ensemble.patch_size),
        "rows": rows,
    }
    print(json.dumps(report[options.name], indent=1))
    write_report(report, options.output)


if __name__ == "__main__":
    main()
