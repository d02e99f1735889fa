"""Twins in plain torch: a U-Net with the names of unet3d's weights, and Dice + cross-entropy."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm3d,
    "instance": lambda channels: nn.InstanceNorm3d(channels, affine=True),
    "group": lambda channels: nn.GroupNorm(min(channels, 8), channels),
}


class Layer(nn.Module):
    """Convolve, normalize, activate."""

    def __init__(self, i: int, o: int, norm: str, slope: float, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv3d(i, o, 3, stride, padding=1)
        self.norm = NORMS[norm](o)
        self.slope, self.stride = slope, stride

    def forward(self, x: Tensor) -> Tensor:
        d, h, w = (n // self.stride * self.stride for n in x.shape[2:])
        return F.leaky_relu(self.norm(self.conv(x[:, :, :d, :h, :w])), self.slope)


class Level(nn.Module):
    """Two layers."""

    def __init__(self, channels: list[int], norm: str, slope: float, stride: int = 1):
        super().__init__()
        self.convs = nn.Sequential(
            *(
                Layer(i, o, norm, slope, stride if n == 0 else 1)
                for n, (i, o) in enumerate(pairwise(channels))
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.convs(x)


class PlainUNet(nn.Module):
    """Pool, or stride where there is no pooling; upsample trilinearly."""

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        widths: list[int],
        norm: str = "batch",
        slope: float = 0.0,
        pool: Callable[[Tensor], Tensor] | None = None,
    ):
        super().__init__()
        self.pool = pool
        options = (norm, slope)
        self.encoder = nn.ModuleList()
        previous = in_channels
        for level, width in enumerate(widths):
            stride = 2 if level and pool is None else 1
            self.encoder.append(Level([previous, width, width], *options, stride))
            previous = width
        self.decoder = nn.ModuleList()
        for fine, coarse in reversed(list(pairwise(widths))):
            self.decoder.append(Level([fine + coarse, fine, fine], *options))
        self.heads = nn.ModuleList([nn.Conv3d(widths[0], num_classes, 1)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for n, level in enumerate(self.encoder):
            if n and self.pool is not None:
                x = self.pool(x)
            x = level(x)
            skips.append(x)
        skips.pop()
        for level in self.decoder:
            skip = skips.pop()
            x = F.interpolate(x, scale_factor=2.0, mode="trilinear", align_corners=True)
            missing = [n - m for n, m in zip(skip.shape[2:], x.shape[2:], strict=True)]
            x = F.pad(x, [side for m in reversed(missing) for side in (m // 2, m - m // 2)])
            x = level(torch.cat([skip, x], dim=1))
        return self.heads[0](x)


def dice_ce(
    logits: Tensor, labels: Tensor, ignored: int | None = None, *, batch: bool = True
) -> Tensor:
    """Return 1 - the mean soft Dice of the foreground classes + the mean cross-entropy."""
    labels = labels.long()
    counted = torch.ones_like(labels, dtype=torch.bool) if ignored is None else labels != ignored
    known = labels.where(counted, 0)
    one_hot = F.one_hot(known, logits.shape[1]).movedim(-1, 1) * counted[:, None]
    predicted = logits.softmax(1) * counted[:, None]
    axes = (0, 2, 3, 4) if batch else (2, 3, 4)
    overlap = (predicted * one_hot).sum(axes)
    size = predicted.sum(axes) + one_hot.sum(axes)
    dice = (2 * overlap + 1e-5) / (size + 1e-5)
    entropy = -(logits.log_softmax(1) * one_hot).sum(1)
    return 1 - dice[..., 1:].mean() + entropy.sum() / counted.sum()
