"""The random changes of training."""

from typing import Any

from unet3d.types import Misuse


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
