"""Change the intensities of a channel (D, H, W) by a given strength."""

from math import ceil, exp

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.data.augmentation.spatial import get_thin_axes

EPSILON = 1e-7  # prevents a division by 0 for constant patches


def add_noise(channel: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise."""
    sample = torch.randn(channel.shape, generator=generator, device=channel.device)
    return channel + std * sample


def blur(channel: Tensor, sigma: float) -> Tensor:
    """Blur with a Gaussian of `sigma` voxels; edges are replicated."""
    radius = ceil(3 * sigma)
    weights = [exp(-0.5 * (n / sigma) ** 2) for n in range(-radius, radius + 1)]
    for axis in range(3):
        size = channel.shape[axis]
        padding = [0, 0, 0, 0, 0, 0]
        padding[4 - 2 * axis : 6 - 2 * axis] = radius, radius  # F.pad counts axes from the last
        padded = F.pad(channel[None, None], padding, mode="replicate")[0, 0]
        channel = torch.zeros_like(channel)
        for n, weight in enumerate(weights):
            channel.add_(padded.narrow(axis, n, size), alpha=weight / sum(weights))
    return channel


def scale_contrast(channel: Tensor, factor: float) -> Tensor:
    """Multiply the distances from the patch's mean; clamp to the original range."""
    mean, (low, high) = channel.mean(), torch.aminmax(channel)
    return ((channel - mean) * factor + mean).clamp(low, high)


def simulate_low_resolution(channel: Tensor, zoom: float) -> Tensor:
    """Downsample by `zoom` along each axis that is not thin, and upsample again."""
    shape = channel.shape
    low_shape = [
        n if is_thin else max(1, round(n * zoom))
        for n, is_thin in zip(shape, get_thin_axes(shape), strict=True)
    ]
    for size in (low_shape, shape):  # linear both ways: nearest neighbor would shift the image
        channel = F.interpolate(channel[None, None], size=size, mode="trilinear")[0, 0]
    return channel


def apply_gamma(channel: Tensor, power: float) -> Tensor:
    """Raise intensities, scaled to 0..1, to a power; mean and standard deviation are kept."""
    mean, std = channel.mean(), channel.std(correction=0)
    low, high = torch.aminmax(channel)
    curved = ((channel - low) / (high - low + EPSILON)).pow(power)
    return (curved - curved.mean()) / (curved.std(correction=0) + EPSILON) * std + mean
