"""A data set in the Decathlon's layout that is written from settings, once, when it is missing.

The settings are in the folder's name, so that other settings make another folder.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2s
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.case import Case, Description
from unet3d.data.findings import Finding
from unet3d.data.layouts.decathlon import Decathlon
from unet3d.errors import UsageError


class Generated:
    """The folder that `write(folder, **settings)` makes; nothing is made before it is asked for."""

    def __init__(
        self,
        root: str,
        *,
        name: str,
        settings: Mapping[str, Any],
        write: Callable[..., None],
    ):
        key = blake2s(json.dumps(settings).encode(), digest_size=4).hexdigest()
        self.root = Path(root) / f"{name}_{key}"
        self.settings, self.write = settings, write

    def describe(self) -> Description:
        """Channels and classes, in the order of their numbers."""
        return self._make().describe()

    def cases(self) -> list[Case]:
        """All volumes, made now if they are not there yet."""
        return self._make().cases()

    def faults(self) -> list[Finding]:
        """What may have happened to the files since."""
        return self._make().faults()

    def _make(self) -> Decathlon:
        if not self.root.exists():
            self.root.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=self.root.parent))
            try:
                self.write(draft, **self.settings)
                draft.chmod(0o755)
                draft.rename(self.root)
            except OSError:
                if not self.root.exists():  # else another run has made the same set meanwhile
                    raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return Decathlon(str(self.root))


def check_grid(size: Sequence[int], spacing_mm: Sequence[float]) -> None:
    """Refuse a grid that holds no volume."""
    if len(size) != 3 or min(size) < 8 or len(spacing_mm) != 3 or min(spacing_mm) <= 0:
        raise UsageError(
            "data.source.size must be three ints >= 8 and spacing_mm three numbers above 0, "
            f"got {list(size)} and {list(spacing_mm)}"
        )


def make_grid(size: Sequence[int], spacing_mm: Sequence[float]) -> np.ndarray:
    """Return the voxels' centers in mm: (3, D, H, W)."""
    axes = ((np.arange(n) + 0.5) * s for n, s in zip(size, spacing_mm, strict=True))
    return np.stack(np.meshgrid(*axes, indexing="ij"))


def write_decathlon(
    folder: Path,
    *,
    name: str,
    channels: Sequence[str],
    classes: Sequence[str],
    cases: int,
    spacing_mm: Sequence[float],
    draw: Callable[[int], tuple[np.ndarray, np.ndarray]],
) -> None:
    """Write the image (channels last, if several) and the label of `draw(number)`, case by case."""
    import nibabel

    (folder / "imagesTr").mkdir()
    (folder / "labelsTr").mkdir()
    affine = np.diag([*spacing_mm, 1.0])
    training = []
    for number in range(cases):
        image, label = draw(number)
        entry = {}
        for key, array in (("image", image.astype(np.float32)), ("label", label)):
            file = f"./{key}sTr/case_{number:03d}.nii.gz"
            nibabel.save(nibabel.Nifti1Image(array, affine), folder / file)
            entry[key] = file
        training.append(entry)
    content = {
        "name": name,
        "modality": {str(n): channel for n, channel in enumerate(channels)},
        "labels": {str(n): label for n, label in enumerate(classes)},
        "training": training,
    }
    (folder / "dataset.json").write_text(json.dumps(content, indent=1))
