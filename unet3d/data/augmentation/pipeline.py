"""The random changes of training, for patches on any device."""

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
"""The least and the most that can be drawn."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How often (`..._p`: the share of samples) and how strongly patches are changed.

    What happens to a sample is drawn from its key alone: the batch around it, its place there and
    the process that does it do not matter. A sample for which nothing is drawn stays as it is, to
    the bit. nnU-Net's order: space, noise, blur, brightness, contrast, resolution, gamma.
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
                require(_all_numbers([value]) and 0 <= value <= 1, name, "within 0..1", value)
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            good = _all_numbers(value, 2) and least <= value[0] <= value[1] <= most
            require(good, name, f"two numbers within {least:g}..{most:g}, the lower first", value)
        turns, axes, spacing = self.rotation_degrees, self.flip_axes, self.elastic_spacing
        good = _all_numbers(turns, 3) and all(0 <= t <= 180 for t in turns)
        require(good, "rotation_degrees", "three numbers within 0..180", turns)
        good = isinstance(axes, Sequence) and all(axis in (0, 1, 2) for axis in axes)
        require(good, "flip_axes", "a list of axes out of 0, 1 and 2", axes)
        furthest = self.elastic_voxels[1]
        good = isinstance(spacing, int) and spacing >= max(1, 2.5 * furthest)
        unfolded = f"an int >= 2.5 * {furthest:g} voxels, else the image would be folded"
        require(good, "elastic_spacing", unfolded, spacing)

    def __call__(
        self,
        images: Sequence[Tensor],
        labels: Sequence[Tensor],
        keys: Sequence[int],
        patch_size: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """B of (C, *source) and (*source) -> (B, C, *patch) and (B, *patch).

        A source has a size that its `move` wants, or is larger.
        """
        changed = []
        for image, label, key in zip(images, labels, keys, strict=True):
            image, label = apply_transform(
                image, label, self.sample_transform(key, patch_size), patch_size
            )
            changed.append((self._shaded(image, key), label))
        return torch.stack([i for i, _ in changed]), torch.stack([n for _, n in changed])

    def sample_transform(self, key: int, patch_size: Sequence[int]) -> SpatialTransform:
        """Where the voxels of a sample's patch come from."""
        # Every number is drawn, used or not: what a probability is does not change the others'.
        turned, scaled, bent, *rest = _numbers(key, 0).random(11).tolist()
        size, bend, *rest = rest
        angles, flips = rest[:3], rest[3:]
        axes = [axis for axis in self.flip_axes if flips[axis] < self.flip_p]
        turned, scaled = turned < self.rotation_p, scaled < self.scale_p
        bent = bent < self.elastic_p
        if not (turned or scaled or bent):
            return SpatialTransform(flips=axes)
        most = [radians(t) if turned else 0.0 for t in self.rotation_degrees]
        return SpatialTransform(
            matrix=make_affine_matrix(
                [(2 * a - 1) * m for a, m in zip(angles, most, strict=True)],
                log_lerp(self.scale, size) if scaled else 1.0,
                patch_size,
            ),
            bend=lerp(self.elastic_voxels, bend) if bent else 0.0,
            bend_spacing=self.elastic_spacing,
            seed=key,
            flips=axes,
        )

    def _shaded(self, image: Tensor, key: int) -> Tensor:
        """The intensities changed; each channel as strongly as is drawn for it."""
        drawn = _numbers(key, 1)
        generator = torch.Generator(image.device)
        change: Callable[[Tensor, float], Tensor]
        for share, span, spread, change in (
            (self.noise_p, self.noise_std, lerp, partial(intensity.noise, generator=generator)),
            (self.blur_p, self.blur_sigma, lerp, intensity.blur),
            (self.brightness_p, self.brightness, lerp, intensity.brightness),
            (self.contrast_p, self.contrast, lerp, intensity.contrast),
            (self.low_resolution_p, self.low_resolution, lerp, intensity.low_resolution),
            (self.inverted_gamma_p, self.gamma, log_lerp, intensity.inverted_gamma),
            (self.gamma_p, self.gamma, log_lerp, intensity.gamma),
        ):
            happens, *strengths = drawn.random(1 + len(image)).tolist()
            if happens < share:
                generator.manual_seed(key ^ 1)  # not the seed of the elastic deformation
                pairs = zip(image, strengths, strict=True)
                image = torch.stack([change(channel, spread(span, s)) for channel, s in pairs])
        return image


def lerp(span: Sequence[float], share: float) -> float:
    """From the lower at 0 to the upper at 1."""
    return span[0] + share * (span[1] - span[0])


def log_lerp(span: Sequence[float], share: float) -> float:
    """The same, so that twice as large is as likely as half as large.

    >>> log_lerp([0.5, 2], 0.5)
    1.0
    """
    return span[0] * (span[1] / span[0]) ** share


def require(good: bool, name: str, what: str, value: Any) -> None:
    """Refuse a value in one line."""
    if not good:
        raise UsageError(f"augmentation.{name} must be {what}, got {value!r}")


def _all_numbers(values: Any, count: int = 1) -> bool:
    known = isinstance(values, Sequence) and len(values) == count
    return known and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _numbers(key: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key + (stream << 64)))
