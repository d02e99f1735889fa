"""Generate noisy structures that no intensity threshold can separate."""

from collections.abc import Sequence

import numpy as np

from unet3d.data.layouts.generated import GeneratedDataset, make_grid
from unet3d.errors import UsageError

SHAPES = ("ball", "tube", "box", "shell")


class Synthetic(GeneratedDataset):
    """`num_cases` volumes of `size` voxels with one or two structures per class.

    Structures of class c have intensity `0.6 + 0.35 (c - 1)`, the background 0; `noise` is the
    standard deviation of the Gaussian noise.
    """

    channels = ("synthetic",)

    def __init__(
        self,
        root: str,
        *,
        num_classes: int,
        num_cases: int,
        size: Sequence[int],
        spacing_mm: Sequence[float],
        noise: float,
        seed: int,
    ):
        if not 2 <= num_classes <= 20:
            raise UsageError(
                "synthetic data needs data.num_classes in 2..20 (with the background), got "
                f"{num_classes}"
            )
        settings = {
            "classes": num_classes,
            "cases": num_cases,
            "size": list(size),
            "spacing_mm": list(map(float, spacing_mm)),
            "noise": float(noise),
            "seed": seed,
        }
        classes = make_class_names(num_classes)
        super().__init__(root, prefix=f"{num_classes}-classes", classes=classes, settings=settings)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw the structures, and noise on their intensities."""
        size, count = self.settings["size"], len(self.classes)
        label = draw_label(rng, count, size, self.settings["spacing_mm"])
        intensity = np.array([0.0, *(0.6 + 0.35 * c for c in range(count - 1))])
        return intensity[label] + rng.normal(0, self.settings["noise"], size), label


def make_class_names(classes: int) -> list[str]:
    """Return background, ball, tube, box, shell, ball_2, ...

    >>> make_class_names(6)
    ['background', 'ball', 'tube', 'box', 'shell', 'ball_2']
    """
    rounds = [divmod(c, len(SHAPES)) for c in range(classes - 1)]
    return ["background", *(SHAPES[s] + (f"_{r + 1}" if r else "") for r, s in rounds)]


def draw_label(
    rng: np.random.Generator, classes: int, size: Sequence[int], spacing_mm: Sequence[float]
) -> np.ndarray:
    """Draw labels (D, H, W), uint8: one or two structures per class, later ones on top."""
    extent = np.array(size) * np.array(spacing_mm)
    grid = make_grid(size, spacing_mm)
    label = np.zeros(size, np.uint8)
    radius = 0.5 * extent.min() / (1 + (classes - 1) ** (1 / 3))  # so that all of them fit
    for c in range(1, classes):
        for _ in range(rng.integers(1, 3)):
            r = radius * rng.uniform(0.75, 1.0)
            center = rng.uniform(np.minimum(r, extent / 2), np.maximum(extent - r, extent / 2))
            offset = grid - center[:, None, None, None]
            label[draw_shape_mask(SHAPES[(c - 1) % len(SHAPES)], offset, r, rng)] = c
    return label


def draw_shape_mask(
    shape: str, offset: np.ndarray, r: float, rng: np.random.Generator
) -> np.ndarray:
    """Return the mask of a shape of radius `r`; voxels are at `offset` mm (3, D, H, W) from it."""
    distance = np.linalg.norm(offset, axis=0)
    if shape == "ball":
        return distance < r
    if shape == "shell":
        return (distance < r) & (distance > 0.55 * r)
    if shape == "box":
        return np.abs(offset).max(axis=0) < 0.8 * r
    direction = rng.normal(size=3)
    direction /= np.linalg.norm(direction)
    along = np.tensordot(direction, offset, 1)
    return (np.abs(along) < 1.6 * r) & (distance**2 - along**2 < (0.5 * r) ** 2)
