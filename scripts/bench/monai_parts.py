"""Compare MONAI's inferer, metrics and transforms with those of unet3d: time, memory, results.

    python -m scripts.bench.monai_parts    # writes benchmarks/<name>-monai-parts.json, in minutes

Each implementation runs in a process of its own with the same input. Peak memory is the resident
memory besides what was there before, in the second call; seconds are the median of several calls.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unet3d.memory.peak import PeakMeter
from unet3d.report.run_report import collect_versions
from unet3d.units import MIB

ROOT = Path(__file__).resolve().parents[2]
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


def augment_ours() -> Work:
    """Rotate, scale and flip a patch of 64^3 and its labels, and change intensities."""
    from unet3d.data.augmentation.pipeline import Augment

    names = ("rotation", "scale", "flip", "noise", "blur", "brightness", "contrast")
    chances: Any = {f"{name}_p": 1.0 for name in (*names, "low_resolution", "gamma")}
    augment = Augment(**chances)
    image, labels = make_image(160, 160, 160), make_labels(160, 160, 160)
    numbers = iter(range(10**6))

    def run() -> None:
        seed = next(numbers)
        size = augment.sample_transform(seed, [64] * 3).compute_context_size([64] * 3)
        box = tuple(slice((160 - n) // 2, (160 - n) // 2 + n) for n in size)
        augment([image[(slice(None), *box)]], [labels[box]], [seed], [64] * 3)

    return run


def augment_monai() -> Work:
    """Change the same with MONAI's transforms."""
    from monai.transforms.compose import Compose
    from monai.transforms.intensity.dictionary import (
        RandAdjustContrastd,
        RandGaussianNoised,
        RandGaussianSmoothd,
        RandScaleIntensityd,
        RandScaleIntensityFixedMeand,
    )
    from monai.transforms.spatial.dictionary import (
        RandAffined,
        RandFlipd,
        RandSimulateLowResolutiond,
    )

    keys, sigma, angle = ("image", "label"), (0.5, 1.0), 0.52
    transform = Compose(
        [
            RandAffined(
                keys,
                (64, 64, 64),
                prob=1,
                rotate_range=(angle,) * 3,
                scale_range=(0.35,) * 3,
                mode=("bilinear", "nearest"),
                padding_mode="zeros",
            ),
            *(RandFlipd(keys, prob=0.5, spatial_axis=axis) for axis in range(3)),
            RandGaussianNoised("image", prob=1, std=0.1),
            RandGaussianSmoothd("image", sigma, sigma, sigma, prob=1),
            RandScaleIntensityd("image", 0.25, prob=1),
            RandScaleIntensityFixedMeand("image", factors=0.25, prob=1),
            RandSimulateLowResolutiond("image", prob=1, zoom_range=(0.5, 1.0)),
            RandAdjustContrastd("image", prob=1, gamma=(0.7, 1.5)),
        ]
    )
    content = {"image": make_image(160, 160, 160), "label": make_labels(160, 160, 160)[None]}

    def run() -> None:
        transform(dict(content))

    return run


def resample_ours() -> Work:
    """Resample a volume with cubic splines."""
    from unet3d.data.preprocessing.resampling import resample

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
    "augmentation, a patch of 64^3": {"unet3d": augment_ours, "Compose": augment_monai},
    "cubic resampling to 160 x 160 x 96": {"unet3d": resample_ours, "Spacing": resample_monai},
}
"""Implementations by part; the first one is ours."""


def measure(part: str, name: str, folder: Path, repeats: int) -> dict[str, Any]:
    """Return the costs of an implementation; keep its result."""
    torch.set_num_threads(1)
    meter, cpu = PeakMeter(), torch.device("cpu")
    with torch.inference_mode():
        work = PARTS[part][name]()
        work()  # imports
        ctypes.CDLL(None).malloc_trim(0)  # or freed memory that is used again would not count
        meter.start(cpu)
        before = meter.read(cpu).resident or 0
        result = work()
        peak = (meter.read(cpu).resident or 0) - before
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
    if result is not None:
        np.save(folder / f"{name}.npy", np.asarray(result))
    return {"seconds": median(seconds), "peak_mib": peak / MIB}


def compare(folder: Path, names: list[str]) -> dict[str, float]:
    """Return the largest difference of each result from ours, and for labels how many differ."""
    files = [folder / f"{name}.npy" for name in names]
    if not files[0].exists():
        return {}
    ours, *others = (np.load(file) for file in files)
    if ours.dtype == np.uint8:
        return {n: int((ours != o).sum()) for n, o in zip(names[1:], others, strict=True)}
    return {n: float(np.abs(ours - o).max()) for n, o in zip(names[1:], others, strict=True)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.monai_parts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", default="cpu", help="prefix of the result file")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("outputs/monai-parts"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.child:
        print(json.dumps(measure(*options.child, options.folder, options.repeats)))
        return 0
    report: dict[str, Any] = {"versions": collect_versions(), "parts": {}}
    for part, implementations in PARTS.items():
        for stale in options.folder.glob("*.npy"):
            stale.unlink()
        rows = {}
        for name in implementations:
            words = [sys.executable, "-m", "scripts.bench.monai_parts", "--child", part, name]
            words += ["--repeats", str(options.repeats), "--folder", str(options.folder)]
            ended = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE)
            rows[name] = json.loads(ended.stdout.splitlines()[-1])
            print(part, name, rows[name], flush=True)
        differences = compare(options.folder, list(implementations))
        report["parts"][part] = {"rows": rows, "differences": differences}
    path = ROOT / "benchmarks" / f"{options.name}-monai-parts.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
