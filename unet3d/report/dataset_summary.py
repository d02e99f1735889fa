"""What a data set is like, in a few lines and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from unet3d.report.slices import palette


class CaseFingerprintLike(Protocol):
    """Of one case."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def spacing_mm(self) -> tuple[float, ...]: ...

    @property
    def voxels(self) -> dict[int, int]: ...

    @property
    def intensities(self) -> np.ndarray: ...


def compute_class_volumes(
    prints: Sequence[CaseFingerprintLike], classes: Sequence[str]
) -> np.ndarray:
    """(cases, classes): of the voxels."""
    counts = np.array([[p.voxels.get(c, 0) for c in range(len(classes))] for p in prints], float)
    return counts / counts.sum(1, keepdims=True).clip(min=1)


def summarize_dataset(
    prints: Sequence[CaseFingerprintLike],
    classes: Sequence[str],
    axes: Sequence[str] = ("D", "H", "W"),
) -> str:
    """Sizes, spacings and classes, from the least to the largest; `axes` are the axes' names."""

    def extent(values: np.ndarray) -> str:
        low, middle, high = (
            " x ".join(f"{v:g}" for v in np.round(row, 3))
            for row in (values.min(0), np.median(values, 0), values.max(0))
        )
        return middle if low == high else f"{middle} ({low} to {high})"

    share = compute_class_volumes(prints, classes)
    rows = [
        f"{len(prints)} cases, sizes {extent(np.array([p.shape for p in prints]))} voxels "
        f"({' x '.join(axes)})",
        f"spacings {extent(np.array([p.spacing_mm for p in prints]))} mm",
    ]
    for c, name in enumerate(classes[1:], start=1):
        there = int((share[:, c] > 0).sum())
        rows.append(f"{name}: in {there} cases, {100 * share[:, c].mean():.2g} % of the voxels")
    return "\n".join(rows)


def draw_dataset_summary(
    prints: Sequence[CaseFingerprintLike],
    classes: Sequence[str],
    channels: Sequence[str],
    path: Path,
) -> None:
    """Sizes, spacings, intensities of the foreground and shares of the classes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    sizes, spacings, grey, share = figure.subplots(2, 2).flat
    for axes, values, unit in (
        (sizes, [p.shape for p in prints], "voxels"),
        (spacings, [p.spacing_mm for p in prints], "mm"),
    ):
        axes.boxplot(np.array(values), orientation="horizontal", whis=(0, 100))
        axes.set_yticks((1, 2, 3), ("D", "H", "W"))
        axes.set_xlabel(unit)
    sizes.set_title(f"sizes of {len(prints)} cases")
    spacings.set_title("spacings")
    for number, name in enumerate(channels):
        values = np.concatenate([p.intensities[number] for p in prints])
        if len(values):
            low, high = np.percentile(values, (0.1, 99.9))
            scale = max(float(np.median(np.abs(values))), 1e-6)  # linear up to here, then log
            bins = np.sinh(np.linspace(np.arcsinh(low / scale), np.arcsinh(high / scale), 100))
            grey.hist(values.clip(low, high), bins=bins * scale, histtype="step", label=name)
            grey.set_xscale("asinh", linear_width=scale)
    grey.set(title="intensities of the foreground", yticks=[])
    grey.legend()
    found = 100 * compute_class_volumes(prints, classes)[:, 1:]
    boxes = share.boxplot(found, orientation="horizontal", whis=(0, 100), patch_artist=True)
    for box, colour in zip(boxes["boxes"], palette(len(classes))[1:], strict=True):
        box.set_facecolor(colour)
    share.set_yticks(range(1, len(classes)), classes[1:])
    share.set(title="share of the classes", xlabel="% of a case's voxels")
    figure.savefig(path, dpi=100)
