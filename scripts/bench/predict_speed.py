"""Compare the time of `unet3d predict` with that of MONAI's sliding window, with the same networks.

    python -m scripts.bench.predict_speed    # writes benchmarks/cpu-predict-speed.json, in minutes
    python -m scripts.bench.predict_speed --scans small --networks unet_tiny --rounds 3

All ways segment the same preprocessed volume with the same windows and weights, in turn, in one
process: processor seconds of one thread, which other load hardly changes. `ratio` is the median
over the rounds, each relative to MONAI with plain modules in the same round. Rows of an earlier
call are kept.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from scripts.bench.inference import build_predictor, write_scan
from scripts.bench.results import make_parser, write_results
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.export.formats import to_plain_operators
from unet3d.inference.predictor import Predictor
from unet3d.model.unet import UNet3D
from unet3d.pool.max import MaxPool3d
from unet3d.types import Triple

PATCH = (64, 64, 64)
SKIP_LEVEL = 0.1
BASELINE, FUSED = "MONAI, plain modules", "MONAI, fused blocks"


@dataclass(frozen=True)
class Scan:
    """A synthetic scan: noise in a body, an elliptical cylinder in dark air."""

    size: Triple
    classes: int
    body: float  # width of the body as a fraction of the scan's, its height is 0.7 of it

    def draw_body(self) -> np.ndarray:
        """Return the mask of the body."""
        x, y, _ = np.meshgrid(
            *(np.linspace(-1, 1, n) for n in self.size), indexing="ij", sparse=True
        )
        inside = (x / self.body) ** 2 + (y / (0.7 * self.body)) ** 2 < 1
        return np.broadcast_to(inside, self.size)


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


def segment_with_monai(image: np.ndarray, network: nn.Module) -> np.ndarray:
    """Return the labels of a preprocessed image (C, D, H, W)."""
    from monai.inferers.utils import sliding_window_inference

    with torch.inference_mode():
        logits: Any = sliding_window_inference(
            torch.from_numpy(image)[None], PATCH, 1, network, overlap=0.5, mode="gaussian"
        )
        return logits[0].argmax(0).to(torch.uint8).numpy()


def build_ways(name: str, scan: Scan) -> dict[str, Predictor | nn.Module]:
    """Return the predictors to compare, and the networks that MONAI runs."""
    network = build_network(name, scan.classes)

    def build(**options: Any) -> Predictor:
        preprocessing = Preprocessing(num_classes=scan.classes, crop="none")
        return build_predictor(network, scan.classes, PATCH, preprocessing, **options)

    ways: dict[str, Any] = {BASELINE: to_plain_operators(network)}
    if isinstance(network, UNet3D):
        ways[FUSED] = network
    ways["unet3d"] = build()
    if scan.body < 1:
        ways["skip_background"] = build(skip_background=SKIP_LEVEL)
    for backend in ("onnx", "openvino"):
        ways[f"backend={backend}"] = build(backend=backend)
    fastest = "openvino" if name == "dynunet" else "torch"
    return ways | {"all": build(backend=fastest, skip_background=SKIP_LEVEL)}


def time_in_turn(
    works: Mapping[str, Callable[[], np.ndarray]], rounds: int
) -> tuple[dict[str, dict[str, Any]], dict[str, np.ndarray]]:
    """Call the works in turn; return their seconds and ratios to MONAI's, and their results."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    results: dict[str, np.ndarray] = {}
    for _ in range(rounds):
        for name, work in works.items():
            start = time.process_time()
            results[name] = work()
            seconds[name].append(round(time.process_time() - start, 4))
    rows: dict[str, dict[str, Any]] = {}
    for name, own in seconds.items():
        ratio = median(a / b for a, b in zip(own, seconds[BASELINE], strict=True))
        rows[name] = {"seconds": own, "ratio": round(ratio, 3)}
    return rows, results


def compare(name: str, scan: Scan, rounds: int) -> dict[str, Any]:
    """Time all ways on one scan."""
    ways = build_ways(name, scan)
    with tempfile.TemporaryDirectory() as folder:
        task = write_scan(scan.size, Path(folder), scan.draw_body())
        default: Any = ways["unet3d"]
        prepared = default.prepare(task)

        def segment(way: Predictor | nn.Module) -> np.ndarray:
            if isinstance(way, nn.Module):
                return segment_with_monai(prepared.scan.image, way)
            return way.segment(prepared)

        works = {name: lambda w=way: segment(w) for name, way in ways.items()}
        result, labels = time_in_turn(works, rounds)
    for way in ways:
        result[way]["labels_that_differ"] = int((labels[way] != labels[BASELINE]).sum())
    return {
        "windows": prepared.plan.windows,
        "voxels": int(np.prod(scan.size)),
        "labels_that_occur": len(np.unique(labels[BASELINE])),
        "one_scan": result,
        "size": list(scan.size),
    }


def main() -> None:
    parser = make_parser("scripts.bench.predict_speed", __doc__, output="cpu-predict-speed.json")
    parser.add_argument("--scans", nargs="+", choices=SCANS, default=list(SCANS))
    networks = ["unet_tiny", "dynunet"]
    parser.add_argument("--networks", nargs="+", choices=networks, default=networks)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"threads": 1, "patch": PATCH, "overlap": 0.5, "skip_background": SKIP_LEVEL}
    for name in options.networks:
        for scan in options.scans:
            row = compare(name, SCANS[scan], options.rounds)
            print(name, scan, row, flush=True)
            write_results(options.output, settings | {f"{name}, {scan}": row}, update=True)


if __name__ == "__main__":
    main()
