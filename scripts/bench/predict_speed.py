"""Compare the time of `unet3d predict` with that of MONAI's sliding window, with the same networks.

    python -m scripts.bench.predict_speed    # writes benchmarks/cpu-predict-speed.json, in minutes
    python -m scripts.bench.predict_speed --scans small --networks unet_tiny --rounds 3

All ways segment the same preprocessed volume with the same windows and weights, in turn, in one
process: processor seconds of one thread, which other load hardly changes. `files` is from files to
files: several scans are read, preprocessed, segmented and written; as threads overlap there, it has
the seconds that passed. `ratio` is the median over the rounds, each relative to MONAI with plain
modules in the same round, and `ratio_to_fused` to MONAI with fused blocks. Peak memory is that of a
process of its own, for several scans. Rows of an earlier call are kept.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import nibabel
import numpy as np
import torch
from torch import nn

from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.nifti.writer import write_labels
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.machine.device import Precision
from unet3d.memory.peak import PeakMeter
from unet3d.model.unet import UNet3D
from unet3d.pool.max import MaxPool3d
from unet3d.report.run_report import collect_versions, write_report
from unet3d.types import Triple
from unet3d.workflows.inference.ensemble import Ensemble
from unet3d.workflows.inference.predictor import Predictor, ScanTask
from unet3d.workflows.inference.prefetch import CaseQueue
from unet3d.workflows.shared.plain_operators import to_plain_operators

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
PATCH = (64, 64, 64)
OVERLAP = 0.5
SKIP_LEVEL = 0.1
BASELINE, FUSED = "MONAI, plain modules", "MONAI, fused blocks"


@dataclass(frozen=True)
class Scan:
    """A synthetic scan: noise in a body, an elliptical cylinder in dark air."""

    size: Triple
    classes: int
    body: float  # width of the body as a fraction of the scan's, its height is 0.7 of it


SCANS = {
    "small": Scan((36, 50, 35), 3, 2.0),  # a hippocampus: one window, no air
    "medium": Scan((128, 128, 128), 4, 2.0),  # no air
    "wide": Scan((256, 256, 64), 4, 0.7),  # a body in air
}


def build_network(name: str, classes: int) -> nn.Module:
    """Build a network with random weights."""
    torch.manual_seed(0)
    if name == "dynunet":
        from monai.networks.nets.dynunet import DynUNet

        network: nn.Module = DynUNet(
            *(3, 1, classes, [3, 3, 3], [1, 2, 2], [2, 2]), filters=[16, 32, 64]
        )
    else:
        options: Any = {"depth": 3, "width": 8, "norm": "instance", "activation": "leaky_relu"}
        network = UNet3D(in_channels=1, num_classes=classes, pool=MaxPool3d, **options)
    return network.eval().requires_grad_(False)


def build_predictor(network: nn.Module, scan: Scan, **options: Any) -> Predictor:
    """Build a predictor as the command does."""
    ensemble = Ensemble(
        networks=(network,),
        channels=("scan",),
        classes=("background", *(f"class_{n}" for n in range(1, scan.classes))),
        regions=None,
        keep_largest_component=(),
        preprocessing=Preprocessing(num_classes=scan.classes, crop="none"),
        patch_size=PATCH,
        precision="32",
    )
    precision = Precision("32", "32")
    return Predictor(
        ensemble, device=CPU, precision=precision, overlap=OVERLAP, batch_size=1, **options
    )


def write_scans(scan: Scan, folder: Path, count: int) -> list[ScanTask]:
    """Write several scans."""
    grid = np.meshgrid(*(np.linspace(-1, 1, n) for n in scan.size), indexing="ij", sparse=True)
    body = (grid[0] / scan.body) ** 2 + (grid[1] / (0.7 * scan.body)) ** 2 < 1
    tasks = []
    for n in range(count):
        rng = np.random.default_rng(n)
        coarse = np.kron(rng.normal(0, 200, [-(-n // 8) for n in scan.size]), np.ones((8, 8, 8)))
        tissue = coarse[tuple(slice(n) for n in scan.size)] + rng.normal(1500, 50, scan.size)
        voxels = np.where(body, tissue, rng.uniform(0, 40, scan.size)).astype(np.int16)
        file = folder / f"scan_{n}.nii.gz"
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), file)
        files = ScanFiles(name=f"scan_{n}", files=(file,))
        labels = folder / f"labels_{n}.nii.gz"
        tasks.append(ScanTask(scan=files, labels=labels, probabilities=None))
    return tasks


def ignore(_: object) -> None:
    """Show no progress."""


def segment_with_monai(image: np.ndarray, network: nn.Module) -> np.ndarray:
    """Return the labels of a preprocessed image (C, D, H, W)."""
    from monai.inferers.utils import sliding_window_inference

    with torch.inference_mode():
        logits: Any = sliding_window_inference(
            torch.from_numpy(image)[None], PATCH, 1, network, overlap=OVERLAP, mode="gaussian"
        )
        return logits[0].argmax(0).to(torch.uint8).numpy()


def build_ways(name: str, scan: Scan) -> dict[str, tuple[Predictor, nn.Module | None]]:
    """Return a predictor for each way, and the network if MONAI runs it."""
    network = build_network(name, scan.classes)
    default = build_predictor(network, scan)
    ways: dict[str, Any] = {BASELINE: (default, to_plain_operators(network))}
    if isinstance(network, UNet3D):
        ways[FUSED] = default, network
    ways["unet3d"] = default, None
    if scan.body < 1:
        ways["skip_background"] = build_predictor(network, scan, skip_background=SKIP_LEVEL), None
    for backend in ("onnx", "openvino"):
        ways[f"backend={backend}"] = build_predictor(network, scan, backend=backend), None
    fastest = "openvino" if name == "dynunet" else "torch"
    ways["all"] = build_predictor(network, scan, backend=fastest, skip_background=SKIP_LEVEL), None
    return ways


def time_in_turn(
    works: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Call the works in turn; return their seconds and ratios to MONAI's, and their results."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    results: dict[str, Any] = {}
    for _ in range(rounds):
        for name, work in works.items():
            start = clock()
            results[name] = work()
            seconds[name].append(round(clock() - start, 4))
    baselines = {"ratio": BASELINE, "ratio_to_fused": FUSED if FUSED in works else BASELINE}
    rows = {
        name: {"seconds": own}
        | {
            key: round(median(a / b for a, b in zip(own, seconds[other], strict=True)), 3)
            for key, other in baselines.items()
        }
        for name, own in seconds.items()
    }
    return rows, results


def compare(name: str, scan: Scan, rounds: int, count: int) -> dict[str, Any]:
    """Time all ways on one scan, and from files to files on several."""
    ways = build_ways(name, scan)
    with tempfile.TemporaryDirectory() as folder:
        tasks = write_scans(scan, Path(folder), count)
        prepared = next(iter(ways.values()))[0].prepare(tasks[0])

        def segment(way: str) -> np.ndarray:
            predictor, network = ways[way]
            if network is None:
                return predictor.segment(prepared, on_windows=ignore, log=ignore)
            return segment_with_monai(prepared.scan.image, network)

        def process_files(way: str) -> None:
            predictor, network = ways[way]
            if network is None:
                with CaseQueue(predictor, tasks, prefetch=True) as queue:
                    for task in tasks:
                        queue.predict(queue.prepare(task), on_windows=ignore, log=ignore)
                return
            for task in tasks:
                scan = predictor.read(task, 2**62)
                labels = segment_with_monai(scan.image, network)
                write_labels(task.labels, labels, task.scan.files[0])

        works = {way: lambda w=way: segment(w) for way in ways}
        result, labels = time_in_turn(works, rounds, time.process_time)
        for way in ways:
            result[way]["labels_that_differ"] = int((labels[way] != labels[BASELINE]).sum())
        chosen = [way for way in ways if way.startswith("MONAI")] + ["unet3d", "all"]
        works = {way: lambda w=way: process_files(w) for way in chosen}
        files, _ = time_in_turn(works, max(1, rounds // 2), time.perf_counter)
    return {
        "windows": prepared.plan.windows,
        "voxels": int(np.prod(scan.size)),
        "labels_that_occur": len(np.unique(labels[BASELINE])),
        "one_scan": result,
        "files": {"scans": count, **files},
    }


def measure_peak(name: str, scan: Scan, backend: str, count: int) -> dict[str, int]:
    """Return the peak of segmenting several scans with prefetch, and its forecast."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = write_scans(scan, Path(folder), count)
        predictor = build_predictor(build_network(name, scan.classes), scan, backend=backend)
        meter = PeakMeter()
        meter.start(CPU)
        before = meter.read(CPU).resident or 0
        forecast = 0
        with CaseQueue(predictor, tasks, prefetch=True) as queue:
            for number, task in enumerate(tasks, start=1):
                ahead = 0 if number == count else predictor.estimate_reading(tasks[number])
                prepared = queue.prepare(task)
                forecast = max(forecast, prepared.max_ram + ahead)
                queue.predict(prepared, on_windows=ignore, log=ignore)
        peak = (meter.read(CPU).resident or 0) - before
    return {"forecast_bytes": forecast, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.predict_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scans", nargs="+", choices=SCANS, default=list(SCANS))
    networks = ["unet_tiny", "dynunet"]
    parser.add_argument("--networks", nargs="+", choices=networks, default=networks)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=3, help="scans from files to files")
    output = ROOT / "benchmarks" / "cpu-predict-speed.json"
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        name, scan, backend = options.child
        print(json.dumps(measure_peak(name, SCANS[scan], backend, options.files)))
        return
    report = json.loads(options.output.read_text("utf-8")) if options.output.exists() else {}
    report |= {"versions": collect_versions(), "threads": 1}
    report |= {"patch": list(PATCH), "overlap": OVERLAP, "skip_background": SKIP_LEVEL}
    for name in options.networks:
        for scan in options.scans:
            result = compare(name, SCANS[scan], options.rounds, options.files)
            result["size"], result["peak"] = list(SCANS[scan].size), {}
            for backend in ("torch", "onnx", "openvino"):
                words = [sys.executable, "-m", "scripts.bench.predict_speed"]
                words += ["--files", str(options.files)]
                words += ["--child", name, scan, backend]
                ended = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE)
                result["peak"][backend] = json.loads(ended.stdout.splitlines()[-1])
            report[f"{name}, {scan}"] = result
            print(name, scan, json.dumps(result, indent=1), flush=True)
            write_report(report, options.output)


if __name__ == "__main__":
    main()
