"""Augment patches at random, on any device.

MONAI's random transforms draw from generators that go on from sample to sample, so a resumed run
could not make the sample again at which it was stopped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import radians
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.data.augmentation import intensity
from unet3d.data.augmentation.spatial import SpatialTransform, apply_transform, make_affine_matrix
from unet3d.errors import UsageError

RANGES = {
    "scale": (0.1, 10.0),
    "elastic_voxels": (0.0, 1e3),
    "noise_std": (0.0, 1e6),
    "blur_sigma": (0.01, 100.0),
    "brightness": (0.0, 1e3),
    "contrast": (0.0, 1e3),
    "low_resolution": (0.01, 1.0),
    "gamma": (0.01, 100.0),
}
"""The lowest and highest value that each setting allows."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Change patches with given probabilities (`..._p`) and strengths.

    The changes of a sample depend only on its seed, not on its batch or process. A sample for
    which none is drawn stays identical to the bit. The order is nnU-Net's: spatial, noise, blur,
    brightness, contrast, resolution, gamma.
    """

    rotation_p: float = 0.0
    rotation_degrees: Sequence[float] = (30.0, 30.0, 30.0)
    scale_p: float = 0.0
    scale: Sequence[float] = (0.7, 1.4)
    elastic_p: float = 0.0
    elastic_voxels: Sequence[float] = (0.0, 6.0)
    elastic_spacing: int = 16
    flip_p: float = 0.0
    flip_axes: Sequence[int] = (0, 1, 2)
    noise_p: float = 0.0
    noise_std: Sequence[float] = (0.0, 0.1)
    blur_p: float = 0.0
    blur_sigma: Sequence[float] = (0.5, 1.0)
    brightness_p: float = 0.0
    brightness: Sequence[float] = (0.75, 1.25)
    contrast_p: float = 0.0
    contrast: Sequence[float] = (0.75, 1.25)
    low_resolution_p: float = 0.0
    low_resolution: Sequence[float] = (0.5, 1.0)
    gamma_p: float = 0.0
    inverted_gamma_p: float = 0.0
    gamma: Sequence[float] = (0.7, 1.5)

    def __post_init__(self):
        for name in (field.name for field in fields(self)):
            if name.endswith("_p"):
                value = getattr(self, name)
                require(_are_numbers([value], 1) and 0 <= value <= 1, name, "within 0..1", value)
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            valid = _are_numbers(value, 2) and low <= value[0] <= value[1] <= high
            require(valid, name, f"two numbers within {low:g}..{high:g}, the lower first", value)
        degrees, axes, spacing = self.rotation_degrees, self.flip_axes, self.elastic_spacing
        valid = _are_numbers(degrees, 3) and all(0 <= d <= 180 for d in degrees)
        require(valid, "rotation_degrees", "three numbers within 0..180", degrees)
        valid = isinstance(axes, Sequence) and all(axis in (0, 1, 2) for axis in axes)
        require(valid, "flip_axes", "a list of axes 0, 1 and 2", axes)
        furthest = self.elastic_voxels[1]
        valid = isinstance(spacing, int) and spacing >= max(1, 2.5 * furthest)
        expected = f"an int >= 2.5 * {furthest:g} voxels, so that the image is not folded"
        require(valid, "elastic_spacing", expected, spacing)

    @property
    def mirroring_axes(self) -> list[int]:
        """Return the axes that are flipped: prediction may average over their flips, too."""
        return sorted(set(self.flip_axes)) if self.flip_p else []

    def __call__(
        self,
        images: Sequence[Tensor],
        labels: Sequence[Tensor],
        augmentation_seeds: Sequence[int],
        patch_size: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Make (B, C, *patch) and (B, *patch) from B contexts (C, *context) and (*context).

        A context must be at least as large as its transform's `compute_context_size` says.
        """
        patches = []
        for image, label, seed in zip(images, labels, augmentation_seeds, strict=True):
            transform = self.sample_transform(seed, patch_size)
            image, label = apply_transform(image, label, transform, patch_size)
            patches.append((self._change_intensities(image, seed), label))
        return torch.stack([i for i, _ in patches]), torch.stack([n for _, n in patches])

    def sample_transform(
        self, augmentation_seed: int, patch_size: Sequence[int]
    ) -> SpatialTransform:
        """Sample the spatial transform of a patch."""
        # All numbers are drawn, used or not, so that one probability does not affect other changes.
        numbers = _make_generator(augmentation_seed, 0).random(11).tolist()
        rotate, scale, deform = (
            number < p
            for number, p in zip(
                numbers[:3], (self.rotation_p, self.scale_p, self.elastic_p), strict=True
            )
        )
        scale_number, elastic_number, angles, flips = *numbers[3:5], numbers[5:8], numbers[8:]
        axes = [axis for axis in self.flip_axes if flips[axis] < self.flip_p]
        if not (rotate or scale or deform):
            return SpatialTransform(flips=axes)
        max_angles = [radians(d) if rotate else 0.0 for d in self.rotation_degrees]
        return SpatialTransform(
            matrix=make_affine_matrix(
                [(2 * a - 1) * m for a, m in zip(angles, max_angles, strict=True)],
                log_lerp(self.scale, scale_number) if scale else 1.0,
                patch_size,
            ),
            displacement=lerp(self.elastic_voxels, elastic_number) if deform else 0.0,
            grid_spacing=self.elastic_spacing,
            seed=augmentation_seed,
            flips=axes,
        )

    def _change_intensities(self, image: Tensor, seed: int) -> Tensor:
        """Change the intensities; each channel has its own strength."""
        rng = _make_generator(seed, 1)
        generator = torch.Generator(image.device)
        change: Callable[[Tensor, float], Tensor]
        for p, span, interpolate, change in (
            (self.noise_p, self.noise_std, lerp, partial(intensity.add_noise, generator=generator)),
            (self.blur_p, self.blur_sigma, lerp, intensity.blur),
            (self.brightness_p, self.brightness, lerp, intensity.scale_brightness),
            (self.contrast_p, self.contrast, lerp, intensity.scale_contrast),
            (self.low_resolution_p, self.low_resolution, lerp, intensity.simulate_low_resolution),
            (self.inverted_gamma_p, self.gamma, log_lerp, intensity.apply_inverted_gamma),
            (self.gamma_p, self.gamma, log_lerp, intensity.apply_gamma),
        ):
            number, *strengths = rng.random(1 + len(image)).tolist()
            if number < p:
                generator.manual_seed(seed ^ 1)  # not the seed of the elastic deformation
                pairs = zip(image, strengths, strict=True)
                image = torch.stack([change(c, interpolate(span, s)) for c, s in pairs])
        return image


def lerp(span: Sequence[float], weight: float) -> float:
    """Interpolate linearly between the ends of a range."""
    return span[0] + weight * (span[1] - span[0])


def log_lerp(span: Sequence[float], weight: float) -> float:
    """Interpolate in log space, so that doubling is as likely as halving.

    >>> log_lerp([0.5, 2], 0.5)
    1.0
    """
    return span[0] * (span[1] / span[0]) ** weight


def require(valid: bool, name: str, expected: str, value: Any) -> None:
    """Raise UsageError unless a value is valid."""
    if not valid:
        raise UsageError(f"augmentation.{name} must be {expected}, got {value!r}")


def _are_numbers(values: Any, count: int) -> bool:
    is_sequence = isinstance(values, Sequence) and len(values) == count
    return is_sequence and all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in values
    )


def _make_generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed + (stream << 64)))
