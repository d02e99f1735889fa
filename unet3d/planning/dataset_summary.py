"""Summarize a dataset in a few lines and as a figure."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unet3d.data.preprocessing.fingerprint import CaseFingerprint
from unet3d.files import write_figure
from unet3d.planning.planner import format_dims
from unet3d.report.figures import make_figure
from unet3d.report.slices import get_palette
from unet3d.text import escape_mathtext, pluralize


def compute_volume_fractions(
    fingerprints: Sequence[CaseFingerprint], classes: Sequence[str]
) -> np.ndarray:
    """Return each class's fraction of each case's voxels, (cases, classes)."""
    counts = np.array(
        [[p.voxels.get(c, 0) for c in range(len(classes))] for p in fingerprints], float
    )
    return counts / counts.sum(1, keepdims=True).clip(min=1)


def summarize_dataset(
    fingerprints: Sequence[CaseFingerprint], classes: Sequence[str], axes: Sequence[str]
) -> str:
    """Describe sizes, spacings and classes: the median, and the range where cases differ."""

    def format_range(values: np.ndarray) -> str:
        rows = values.min(0), np.median(values, 0), values.max(0)
        low, middle, high = (format_dims(np.round(row, 3).tolist()) for row in rows)
        return middle if low == high else f"{middle} ({low} to {high})"

    fractions = compute_volume_fractions(fingerprints, classes)
    sizes = format_range(np.array([p.shape for p in fingerprints]))
    spacings = format_range(np.array([p.spacing_mm for p in fingerprints]))
    rows = [
        f"{len(fingerprints)} cases, sizes {sizes} voxels ({' x '.join(axes)})",
        f"spacings {spacings} mm",
    ]
    for c, name in enumerate(classes[1:], start=1):
        count, percent = int((fractions[:, c] > 0).sum()), 100 * fractions[:, c].mean()
        rows.append(f"{name}: in {pluralize(count, 'case')}, {percent:.2g}% of the voxels")
    return "\n".join(rows)


def draw_dataset_summary(
    fingerprints: Sequence[CaseFingerprint],
    classes: Sequence[str],
    channels: Sequence[str],
    path: Path,
) -> None:
    """Plot sizes, spacings, foreground intensities and class volumes."""
    figure = make_figure(11, 7)
    sizes, spacings, intensities, volumes = figure.subplots(2, 2).flat
    for axes, values, unit in (
        (sizes, [p.shape for p in fingerprints], "voxels"),
        (spacings, [p.spacing_mm for p in fingerprints], "mm"),
    ):
        axes.boxplot(np.array(values), orientation="horizontal", whis=(0, 100))
        axes.set_yticks((1, 2, 3), ("D", "H", "W"))
        axes.set_xlabel(unit)
    sizes.set_title(f"sizes of {len(fingerprints)} cases")
    spacings.set_title("spacings")
    for index, name in enumerate(channels):
        values = np.concatenate([p.intensities[index] for p in fingerprints])
        if len(values):
            low, high = np.percentile(values, (0.1, 99.9))
            scale = max(float(np.median(np.abs(values))), 1e-6)  # linear up to here, then log
            bins = np.sinh(np.linspace(np.arcsinh(low / scale), np.arcsinh(high / scale), 100))
            shown, label = values.clip(low, high), escape_mathtext(name)
            intensities.hist(shown, bins * scale, histtype="step", label=label)
            intensities.set_xscale("asinh", linear_width=scale)
    intensities.set(title="foreground intensities", yticks=[])
    intensities.legend()
    percents = 100 * compute_volume_fractions(fingerprints, classes)[:, 1:]
    boxes = volumes.boxplot(percents, orientation="horizontal", whis=(0, 100), patch_artist=True)
    for box, color in zip(boxes["boxes"], get_palette(len(classes) - 1), strict=True):
        box.set_facecolor(color)
    volumes.set_yticks(range(1, len(classes)), [escape_mathtext(name) for name in classes[1:]])
    volumes.set(title="class volumes", xlabel="% of a case's voxels")
    write_figure(figure, path)
