"""From files to arrays that a network can read, and the random changes of training."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.case import Case
from unet3d.types import IGNORE, Misuse


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How a volume is made ready; kept in checkpoints, so that prediction does the same."""

    num_classes: int
    orientation: str = "RAS"
    spacing_mm: tuple[float, float, float] | None = None  # None: as it is in the file
    normalize: str = "zscore"  # per channel; or none
    ignore_label: int | None = None  # as the files call it

    def __post_init__(self):
        if self.normalize not in ("zscore", "none"):
            raise Misuse(f"data.normalize must be zscore or none, got {self.normalize!r}")
        if not 2 <= self.num_classes <= IGNORE:
            raise Misuse(f"data.num_classes must be 2..{IGNORE}, got {self.num_classes}")
        if self.ignore_label is not None and 0 <= self.ignore_label < self.num_classes:
            raise Misuse(
                f"data.ignore_label must lie outside the classes 0..{self.num_classes - 1}, "
                f"got {self.ignore_label}"
            )
        if self.spacing_mm is not None and (
            len(self.spacing_mm) != 3 or not min(self.spacing_mm) > 0
        ):
            raise Misuse(f"data.spacing_mm must be three numbers above 0, got {self.spacing_mm}")

    def settings(self) -> dict[str, Any]:
        """All of the above, as plain values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def image(self, files: Sequence[Path]) -> np.ndarray:
        """(C, D, H, W), float32."""
        channels = np.concatenate([self._load(file, "bilinear") for file in files])
        if not np.isfinite(channels).all():
            raise Misuse(f"{files[0]} holds NaN or infinite values")
        if self.normalize == "zscore":
            from monai.transforms import NormalizeIntensity

            channels = NormalizeIntensity(channel_wise=True)(channels)
        return np.asarray(channels, np.float32)

    def label(self, file: Path) -> np.ndarray:
        """(D, H, W), uint8; voxels to ignore are IGNORE."""
        values = self._load(file, "nearest")
        if len(values) != 1:
            raise Misuse(f"{file} must hold one label per voxel, it has {len(values)} channels")
        present = np.unique(values)
        allowed = set(range(self.num_classes)) | {self.ignore_label}
        strange = [float(v) for v in present if v not in allowed]
        if strange:
            raise Misuse(
                f"{file}: labels must be 0..{self.num_classes - 1}"
                + (f" or {self.ignore_label} (ignored)" if self.ignore_label is not None else "")
                + f", it holds {', '.join(f'{v:g}' for v in strange[:5])}"
                + ("" if len(strange) <= 5 else f" and {len(strange) - 5} more")
            )
        label = np.where(values[0] == self.ignore_label, IGNORE, values[0])
        return label.astype(np.uint8)

    def _load(self, file: Path, interpolation: str) -> np.ndarray:
        from monai.transforms import EnsureChannelFirst, LoadImage, Orientation, Spacing

        if not file.is_file():
            raise Misuse(f"{file.absolute()} is missing")
        try:
            volume: Any = LoadImage(reader="NibabelReader", image_only=True)(file)
        except Exception as error:  # the reader's own errors do not name the file
            raise Misuse(
                f"{file} cannot be read as a volume: {error.__cause__ or error}"
            ) from error
        if volume.ndim not in (3, 4):
            raise Misuse(f"{file} must be a 3D volume, its shape is {list(volume.shape)}")
        volume = EnsureChannelFirst()(volume)
        volume = Orientation(self.orientation, labels=(("L", "R"), ("P", "A"), ("I", "S")))(volume)
        if self.spacing_mm is not None:
            volume = Spacing(self.spacing_mm, mode=interpolation)(volume)
        return volume.numpy()


def prepare(case: Case, preparation: Preparation) -> tuple[np.ndarray, np.ndarray]:
    """The image (C, D, H, W) float32 and the label (D, H, W) uint8 of a case."""
    image, label = preparation.image(case.images), preparation.label(case.label)
    if image.shape[1:] != label.shape:
        raise Misuse(
            f"{case.images[0]} has shape {list(image.shape[1:])} and its label {case.label} "
            f"{list(label.shape)}: they must be equal"
        )
    return image, label


def augmentation(name: str) -> Any:
    """A MONAI transform of {image, label} with its own random state, or None."""
    if name == "none":
        return None
    if name != "light":
        raise Misuse(f"data.augmentation must be light or none, got {name!r}")
    from monai.transforms import (
        Compose,
        RandAdjustContrastd,
        RandFlipd,
        RandGaussianNoised,
        RandScaleIntensityd,
    )

    flips = [RandFlipd(("image", "label"), prob=0.5, spatial_axis=axis) for axis in range(3)]
    return Compose(
        [
            *flips,
            RandScaleIntensityd("image", factors=0.2, prob=0.5),
            RandAdjustContrastd("image", prob=0.2, gamma=(0.7, 1.5), retain_stats=True),
            RandGaussianNoised("image", prob=0.2, std=0.1),
        ]
    )
