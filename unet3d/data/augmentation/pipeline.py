"""Augment patches at random, on any device.

MONAI's random transforms draw from generators that go on from sample to sample, so a resumed run
could not make the sample again at which it was stopped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import radians
from typing import Annotated, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from unet3d.config.fields import BOOL, OptionType, integer, list_of, number
from unet3d.data.augmentation.transforms import (
    SpatialTransform,
    add_noise,
    apply_gamma,
    apply_inverted_gamma,
    apply_transform,
    blur,
    make_affine_matrix,
    scale_contrast,
    simulate_low_resolution,
)
from unet3d.errors import UsageError

Probability = Annotated[float, number(">= 0", "<= 1")]
Angles = list_of(number(">= 0", "<= 180"), "three numbers within 0..180", length=3)
Axes = OptionType(
    "a list of axes 0, 1 and 2",
    lambda value: isinstance(value, list) and all(axis in (0, 1, 2) for axis in value),
)
Range = Sequence[float]


def within(low: float, high: float) -> OptionType:
    """Return ranges: two numbers within bounds, the lower first."""
    words = f"two numbers within {low:g}..{high:g}, the lower first"
    pair = list_of(number(f">= {low}", f"<= {high}"), words, length=2)
    return OptionType(words, lambda value: pair.accepts(value) and value[0] <= value[1])


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Change patches with given probabilities (`..._p`) and strengths.

    The changes of a sample depend only on its seed, not on its batch or process. A sample for
    which none is drawn stays identical to the bit. The order is nnU-Net's: spatial, noise, blur,
    brightness, contrast, resolution, gamma.
    """

    rotation_p: Probability = 0.0
    rotation_degrees: Annotated[Sequence[float], Angles] = (30.0, 30.0, 30.0)
    scale_p: Probability = 0.0
    scale: Annotated[Range, within(0.1, 10)] = (0.7, 1.4)
    elastic_p: Probability = 0.0
    elastic_voxels: Annotated[Range, within(0, 1e3)] = (0.0, 6.0)
    elastic_spacing: Annotated[int, integer(">= 1")] = 16
    flip_p: Probability = 0.0
    flip_axes: Annotated[Sequence[int], Axes] = (0, 1, 2)
    noise_p: Probability = 0.0
    noise_std: Annotated[Range, within(0, 1e6)] = (0.0, 0.1)
    blur_p: Probability = 0.0
    blur_sigma: Annotated[Range, within(0.01, 100)] = (0.5, 1.0)
    brightness_p: Probability = 0.0
    brightness: Annotated[Range, within(0, 1e3)] = (0.75, 1.25)
    contrast_p: Probability = 0.0
    contrast: Annotated[Range, within(0, 1e3)] = (0.75, 1.25)
    low_resolution_p: Probability = 0.0
    low_resolution: Annotated[Range, within(0.01, 1)] = (0.5, 1.0)
    gamma_p: Probability = 0.0
    inverted_gamma_p: Probability = 0.0
    gamma: Annotated[Range, within(0.01, 100)] = (0.7, 1.5)
    keep_zeros: Annotated[bool, BOOL] = False

    def __post_init__(self):
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            plain = list(value) if isinstance(value, Sequence) else value
            for kind in get_args(hint):  # a user's own field may have none
                if isinstance(kind, OptionType):
                    kind.parse(plain, f"augmentation.{name}")
        if self.elastic_spacing < 2.5 * self.elastic_voxels[1]:
            raise UsageError(
                f"augmentation.elastic_spacing must be >= 2.5 * {self.elastic_voxels[1]:g} voxels, "
                f"so that the image is not folded, got {self.elastic_spacing}"
            )

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
            changed = self._change_intensities(image, seed)
            patches.append((changed.where(image != 0, 0) if self.keep_zeros else changed, label))
        return torch.stack([i for i, _ in patches]), torch.stack([n for _, n in patches])

    def sample_transform(
        self, augmentation_seed: int, patch_size: Sequence[int]
    ) -> SpatialTransform:
        # All numbers are drawn, used or not, so that one probability does not affect other changes.
        numbers = _make_generator(augmentation_seed, 0).random(11).tolist()
        rotate, scale, deform = np.less(
            numbers[:3], (self.rotation_p, self.scale_p, self.elastic_p)
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
        """Change the intensities; each channel has its own strength.

        As in nnU-Net, blur and low resolution change a channel with half of the probability.
        """
        rng = _make_generator(seed, 1)
        generator = torch.Generator(image.device)
        change: Callable[[Tensor, float], Tensor]
        for p, channel_p, span, interpolate, change in (
            (self.noise_p, 1, self.noise_std, lerp, partial(add_noise, generator=generator)),
            (self.blur_p, 0.5, self.blur_sigma, lerp, blur),
            (self.brightness_p, 1, self.brightness, lerp, torch.mul),
            (self.contrast_p, 1, self.contrast, lerp, scale_contrast),
            (self.low_resolution_p, 0.5, self.low_resolution, lerp, simulate_low_resolution),
            (self.inverted_gamma_p, 1, self.gamma, log_lerp, apply_inverted_gamma),
            (self.gamma_p, 1, self.gamma, log_lerp, apply_gamma),
        ):
            number, *numbers = rng.random(1 + len(image)).tolist()
            if number < p:
                generator.manual_seed(seed ^ 1)  # not the seed of the elastic deformation
                channels = list(image)
                for c, value in enumerate(numbers):
                    if value < channel_p:
                        strength = interpolate(span, value / channel_p)
                        channels[c] = change(channels[c], strength)
                image = torch.stack(channels)
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


def _make_generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed + (stream << 64)))
