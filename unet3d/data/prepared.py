"""Prepared volumes on disk: each made once, shared by runs and workers, read a patch at a time."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path

import numpy as np

from unet3d.data.case import Case
from unet3d.data.transforms import Preparation, prepare
from unet3d.types import IGNORE

PLACES_PER_CLASS = 2000
"""So many voxels of each class are remembered, for sampling patches around them."""


@dataclass(frozen=True)
class Volume:
    """A prepared case; the arrays are mapped from disk, not loaded."""

    name: str
    folder: Path

    @property
    def image(self) -> np.ndarray:
        """(C, D, H, W), float32."""
        return np.load(self.folder / "image.npy", mmap_mode="r")

    @property
    def label(self) -> np.ndarray:
        """(D, H, W), uint8."""
        return np.load(self.folder / "label.npy", mmap_mode="r")

    @property
    def places(self) -> np.ndarray:
        """(N, 4): class, then d, h, w, of some voxels of each foreground class; sorted by class."""
        return np.load(self.folder / "places.npy", mmap_mode="r")


def prepared(cases: Sequence[Case], preparation: Preparation, cache: Path) -> list[Volume]:
    """Every case, from the cache or prepared now; faults in files are found here."""
    volumes = []
    for case in cases:
        folder = cache / f"{case.name}-{_key(case, preparation)}"
        if not folder.exists():
            _write(folder, *prepare(case, preparation))
        volumes.append(Volume(case.name, folder))
    return volumes


def _key(case: Case, preparation: Preparation) -> str:
    files = [*case.images, case.label]
    stats = [file.stat() if file.exists() else None for file in files]
    told = [
        preparation.settings(),
        [str(file.resolve()) for file in files],
        [(s.st_size, s.st_mtime_ns) for s in stats if s],
    ]
    return blake2s(json.dumps(told).encode(), digest_size=8).hexdigest()


def _write(folder: Path, image: np.ndarray, label: np.ndarray) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        np.save(draft / "image.npy", image)
        np.save(draft / "label.npy", label)
        np.save(draft / "places.npy", _places(label))
        draft.rename(folder)
    except OSError:
        if not folder.exists():  # else another run has prepared the same case meanwhile
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _places(label: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = [np.empty((0, 4), np.int32)]
    for c in np.unique(label):
        if c in (0, IGNORE):
            continue
        where = np.argwhere(label == c)
        if len(where) > PLACES_PER_CLASS:
            where = where[np.sort(rng.choice(len(where), PLACES_PER_CLASS, replace=False))]
        rows.append(np.insert(where, 0, c, axis=1).astype(np.int32))
    return np.concatenate(rows)
