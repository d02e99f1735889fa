"""A 3D U-Net as most people write it: the reference for parity tests and the memory baseline.

It wastes memory on purpose: it always pads, keeps the inputs of concatenations alive and stores
what autograd stores for plain modules. Do not optimize it.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DoubleConv(nn.Module):
    """Apply (convolution, batch norm, ReLU) twice."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(in_channels, out_channels, kernel_size=3, padding=1),
            nn.BatchNorm3d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv3d(out_channels, out_channels, kernel_size=3, padding=1),
            nn.BatchNorm3d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Down(nn.Module):
    """Halve the size, then apply two convolutions."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.pool = nn.MaxPool3d(2)
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.pool(x))


class Up(nn.Module):
    """Double the size, pad to the skip's size, concatenate, and apply two convolutions."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True)
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.up(x)
        dd, dh, dw = (skip.shape[i] - x.shape[i] for i in (2, 3, 4))
        x = F.pad(x, [dw // 2, dw - dw // 2, dh // 2, dh - dh // 2, dd // 2, dd - dd // 2])
        joined = torch.cat([skip, x], dim=1)
        return self.conv(joined)


class PlainUNet3D(nn.Module):
    """A U-Net with `encoder` channels from full resolution down and `decoder` channels back up."""

    def __init__(
        self, *, in_channels: int, num_classes: int, encoder: Sequence[int], decoder: Sequence[int]
    ):
        super().__init__()
        self.first = DoubleConv(in_channels, encoder[0])
        self.downs = nn.ModuleList(Down(i, o) for i, o in pairwise(encoder))
        skips = list(reversed(encoder[:-1]))
        below = [encoder[-1], *decoder[:-1]]
        self.ups = nn.ModuleList(
            Up(b + s, o) for b, s, o in zip(below, skips, decoder, strict=True)
        )
        self.last = nn.Conv3d(decoder[-1], num_classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, K, D, H, W)."""
        features = [self.first(x)]
        for down in self.downs:
            features.append(down(features[-1]))
        x = features[-1]
        for up, skip in zip(self.ups, reversed(features[:-1]), strict=True):
            x = up(x, skip)
        return self.last(x)

    def blocks(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield (level, block) in forward order; level 0 is full resolution."""
        yield 0, self.first
        yield from enumerate(self.downs, start=1)
        for n, up in enumerate(self.ups):
            yield len(self.ups) - 1 - n, up
