"""Random changes of brightness and sharpness: (D, H, W) and a strength -> (D, H, W)."""

from math import ceil, exp

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.data.augmentation.spatial import thin_axes


def noise(channel: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Gaussian noise on every voxel."""
    drawn = torch.randn(channel.shape, generator=generator, device=channel.device)
    return channel + std * drawn


def blur(channel: Tensor, sigma: float) -> Tensor:
    """A gaussian of `sigma` voxels along each axis; edges are repeated outwards."""
    radius = ceil(3 * sigma)
    weights = [exp(-0.5 * (n / sigma) ** 2) for n in range(-radius, radius + 1)]
    for axis in range(3):
        size = channel.shape[axis]
        ends = [0, 0, 0, 0, 0, 0]
        ends[4 - 2 * axis : 6 - 2 * axis] = radius, radius  # F.pad counts axes from the last
        wide = F.pad(channel[None, None], ends, mode="replicate")[0, 0]
        channel = torch.zeros_like(channel)
        for n, weight in enumerate(weights):
            channel.add_(wide.narrow(axis, n, size), alpha=weight / sum(weights))
    return channel


def brightness(channel: Tensor, factor: float) -> Tensor:
    """Every intensity times the factor: 0 is the mean of a prepared volume."""
    return channel * factor


def contrast(channel: Tensor, factor: float) -> Tensor:
    """Distances from the patch's mean times the factor, within the range that there was."""
    mean, (least, most) = channel.mean(), torch.aminmax(channel)
    return ((channel - mean) * factor + mean).clamp(least, most)


def low_resolution(channel: Tensor, zoom: float) -> Tensor:
    """As if acquired with `zoom` times as many voxels along each axis that is not thin."""
    sides = channel.shape
    fewer = [
        n if flat else max(1, round(n * zoom))
        for n, flat in zip(sides, thin_axes(sides), strict=True)
    ]
    for size in (fewer, sides):  # linearly both ways: taking the nearest would shift the image
        channel = F.interpolate(channel[None, None], size=size, mode="trilinear")[0, 0]
    return channel


def gamma(channel: Tensor, power: float) -> Tensor:
    """Intensities within their range to a power; mean and deviation are kept."""
    mean, deviation = channel.mean(), channel.std(correction=0)
    least, most = torch.aminmax(channel)
    bent = ((channel - least) / (most - least + TINY)).pow(power)
    return (bent - bent.mean()) / (bent.std(correction=0) + TINY) * deviation + mean


def inverted_gamma(channel: Tensor, power: float) -> Tensor:
    """The same with bright and dark exchanged before and after."""
    return -gamma(-channel, power)


TINY = 1e-7
"""What keeps a constant patch from being divided by 0."""
