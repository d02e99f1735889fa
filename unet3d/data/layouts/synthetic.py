"""Generate a synthetic dataset in the Decathlon layout once: noisy structures that no intensity
threshold can separate.

The folder's name holds a hash of the settings, so that other settings get another folder.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2s
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.layouts.decathlon import Decathlon
from unet3d.errors import UsageError
from unet3d.files import create_folder
from unet3d.text import join_first

SHAPES = ("ball", "tube", "box", "shell")

MIN_SIZE = 8

NAME = re.compile(r".*_[0-9a-f]{8}")  # names of generated datasets


class GeneratedDataset(Decathlon):
    """A task that is written on first use."""

    channels: tuple[str, ...]

    def __init__(
        self, root: str, *, prefix: str, classes: Sequence[str], settings: Mapping[str, Any]
    ):
        size, spacing_mm = settings["size"], settings["spacing_mm"]
        is_valid = len(size) == len(spacing_mm) == 3 and min(size) >= MIN_SIZE
        lowest = min(settings["cases"] - 1, settings["seed"], settings["noise"])
        if not is_valid or min(spacing_mm) <= 0 or lowest < 0:
            raise UsageError(
                f"data.layout needs a size of three ints >= {MIN_SIZE}, spacing_mm of three "
                f"numbers above 0, num_cases >= 1, seed >= 0 and noise >= 0, got {settings}"
            )
        key = blake2s(json.dumps(settings).encode(), digest_size=4).hexdigest()
        name = f"{prefix}_{settings['cases']}-cases_{'x'.join(map(str, size))}_{key}"
        super().__init__(str(Path(root) / name))
        self.classes, self.settings = classes, settings

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return an image, with its channels last if there are several, and its label."""
        raise NotImplementedError

    @cached_property
    def content(self) -> dict[str, Any]:
        """Return the content of dataset.json; generate the dataset if it is missing."""
        if not self.root.exists():
            folder = self.root.parent
            folder.mkdir(parents=True, exist_ok=True)
            names = (path.name for path in folder.glob("[!.]*"))
            if others := sorted(name for name in names if not NAME.fullmatch(name)):
                raise UsageError(
                    f"data.root={folder} holds {join_first(others)}, and volumes would be "
                    "generated there: set data= to the layout of your dataset (decathlon, nnunet "
                    "or pairs), or another data.root for generated volumes"
                )
            with create_folder(self.root) as draft:
                self.write(draft)
        return super().content

    def write(self, folder: Path) -> None:
        import nibabel

        (folder / "imagesTr").mkdir()
        (folder / "labelsTr").mkdir()
        affine = np.diag([*self.settings["spacing_mm"], 1.0])
        training = []
        for index in range(self.settings["cases"]):
            image, label = self.draw(np.random.default_rng((self.settings["seed"], index)))
            entry = {}
            for key, array in (("image", image.astype(np.float32)), ("label", label)):
                file = f"./{key}sTr/case_{index:03d}.nii.gz"
                nibabel.save(nibabel.Nifti1Image(array, affine), folder / file)
                entry[key] = file
            training.append(entry)
        content = {
            "name": type(self).__name__,
            "modality": {str(n): channel for n, channel in enumerate(self.channels)},
            "labels": {str(n): label for n, label in enumerate(self.classes)},
            "training": training,
        }
        (folder / "dataset.json").write_text(json.dumps(content, indent=1), "utf-8")


def make_grid(size: Sequence[int], spacing_mm: Sequence[float]) -> np.ndarray:
    """Return the voxel centers in mm: (3, D, H, W)."""
    axes = ((np.arange(n) + 0.5) * s for n, s in zip(size, spacing_mm, strict=True))
    return np.stack(np.meshgrid(*axes, indexing="ij"))


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
            raise UsageError(f"synthetic data needs data.num_classes in 2..20, got {num_classes}")
        settings = {
            "classes": num_classes,
            "cases": num_cases,
            "size": list(size),
            "spacing_mm": list(map(float, spacing_mm)),
            "noise": float(noise),
            "seed": seed,
        }
        shapes = [divmod(c, len(SHAPES)) for c in range(num_classes - 1)]
        classes = ["background", *(SHAPES[s] + (f"_{r + 1}" if r else "") for r, s in shapes)]
        super().__init__(root, prefix=f"{num_classes}-classes", classes=classes, settings=settings)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        size, count = self.settings["size"], len(self.classes)
        label = draw_label(rng, count, size, self.settings["spacing_mm"])
        intensity = np.array([0.0, *(0.6 + 0.35 * c for c in range(count - 1))])
        return intensity[label] + rng.normal(0, self.settings["noise"], size), label


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
