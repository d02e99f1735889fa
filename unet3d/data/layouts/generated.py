"""Generate a synthetic dataset in the Decathlon layout once.

The folder's name holds a hash of the settings, so that other settings get another folder.
"""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2s
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.case import Case, DatasetDescription
from unet3d.data.findings import Finding
from unet3d.data.layouts.decathlon import Decathlon
from unet3d.errors import UsageError
from unet3d.files import create_folder
from unet3d.text import join_first

MIN_SIZE = 8

NAME = re.compile(r".*_[0-9a-f]{8}")
"""Names of generated datasets."""


class GeneratedDataset:
    """A dataset that is written on first use; `draw` returns (image, label) of a case.

    Images have their channels last, if there are several.
    """

    channels: tuple[str, ...]

    def __init__(
        self,
        root: str,
        *,
        prefix: str,
        classes: Sequence[str],
        settings: Mapping[str, Any],
    ):
        size, spacing_mm = settings["size"], settings["spacing_mm"]
        if len(size) != 3 or min(size) < MIN_SIZE:
            raise UsageError(f"data.layout.size must be three ints >= {MIN_SIZE}, got {size}")
        if len(spacing_mm) != 3 or min(spacing_mm) <= 0:
            raise UsageError(
                f"data.layout.spacing_mm must be three numbers above 0, got {spacing_mm}"
            )
        if settings["cases"] < 1 or min(settings[k] for k in ("seed", "noise")) < 0:
            raise UsageError(
                "data.layout needs num_cases >= 1, seed >= 0 and noise >= 0, got "
                f"{settings['cases']}, {settings['seed']} and {settings['noise']}"
            )
        key = blake2s(json.dumps(settings).encode(), digest_size=4).hexdigest()
        name = f"{prefix}_{settings['cases']}-cases_{'x'.join(map(str, size))}_{key}"
        self.root = Path(root) / name
        self.classes, self.settings = classes, settings

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the image and the label of a case."""
        raise NotImplementedError

    def describe(self) -> DatasetDescription:
        """Return the channels and classes in the order of their numbers."""
        return self._generate().describe()

    def list_cases(self) -> list[Case]:
        """Return all cases; generate them if they are missing."""
        return self._generate().list_cases()

    def find_problems(self) -> list[Finding]:
        """Find changes that were made to the folder since it was generated."""
        return self._generate().find_problems()

    def _generate(self) -> Decathlon:
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
        return Decathlon(str(self.root))

    def write(self, folder: Path) -> None:
        """Write all cases to an empty folder."""
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
