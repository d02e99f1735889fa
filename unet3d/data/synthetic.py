"""Volumes made from a seed: noisy structures that no threshold on intensity can tell apart.

They are written once, as NIfTI files in the Decathlon's layout, into a folder that bears the
settings in its name.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from hashlib import blake2s
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.case import Case, Description
from unet3d.data.decathlon import Decathlon
from unet3d.data.faults import Finding
from unet3d.types import Misuse

SHAPES = ("ball", "tube", "box", "shell")


class Synthetic:
    """`num_cases` volumes of `size` voxels with one or two structures per class.

    Structures of class c are `0.6 + 0.35 (c - 1)` bright above a background of 0; `noise` is the
    standard deviation of what is added to every voxel.
    """

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
        if len(size) != 3 or min(size) < 8 or len(spacing_mm) != 3 or min(spacing_mm) <= 0:
            raise Misuse(
                "data.source.size must be three ints >= 8 and spacing_mm three numbers above 0, "
                f"got {list(size)} and {list(spacing_mm)}"
            )
        if not 2 <= num_classes <= 20 or num_cases < 1 or noise < 0:
            raise Misuse(
                "synthetic data needs data.num_classes in 2..20 (the background counts), "
                f"num_cases >= 1 and noise >= 0, got {num_classes}, {num_cases} and {noise}"
            )
        self.settings: dict[str, Any] = {
            "classes": num_classes,
            "cases": num_cases,
            "size": list(size),
            "spacing_mm": [float(s) for s in spacing_mm],
            "noise": float(noise),
            "seed": seed,
        }
        key = blake2s(json.dumps(self.settings).encode(), digest_size=4).hexdigest()
        extent = "x".join(map(str, size))
        self.root = Path(root) / f"{num_classes}-classes_{num_cases}-cases_{extent}_{key}"

    def describe(self) -> Description:
        """One channel; the classes are named by their shape."""
        return self._made().describe()

    def cases(self) -> list[Case]:
        """All volumes, made now if they are not there yet."""
        return self._made().cases()

    def faults(self) -> list[Finding]:
        """What may have happened to the files since."""
        return self._made().faults()

    def _made(self) -> Decathlon:
        if not self.root.exists():
            self.root.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=self.root.parent))
            try:
                write(draft, **self.settings)
                draft.chmod(0o755)
                draft.rename(self.root)
            except OSError:
                if not self.root.exists():  # else another run has made the same set meanwhile
                    raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return Decathlon(str(self.root))


def class_names(classes: int) -> list[str]:
    """Background, ball, tube, box, shell, ball_2, ...

    >>> class_names(6)
    ['background', 'ball', 'tube', 'box', 'shell', 'ball_2']
    """
    rounds = [divmod(c, len(SHAPES)) for c in range(classes - 1)]
    return ["background", *(SHAPES[s] + (f"_{r + 1}" if r else "") for r, s in rounds)]


def write(
    folder: Path,
    *,
    classes: int,
    cases: int,
    size: list[int],
    spacing_mm: list[float],
    noise: float,
    seed: int,
) -> None:
    """Make the data set in `folder`."""
    import nibabel

    (folder / "imagesTr").mkdir()
    (folder / "labelsTr").mkdir()
    affine = np.diag([*spacing_mm, 1.0])
    training = []
    for number in range(cases):
        rng = np.random.default_rng((seed, number))
        label = draw(rng, classes, size, spacing_mm)
        brightness = np.array([0.0, *(0.6 + 0.35 * c for c in range(classes - 1))])
        image = brightness[label] + rng.normal(0, noise, size)
        entry = {}
        for key, array in (("image", image.astype(np.float32)), ("label", label)):
            name = f"./{key}sTr/case_{number:03d}.nii.gz"
            nibabel.save(nibabel.Nifti1Image(array, affine), folder / name)
            entry[key] = name
        training.append(entry)
    content = {
        "name": "Synthetic",
        "modality": {"0": "synthetic"},
        "labels": {str(n): name for n, name in enumerate(class_names(classes))},
        "training": training,
    }
    (folder / "dataset.json").write_text(json.dumps(content, indent=1))


def draw(
    rng: np.random.Generator, classes: int, size: Sequence[int], spacing_mm: Sequence[float]
) -> np.ndarray:
    """Labels (D, H, W), uint8: one or two structures of every class, later ones on top."""
    extent = np.array(size) * np.array(spacing_mm)
    grid = np.stack(
        np.meshgrid(
            *((np.arange(n) + 0.5) * s for n, s in zip(size, spacing_mm, strict=True)),
            indexing="ij",
        )
    )  # (3, D, H, W), in mm
    label = np.zeros(size, np.uint8)
    radius = 0.5 * extent.min() / (1 + (classes - 1) ** (1 / 3))  # so that all find a place
    for c in range(1, classes):
        for _ in range(rng.integers(1, 3)):
            r = radius * rng.uniform(0.75, 1.0)
            centre = rng.uniform(np.minimum(r, extent / 2), np.maximum(extent - r, extent / 2))
            offset = grid - centre[:, None, None, None]
            label[inside(SHAPES[(c - 1) % len(SHAPES)], offset, r, rng)] = c
    return label


def inside(shape: str, offset: np.ndarray, r: float, rng: np.random.Generator) -> np.ndarray:
    """Which voxels, at `offset` mm (3, D, H, W) from a centre, belong to a shape of radius `r`."""
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
