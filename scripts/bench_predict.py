"""Segment a large scan into many classes, and measure the memory that it takes beside the network.

    python scripts/bench_predict.py
    python scripts/bench_predict.py --classes 20 --size 192 192 128 --threads 2

A tiny network, since its weights do not matter here. Each case runs in a process of its own: the
peak of its resident memory, less what was resident before the network was made, stands beside the
forecast. A smaller volume is segmented both ways, in bars and whole (MONAI's sliding window,
torch's interpolation, argmax), and the labels are compared.
"""

# ruff: noqa: E402

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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from unet3d.data.layouts.unlabelled import ScanFiles
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

SPACING = 1.5
"""Of the network in the resampled case, in mm; the scan's is 1."""


@dataclass(frozen=True)
class Case:
    """What is segmented."""

    size: Triple
    classes: int
    patch: int
    spacing_mm: float
    memory_gib: float | None = None


def predictor(case: Case) -> Predictor:
    """A tiny network for a case."""
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
        largest=(),
        preparation=Preprocessing(num_classes=case.classes, spacing_mm=(mm, mm, mm)),
        patch=(side, side, side),
        precision="32",
    )
    return Predictor(
        members,
        device=torch.device("cpu"),
        used=Precision("32", "32"),
        overlap=0.5,
        mirror=[],
        batch_size=1,
        kept=[],
        ram=None if case.memory_gib is None else int(case.memory_gib * GIB),
    )


def scan_of(case: Case, folder: Path) -> ScanTask:
    """A scan of smooth noise, as a file."""
    import nibabel

    rng = np.random.default_rng(0)
    coarse = rng.normal(0, 300, [-(-n // 8) for n in case.size])
    voxels = np.kron(coarse, np.ones((8, 8, 8)))[tuple(slice(n) for n in case.size)]
    voxels = (voxels + rng.normal(0, 50, case.size)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / "scan.nii")
    scan = ScanFiles(name="scan", files=(folder / "scan.nii",))
    return ScanTask(scan=scan, labels=folder / "labels.nii.gz", probabilities=None)


def measured(case: Case, threads: int) -> dict[str, Any]:
    """One case in this process."""
    import nibabel  # noqa: F401
    import scipy.ndimage  # noqa: F401

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        task = scan_of(case, Path(folder))
        meter, cpu = PeakMeter(), torch.device("cpu")
        meter.start(cpu)
        before = meter.read(cpu).resident
        made = predictor(case)
        began = time.perf_counter()
        ready = made.prepare(task)
        made.predict(ready, told=lambda windows: None, say=print)
        seconds = time.perf_counter() - began
        after = meter.read(cpu).resident
        assert before is not None
        assert after is not None
        return {
            "size": list(case.size),
            "classes": case.classes,
            "patch": case.patch,
            "prepared": list(ready.scan.grid.shape),
            "windows": ready.plan.windows,
            "strips": len(ready.plan.strips),
            "memory_gib": case.memory_gib,
            "forecast_bytes": ready.ram,
            "peak_bytes": after - before,
            "whole_logits_bytes": 4 * case.classes * int(np.prod(case.size)),
            "seconds": round(seconds, 1),
            "threads": threads,
        }


def compared(case: Case, threads: int) -> dict[str, Any]:
    """How many labels differ from those of the plain way."""
    import nibabel
    from monai.inferers.utils import sliding_window_inference

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        task = scan_of(case, Path(folder))
        made = predictor(case)
        ready = made.prepare(task)
        made.predict(ready, told=lambda windows: None, say=print)
        written: Any = nibabel.load(task.labels)
        labels = np.asarray(written.dataobj)
    image = torch.from_numpy(ready.scan.image)[None]
    with torch.inference_mode():
        logits: Any = sliding_window_inference(
            image, made.members.patch, 1, made.networks[0], overlap=0.5, mode="gaussian"
        )
        logits = nn.functional.interpolate(logits, list(case.size), mode="trilinear")
    plain = logits[0].argmax(0).numpy()
    return {
        "size": list(case.size),
        "classes": case.classes,
        "prepared": list(ready.scan.grid.shape),
        "strips": len(ready.plan.strips),
        "labels_that_occur": len(np.unique(plain)),
        "labels_that_differ": int((labels != plain).sum()),
        "voxels": plain.size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, nargs=3, default=[384, 384, 256])
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--patch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "cpu-predict.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        settings = json.loads(options.child)
        what = {"measured": measured, "compared": compared}[settings.pop("what")]
        settings["size"] = tuple(settings["size"])
        print(json.dumps(what(Case(**settings), options.threads)))
        return

    def child(what: str, **settings: Any) -> dict[str, Any]:
        words = [sys.executable, __file__, "--threads", str(options.threads)]
        words += ["--child", json.dumps({"what": what, **settings})]
        found = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(found.splitlines()[-1], flush=True)
        return json.loads(found.splitlines()[-1])

    small = {"size": [96, 88, 80], "classes": options.classes, "patch": 32}
    large = {"size": options.size, "classes": options.classes, "patch": options.patch}
    report = {
        "versions": collect_versions(),
        "equal": [
            child("compared", **small, spacing_mm=1),
            child("compared", **small, spacing_mm=SPACING),
            child("compared", **small, spacing_mm=1, memory_gib=0.18),
        ],
        "cases": [
            child("measured", **large, spacing_mm=SPACING),
            child("measured", **large, spacing_mm=1),
        ],
    }
    write_report(report, options.output)


if __name__ == "__main__":
    main()
