"""Compare time and memory of MONAI's inferer, metrics and resampling with those of unet3d.

    python -m scripts.bench.monai_parts    # writes benchmarks/cpu-monai-parts.json, in minutes

Each implementation runs in a process of its own with the same input. Peak memory is the resident
memory besides what was there before, in the second call; seconds are the median of several calls.
"""

import ctypes
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scripts.bench.results import make_parser, run_in_new_process, write_results
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


def build_windows() -> dict[str, Work]:
    """Segment a volume with windows of 64^3."""
    from monai.inferers.inferer import SlidingWindowInferer

    from unet3d.inference.sliding_window import SlidingWindow

    image, network = make_image(160, 160, 128)[None], nn.Conv3d(1, CLASSES, 3, padding=1)
    ours, options = SlidingWindow([64, 64, 64]), ((64, 64, 64), 1, 0.5, "gaussian")

    def segment(window: Any) -> Tensor:
        return window(image, network)[0].argmax(0).to(torch.uint8)

    buffered = SlidingWindowInferer(*options, buffer_steps=4)
    return {
        "unet3d": lambda: ours(image, network)[0],
        "SlidingWindowInferer": partial(segment, SlidingWindowInferer(*options)),
        "SlidingWindowInferer, buffer_steps=4": partial(segment, buffered),
    }


def build_dice() -> dict[str, Work]:
    """Compute the Dice of each class."""
    from monai.metrics.meandice import DiceMetric

    from unet3d.metric.dice import Dice

    predicted, labels = (make_labels(128, 128, 128, shift=s)[None] for s in (3, 0))

    def score() -> dict[str, float]:
        dice = Dice([str(c) for c in range(CLASSES)])
        dice.update(predicted, labels)
        return dice.compute()

    def score_with_monai() -> Any:
        metric = DiceMetric(include_background=False, num_classes=CLASSES)
        return metric(predicted[None], labels[None])

    return {"unet3d": score, "DiceMetric": score_with_monai}


def build_surfaces() -> dict[str, Work]:
    """Compute HD95 and the surface Dice of each class."""
    from monai.metrics.hausdorff_distance import compute_hausdorff_distance
    from monai.metrics.surface_dice import compute_surface_dice
    from monai.networks.utils import one_hot

    from unet3d.metric.scores import score_case

    pair = [make_labels(96, 96, 96, classes=6, shift=s) for s in (3, 0)]
    classes, spacing = {str(c): (c,) for c in range(1, 6)}, list(SPACING_MM)

    def score() -> Any:
        return score_case(*(x.numpy() for x in pair), spacing_mm=SPACING_MM, classes=classes)

    def score_with_monai() -> Any:
        masks: list[Any] = [one_hot(x[None, None], 6) for x in pair]
        hd95 = compute_hausdorff_distance(*masks, percentile=95, spacing=spacing)
        return hd95, compute_surface_dice(masks[0], masks[1], [1.0] * 5, spacing=spacing)

    name = "compute_hausdorff_distance, compute_surface_dice"
    return {"unet3d": score, name: score_with_monai}


def build_resampling() -> dict[str, Work]:
    """Resample a volume with cubic splines."""
    from monai.data.meta_tensor import MetaTensor
    from monai.transforms.spatial.array import Spacing

    from unet3d.data.preprocessing.channels import resample

    image = make_image(128, 128, 64)
    array, tensor = image[0].numpy(), MetaTensor(image, affine=torch.eye(4))
    spacing: Any = Spacing(
        (1 / 1.25, 1 / 1.25, 1 / 1.5), mode=3, padding_mode="nearest", scale_extent=True
    )
    return {
        "unet3d": lambda: resample(array, (160, 160, 96), (3, 3, 3)),
        "Spacing": lambda: np.asarray(spacing(tensor))[0],
    }


PARTS: dict[str, Callable[[], dict[str, Work]]] = {
    "sliding window, 20 classes, 160 x 160 x 128": build_windows,
    "Dice, 20 classes, 128^3": build_dice,
    "HD95 and surface Dice, 5 classes, 96^3": build_surfaces,
    "cubic resampling to 160 x 160 x 96": build_resampling,
}
"""What builds the implementations of each part; the first one is ours."""


def measure(part: str, name: str, repeats: int) -> dict[str, float]:
    """Return the costs of an implementation."""
    torch.set_num_threads(1)
    meter, cpu = PeakMeter(), torch.device("cpu")
    with torch.inference_mode():
        work = PARTS[part]()[name]
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
    options = parser.parse_args()
    parts: dict[str, Any] = {}
    for part, build in PARTS.items():
        rows = {n: run_in_new_process(measure, part, n, options.repeats) for n in build()}
        parts[part] = {"rows": rows}
    write_results(options.output, {"parts": parts})


if __name__ == "__main__":
    main()
