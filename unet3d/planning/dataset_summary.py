"""Summarize a dataset in a few lines."""

from collections.abc import Sequence

import numpy as np

from unet3d.data.preprocessing.channels import describe_axes
from unet3d.data.preprocessing.fingerprint import CaseFingerprint
from unet3d.planning.planner import format_dims
from unet3d.text import pluralize


def summarize_dataset(
    fingerprints: Sequence[CaseFingerprint], classes: Sequence[str], orientation: str
) -> str:
    """Describe sizes, spacings and classes: the median, and the range where cases differ."""

    def format_range(values: np.ndarray) -> str:
        rows = values.min(0), np.median(values, 0), values.max(0)
        low, middle, high = (format_dims([float(f"{n:.4g}") for n in row]) for row in rows)
        return middle if low == high else f"{middle} ({low} to {high})"

    counts = [[p.voxels.get(c, 0) for c in range(len(classes))] for p in fingerprints]
    fractions = np.array(counts) / np.sum(counts, axis=1, keepdims=True).clip(min=1)
    shapes = np.array([p.shape for p in fingerprints])
    sizes = describe_axes(np.median(shapes, 0).tolist(), orientation)
    if (shapes != shapes[0]).any():
        sizes += f", {format_dims(shapes.min(0))} to {format_dims(shapes.max(0))}"
    spacings = format_range(np.array([p.spacing_mm for p in fingerprints]))
    rows = [
        f"{len(fingerprints)} cases, sizes {sizes} voxels",
        f"spacings {spacings} mm",
    ]
    for c, name in enumerate(classes[1:], start=1):
        count, percent = int((fractions[:, c] > 0).sum()), 100 * fractions[:, c].mean()
        rows.append(f"{name}: in {pluralize(count, 'case')}, {percent:.2g}% of the voxels")
    return "\n".join(rows)
