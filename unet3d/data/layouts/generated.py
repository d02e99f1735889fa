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

MAX_CASES = 100_000

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
        if not 1 <= settings["cases"] <= MAX_CASES:
            raise UsageError(
                f"data.layout.num_cases must be 1..{MAX_CASES:,}, got {settings['cases']}"
            )
        if settings["seed"] < 0:
            raise UsageError(f"data.layout.seed must be >= 0, got {settings['seed']}")
        key = blake2s(json.dumps(settings).encode(), digest_size=4).hexdigest()
        size = "x".join(map(str, settings["size"]))
        self.root = Path(root) / f"{prefix}_{settings['cases']}-cases_{size}_{key}"
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
            self.root.parent.mkdir(parents=True, exist_ok=True)
            check_folder(self.root.parent)
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


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds other files: a dataset that was meant to be read."""
    others = sorted(path.name for path in folder.glob("[!.]*") if not NAME.fullmatch(path.name))
    if others:
        raise UsageError(
            f"data.root={folder} holds {join_first(others)}, and volumes would be generated there: "
            "set data= to the layout of your dataset (decathlon, nnunet or pairs), or another "
            "data.root for generated volumes"
        )


def make_grid(size: Sequence[int], spacing_mm: Sequence[float]) -> np.ndarray:
    """Return the voxel centers in mm: (3, D, H, W)."""
    axes = ((np.arange(n) + 0.5) * s for n, s in zip(size, spacing_mm, strict=True))
    return np.stack(np.meshgrid(*axes, indexing="ij"))
