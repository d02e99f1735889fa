"""Preprocess an image that is in memory. Bundles carry this module, too: it needs numpy alone."""

from collections.abc import Sequence
from itertools import product

import numpy as np

from unet3d.data.preprocessing.resampling import (
    FileGrid,
    choose_interpolation_orders,
    compute_resampled_shape,
    crop,
    find_nonzero_box,
    find_orientation,
    get_full_box,
    get_spacing,
    reorient,
    resample,
)

MIN_FRACTION = 0.5
"""Fraction of the border that must have the corners' value: the anatomy may touch the border."""

Intensity = tuple[float, float, float, float]
"""Mean, standard deviation and percentiles 0.5 and 99.5 of a channel's foreground."""


def preprocess_channels(
    channels: np.ndarray,
    affine: np.ndarray,
    *,
    orientation: str,
    spacing_mm: Sequence[float] | None,
    background: Sequence[float],
    crop_to_foreground: bool,
    normalize: Sequence[str],
    intensities: Sequence[Intensity] | None,
) -> tuple[np.ndarray, FileGrid]:
    """Reorient, crop, normalize and resample channels (C, D, H, W), with one value for each.

    Return them in float32, and how to go back to the grid of the file.
    """
    axes, flips = find_orientation(affine, orientation)
    d, h, w = channels.shape[1:]
    channels = reorient(channels, axes, flips)
    box = find_nonzero_box(channels, background) if crop_to_foreground else get_full_box(channels)
    old_mm = get_spacing(affine, axes)
    new_mm = spacing_mm or old_mm
    shape = compute_resampled_shape([stop - start for start, stop in box], old_mm, new_mm)
    grid = FileGrid(file_shape=(d, h, w), axes=axes, flips=flips, box=box, shape=shape)
    orders = choose_interpolation_orders(old_mm, new_mm, 3)
    image = np.empty((len(channels), *shape), np.float32)
    for c, method in enumerate(normalize):
        channel = crop(channels[c], grid).astype(np.float32)
        known = intensities[c] if intensities else None
        normalize_in_place(channel, method, np.float32(background[c]), known)
        image[c] = resample(channel, shape, orders)
    return image, grid


def normalize_in_place(
    channel: np.ndarray, method: str, background: np.float32, known: Intensity | None
) -> None:
    """Normalize a channel (D, H, W), float32; `known` are the dataset's intensities, for ct."""
    if method == "none":
        if background:
            channel[channel == background] = 0
        return
    selected = ...  # voxels that are normalized: all, unless zscore_nonzero
    if method == "ct":
        assert known is not None, "the config provides them if a channel is ct"
        mean, std, low, high = known
        np.clip(channel, low, high, out=channel)
    else:
        if method == "zscore_nonzero":
            foreground = channel != background
            if foreground.any():
                selected = foreground
                if background:
                    channel[~foreground] = 0
        mean, std = channel[selected].mean(dtype=float), channel[selected].std(dtype=float)
    channel[selected] -= mean
    channel[selected] /= max(std, 1e-8)


def find_border_value(channel: np.ndarray) -> float | None:
    """Return the value of all eight corners if most of the faces of (D, H, W) have it too."""
    corners = {channel[corner].item() for corner in product((0, -1), repeat=3)}
    if len(corners) > 1:
        return None
    value = corners.pop()
    faces = [np.moveaxis(channel, axis, 0)[end] for axis in range(3) for end in (0, -1)]
    equal = sum(np.count_nonzero(face == value) for face in faces)
    return float(value) if equal >= MIN_FRACTION * sum(face.size for face in faces) else None
