"""Middle slices of a volume with reference and prediction as colours."""

import colorsys

import numpy as np
from torch import Tensor

SIDE = 600
"""Pixels of a picture's longer side, about; small volumes are enlarged to it."""


def palette(classes: int) -> np.ndarray:
    """(K, 3): black for the background, then hues as far apart as a golden angle makes them."""
    hues = [colorsys.hsv_to_rgb(c * 0.618 % 1, 0.85, 1.0) for c in range(1, classes)]
    return np.array([(0.0, 0.0, 0.0), *hues])


def middle_slices(image: Tensor, reference: Tensor, prediction: Tensor) -> np.ndarray:
    """(3, H, W) floats: three planes from left to right; image, reference, prediction from the top.

    `image` is (D, H, W), the others hold classes; the planes go through the reference's middle.
    """
    colours = palette(256)
    grey = windowed(image.float().cpu().numpy())
    found = np.argwhere((reference > 0).cpu().numpy())
    centre = found.mean(0).round().astype(int) if len(found) else np.array(grey.shape) // 2
    columns = []
    for axis in range(3):
        plane = np.repeat(grey.take(centre[axis], axis)[..., None], 3, axis=-1)
        rows = [plane]
        for labels in (reference, prediction):
            classes = labels.cpu().numpy().take(centre[axis], axis)
            rows.append(overlay(plane, classes, colours))
        columns.append(rows)
    height = max(rows[0].shape[0] for rows in columns)
    padded = [np.concatenate([_pad(r, height) for r in rows]) for rows in columns]
    picture = np.concatenate(padded, axis=1)
    enlarged = max(1, SIDE // max(picture.shape))  # whole pixels, so that voxels stay sharp
    return picture.repeat(enlarged, 0).repeat(enlarged, 1).transpose(2, 0, 1)


def windowed(image: np.ndarray) -> np.ndarray:
    """Grey values 0..1 from the 1st to the 99th percentile."""
    low, high = np.percentile(image, (1, 99))
    return np.clip((image - low) / max(high - low, 1e-6), 0, 1)


def overlay(plane: np.ndarray, classes: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """A plane (H, W, 3) with the foreground of its classes (H, W) coloured."""
    return np.where(classes[..., None] > 0, 0.4 * plane + 0.6 * colours[classes], plane)


def _pad(plane: np.ndarray, height: int) -> np.ndarray:
    return np.pad(plane, ((0, height - plane.shape[0] + 1), (0, 1), (0, 0)))
