"""Segment a large scan with many classes, and measure the memory it takes besides the network.

    python -m scripts.bench.inference --threads 1    # writes benchmarks/cpu-predict.json

The network has few layers, of 32 features at full resolution. Each case runs in a process of its
own; its peak is that of the resident memory minus what was resident before the network was built,
and is compared with the estimate.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from scripts.bench.results import make_parser, run_in_new_process, write_results
from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.inference.ensemble import Ensemble
from unet3d.inference.predictor import Predictor
from unet3d.inference.tasks import ScanTask
from unet3d.machine import Precision
from unet3d.model.unet import UNet3D
from unet3d.peak_memory import PeakMeter
from unet3d.pool.max import MaxPool3d
from unet3d.types import Triple

CPU = torch.device("cpu")
SIZE, PATCH = (384, 384, 256), (128, 128, 128)
CASES = ((32, 1.0), (1000, 1.0), (32, 1.5), (1000, 1.5))
"""Classes, and the spacing of the network; the scan's is 1, so with another it is resampled."""


def build_predictor(
    network: nn.Module, classes: int, patch: Triple, preprocessing: Preprocessing, **options: Any
) -> Predictor:
    """Build a predictor as the command does."""
    ensemble = Ensemble(
        networks=(network.eval(),),
        channels=("scan",),
        classes=("background", *(f"class_{n}" for n in range(1, classes))),
        regions=None,
        keep_largest_component=(),
        preprocessing=preprocessing,
        patch_size=patch,
        precision="32",
    )
    precision = Precision("32", "32")
    return Predictor(
        ensemble, device=CPU, precision=precision, overlap=0.5, batch_size=1, **options
    )


def write_scan(size: Triple, folder: Path, body: np.ndarray | None = None) -> ScanTask:
    """Write a scan of smooth noise, with dark air around a body."""
    import nibabel

    rng = np.random.default_rng(0)
    coarse = np.kron(rng.normal(0, 200, [-(-n // 8) for n in size]), np.ones((8, 8, 8)))
    voxels = coarse[tuple(slice(n) for n in size)] + rng.normal(1500, 50, size)
    if body is not None:
        voxels = np.where(body, voxels, rng.uniform(0, 40, size))
    file = folder / "scan.nii"
    nibabel.save(nibabel.Nifti1Image(voxels.astype(np.int16), np.eye(4)), file)
    scan = ScanFiles(name="scan", files=(file,))
    return ScanTask(scan=scan, labels=folder / "labels.nii.gz", probabilities=None)


def measure(classes: int, mm: float, threads: int) -> dict[str, Any]:
    """Segment a scan for a network with this spacing; return the peak memory and the time."""
    import nibabel  # noqa: F401  (imported before memory is measured, as is scipy)
    import scipy.ndimage  # noqa: F401

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        task = write_scan(SIZE, Path(folder))
        meter = PeakMeter()
        meter.start(CPU)
        before = meter.read(CPU).resident or 0
        settings: dict[str, Any] = {"norm": "instance", "upsampling": "nearest", "pool": MaxPool3d}
        settings |= {"channels": [32, 16], "convs_per_level": 1}
        network = UNet3D(in_channels=1, num_classes=classes, **settings)
        preprocessing = Preprocessing(num_classes=classes, spacing_mm=(mm, mm, mm))
        predictor = build_predictor(network, classes, PATCH, preprocessing)
        start = time.perf_counter()
        scan = predictor.prepare(task)
        predictor.compute(scan)()
        seconds = time.perf_counter() - start
        peak = (meter.read(CPU).resident or 0) - before
    return {
        "size": SIZE,
        "classes": classes,
        "spacing_mm": mm,
        "patch": PATCH[0],
        "windows": scan.plan.windows,
        "forecast_bytes": scan.max_ram,
        "peak_bytes": peak,
        "whole_logits_bytes": 4 * classes * int(np.prod(SIZE)),
        "seconds": round(seconds, 1),
        "threads": threads,
    }


def main() -> None:
    parser = make_parser("scripts.bench.inference", __doc__, output="cpu-predict.json")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    cases = [run_in_new_process(measure, *case, options.threads) for case in CASES]
    write_results(options.output, {"cases": cases})


if __name__ == "__main__":
    main()
