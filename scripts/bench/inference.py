"""Segment a large scan with many classes, and measure the memory it takes besides the network.

    python -m scripts.bench.inference
    python -m scripts.bench.inference --classes 20 --size 192 192 128 --threads 2

The network is tiny, because its weights do not matter here. Each case runs in a process of its own;
its peak is that of the resident memory minus what was resident before the network was built, and is
compared with the estimate. A smaller volume is also segmented in the plain way (MONAI's sliding
window, torch's interpolation, argmax), and the labels are compared.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.machine.device import Precision
from unet3d.memory.peak import PeakMeter
from unet3d.model.unet import UNet3D
from unet3d.pool.max import MaxPool3d
from unet3d.report.run_report import collect_versions, write_report
from unet3d.types import Triple
from unet3d.units import GIB
from unet3d.workflows.inference.ensemble import Ensemble
from unet3d.workflows.inference.predictor import Predictor, ScanTask

ROOT = Path(__file__).resolve().parents[2]

SPACING_MM = 1.5
"""The network's spacing in cases with resampling; the scan's is 1."""


@dataclass(frozen=True)
class Case:
    """A scan to segment."""

    size: Triple
    classes: int
    patch: int
    spacing_mm: float
    memory_gib: float | None = None


def build_predictor(case: Case) -> Predictor:
    """Build a predictor with a tiny network."""
    torch.manual_seed(0)
    network = UNet3D(
        in_channels=1,
        num_classes=case.classes,
        depth=3,
        width=4,
        norm="instance",
        upsampling="nearest",
        pool=MaxPool3d,
    )
    mm, side = case.spacing_mm, case.patch
    names = ("background", *(f"class_{n}" for n in range(1, case.classes)))
    members = Ensemble(
        networks=(network.eval(),),
        channels=("scan",),
        classes=names,
        regions=None,
        keep_largest_component=(),
        preprocessing=Preprocessing(num_classes=case.classes, spacing_mm=(mm, mm, mm)),
        patch_size=(side, side, side),
        precision="32",
    )
    return Predictor(
        members,
        device=torch.device("cpu"),
        precision=Precision("32", "32"),
        overlap=0.5,
        batch_size=1,
        ram=None if case.memory_gib is None else int(case.memory_gib * GIB),
    )


def write_scan(case: Case, folder: Path) -> ScanTask:
    """Write a scan of smooth noise."""
    import nibabel

    rng = np.random.default_rng(0)
    coarse = rng.normal(0, 300, [-(-n // 8) for n in case.size])
    voxels = np.kron(coarse, np.ones((8, 8, 8)))[tuple(slice(n) for n in case.size)]
    voxels = (voxels + rng.normal(0, 50, case.size)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / "scan.nii")
    scan = ScanFiles(name="scan", files=(folder / "scan.nii",))
    return ScanTask(scan=scan, labels=folder / "labels.nii.gz", probabilities=None)


def measure(case: Case, threads: int) -> dict[str, Any]:
    """Segment a case in this process; return its peak memory and its time."""
    import nibabel  # noqa: F401  (imported before memory is measured, as is scipy)
    import scipy.ndimage  # noqa: F401

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        task = write_scan(case, Path(folder))
        meter, cpu = PeakMeter(), torch.device("cpu")
        meter.start(cpu)
        before = meter.read(cpu).resident
        predictor = build_predictor(case)
        start = time.perf_counter()
        scan = predictor.prepare(task)
        predictor.predict(scan, on_windows=lambda count: None, log=print)
        seconds = time.perf_counter() - start
        after = meter.read(cpu).resident
        assert before is not None
        assert after is not None
        return {
            "size": list(case.size),
            "classes": case.classes,
            "patch": case.patch,
            "prepared": list(scan.scan.grid.shape),
            "windows": scan.plan.windows,
            "strips": len(scan.plan.slabs),
            "memory_gib": case.memory_gib,
            "forecast_bytes": scan.max_ram,
            "peak_bytes": after - before,
            "whole_logits_bytes": 4 * case.classes * int(np.prod(case.size)),
            "seconds": round(seconds, 1),
            "threads": threads,
        }


def compare(case: Case, threads: int) -> dict[str, Any]:
    """Count the labels that differ from those of the plain way."""
    import nibabel
    from monai.inferers.utils import sliding_window_inference

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        task = write_scan(case, Path(folder))
        predictor = build_predictor(case)
        scan = predictor.prepare(task)
        predictor.predict(scan, on_windows=lambda count: None, log=print)
        file: Any = nibabel.load(task.labels)
        labels = np.asarray(file.dataobj)
    image = torch.from_numpy(scan.scan.image)[None]
    with torch.inference_mode():
        logits: Any = sliding_window_inference(
            image,
            predictor.ensemble.patch_size,
            1,
            predictor.networks[0],
            overlap=0.5,
            mode="gaussian",
        )
        logits = nn.functional.interpolate(logits, list(case.size), mode="trilinear")
    expected = logits[0].argmax(0).numpy()
    return {
        "size": list(case.size),
        "classes": case.classes,
        "prepared": list(scan.scan.grid.shape),
        "strips": len(scan.plan.slabs),
        "labels_that_occur": len(np.unique(expected)),
        "labels_that_differ": int((labels != expected).sum()),
        "voxels": expected.size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.inference",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", type=int, nargs=3, default=[384, 384, 256], help="of the scan")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--patch", type=int, default=128, help="side of a sliding window")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "cpu-predict.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        settings = json.loads(options.child)
        function = {"measure": measure, "compare": compare}[settings.pop("function")]
        settings["size"] = tuple(settings["size"])
        print(json.dumps(function(Case(**settings), options.threads)))
        return

    def run_child(function: str, **settings: Any) -> dict[str, Any]:
        command = [sys.executable, "-m", "scripts.bench.inference"]
        command += ["--threads", str(options.threads)]
        command += ["--child", json.dumps({"function": function, **settings})]
        output = subprocess.run(
            command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        print(output.splitlines()[-1], flush=True)
        return json.loads(output.splitlines()[-1])

    small = {"size": [96, 88, 80], "classes": options.classes, "patch": 32}
    large = {"size": options.size, "classes": options.classes, "patch": options.patch}
    report = {
        "versions": collect_versions(),
        "equal": [
            run_child("compare", **small, spacing_mm=1),
            run_child("compare", **small, spacing_mm=SPACING_MM),
            run_child("compare", **small, spacing_mm=1, memory_gib=0.31),  # several strips
        ],
        "cases": [
            run_child("measure", **large, spacing_mm=SPACING_MM),
            run_child("measure", **large, spacing_mm=1),
        ],
    }
    write_report(report, options.output)


if __name__ == "__main__":
    main()
