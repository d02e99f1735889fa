"""Compare time and memory of MONAI's inferer, metrics and resampling with those of unet3d.

    python -m scripts.bench.monai_parts    # writes benchmarks/cpu-monai-parts.json, in minutes

Each implementation runs in a process of its own with the same input. Peak memory is the resident
memory besides what was there before, in the second call; seconds are the median of several calls.
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scripts.bench.results import make_parser, run_child, write_results
from unet3d.peak_memory import PeakMeter
from unet3d.text import MIB

CLASSES = 20
SPACING_MM = (1.0, 1.0, 2.0)
Work = Callable[[], Any]


def make_image(*size: int) -> Tensor:
    """Return smooth noise (1, *size)."""
    torch.manual_seed(0)
    coarse = torch.randn(1, 1, *(n // 8 for n in size))
    return nn.functional.interpolate(coarse, size, mode="trilinear")[0]


def make_labels(*size: int, classes: int = CLASSES, shift: int = 0) -> Tensor:
    """Return balls, one of each class."""
    grid = torch.stack(torch.meshgrid(*map(torch.arange, size), indexing="ij"))
    labels = torch.zeros(size, dtype=torch.uint8)
    torch.manual_seed(0)
    for label in range(1, classes):
        center = torch.rand(3) * torch.tensor(size) + shift
        labels[((grid - center[:, None, None, None]) ** 2).sum(0) < (min(size) / 6) ** 2] = label
    return labels


def infer_ours() -> Work:
    """Segment a volume with windows of 64^3."""
    from unet3d.inference.sliding_window import SlidingWindow

    image, network = make_image(160, 160, 128)[None], nn.Conv3d(1, CLASSES, 3, padding=1)
    window = SlidingWindow([64, 64, 64])
    return lambda: window(image, network)[0]


def infer_monai(**options: Any) -> Work:
    """Segment the same volume; the classes are those of the largest logits."""
    from monai.inferers.inferer import SlidingWindowInferer

    image, network = make_image(160, 160, 128)[None], nn.Conv3d(1, CLASSES, 3, padding=1)
    window = SlidingWindowInferer((64, 64, 64), 1, 0.5, "gaussian", **options)

    def run() -> Tensor:
        logits: Any = window(image, network)
        return logits[0].argmax(0).to(torch.uint8)

    return run


def score_ours() -> Work:
    """Compute the Dice of each class."""
    from unet3d.metric.dice import Dice

    predicted, labels = make_labels(128, 128, 128, shift=3), make_labels(128, 128, 128)

    def run() -> list[float]:
        dice = Dice([str(c) for c in range(CLASSES)])
        dice.update(predicted[None], labels[None])
        scores = dice.compute()
        return [scores[f"dice/{c}"] for c in range(1, CLASSES)]

    return run


def score_monai() -> Work:
    """Compute the Dice of each class."""
    from monai.metrics.meandice import DiceMetric

    predicted, labels = make_labels(128, 128, 128, shift=3), make_labels(128, 128, 128)

    def run() -> list[float]:
        metric = DiceMetric(include_background=False, num_classes=CLASSES)
        scores: Any = metric(predicted[None, None], labels[None, None])
        return scores[0].tolist()

    return run


def measure_surfaces_ours() -> Work:
    """Compute HD95 and the surface Dice of each class."""
    from unet3d.metric.scores import score_case

    predicted, labels = (make_labels(96, 96, 96, classes=6, shift=s).numpy() for s in (3, 0))
    classes = {str(c): (c,) for c in range(1, 6)}

    def run() -> list[float]:
        scores = score_case(predicted, labels, spacing_mm=SPACING_MM, classes=classes)
        hd95 = [by_class["hd95_mm"] for by_class in scores.values()]
        return hd95 + [by_class["surface_dice"] for by_class in scores.values()]

    return run


def measure_surfaces_monai() -> Work:
    """Compute HD95 and the surface Dice of each class."""
    from monai.metrics.hausdorff_distance import compute_hausdorff_distance
    from monai.metrics.surface_dice import compute_surface_dice
    from monai.networks.utils import one_hot

    predicted, labels = (make_labels(96, 96, 96, classes=6, shift=s)[None, None] for s in (3, 0))

    def run() -> list[float]:
        pair: list[Any] = [one_hot(x, 6) for x in (predicted, labels)]
        spacing = list(SPACING_MM)
        hd95 = compute_hausdorff_distance(pair[0], pair[1], percentile=95, spacing=spacing)
        dice = compute_surface_dice(pair[0], pair[1], [1.0] * 5, spacing=spacing)
        return [*hd95[0].tolist(), *dice[0].tolist()]

    return run


def resample_ours() -> Work:
    """Resample a volume with cubic splines."""
    from unet3d.data.preprocessing.channels import resample

    volume = make_image(128, 128, 64)[0].numpy()
    return lambda: resample(volume, (160, 160, 96), (3, 3, 3))


def resample_monai() -> Work:
    """Resample the same volume with cubic splines."""
    from monai.data.meta_tensor import MetaTensor
    from monai.transforms.spatial.array import Spacing

    volume = MetaTensor(make_image(128, 128, 64), affine=torch.eye(4))
    resample = Spacing(
        (1 / 1.25, 1 / 1.25, 1 / 1.5), mode=3, padding_mode="nearest", scale_extent=True
    )

    def run() -> np.ndarray:
        resampled: Any = resample(volume)
        return np.asarray(resampled)[0]

    return run


PARTS: dict[str, dict[str, Callable[[], Work]]] = {
    "sliding window, 20 classes, 160 x 160 x 128": {
        "unet3d": infer_ours,
        "SlidingWindowInferer": infer_monai,
        "SlidingWindowInferer, buffer_steps=4": lambda: infer_monai(buffer_steps=4),
    },
    "Dice, 20 classes, 128^3": {"unet3d": score_ours, "DiceMetric": score_monai},
    "HD95 and surface Dice, 5 classes, 96^3": {
        "unet3d": measure_surfaces_ours,
        "compute_hausdorff_distance, compute_surface_dice": measure_surfaces_monai,
    },
    "cubic resampling to 160 x 160 x 96": {"unet3d": resample_ours, "Spacing": resample_monai},
}
"""Implementations by part; the first one is ours."""


def measure(part: str, name: str, repeats: int) -> dict[str, float]:
    """Return the costs of an implementation."""
    torch.set_num_threads(1)
    meter, cpu = PeakMeter(), torch.device("cpu")
    with torch.inference_mode():
        work = PARTS[part][name]()
        work()  # imports
        ctypes.CDLL(None).malloc_trim(0)  # or freed memory that is used again would not count
        meter.start(cpu)
        before = meter.read(cpu).resident or 0
        result = work()  # kept, as its memory counts
        peak = (meter.read(cpu).resident or 0) - before
        del result
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
    return {"seconds": median(seconds), "peak_mib": peak / MIB}


def main() -> None:
    parser = make_parser("scripts.bench.monai_parts", __doc__, output="cpu-monai-parts.json")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child, options.repeats)))
        return
    parts: dict[str, Any] = {}
    for part, implementations in PARTS.items():
        rows = {}
        for name in implementations:
            words = ("--repeats", options.repeats, "--child", part, name)
            rows[name] = run_child("scripts.bench.monai_parts", *words)
        parts[part] = {"rows": rows}
    write_results(options.output, {"parts": parts})


if __name__ == "__main__":
    main()
