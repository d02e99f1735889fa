"""Which elements of a window were taken, in a byte: all that backward needs to know.

Elements are numbered 0 .. K-1 in order (D, H, W): an element's place. A pooling that selects takes
one or two of them. A code says which, in the smallest of these ways that can:

- MASK, K <= 8: one bit for each place.
- PLACE: the place, where one element is taken whatever the window.
- PAIR: places among those elements alone that lie inside the volume. Windows with an odd number of
  them take one: its place. Others take i < j: j (j - 1) / 2 + i, a byte for up to 23 elements.
- TWO: both places, a byte each; the second bytes follow the first along the batch.
"""

from collections.abc import Sequence
from enum import IntEnum
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.pool.windows import Windows


class IndexCode(IntEnum):
    """How places are written down; the numbers are those of cpp/grid.h."""

    NONE = 0
    MASK = 1
    PLACE = 2
    PAIR = 3
    TWO = 4


class SelectedIndices(NamedTuple):
    """The lower and the upper element that each window takes; the same where it takes one."""

    low: Tensor  # (B, C, D', H', W'), int16
    high: Tensor


def choose_code(pool: str, windows: Windows) -> IndexCode:
    """How a pooling writes its places down.

    >>> [choose_code("median", Windows.from_args(*w)).name for w in [(2, 2, 0), (3, 2, 1), ((4, 4, 2), 4, 0)]]
    ['MASK', 'PAIR', 'TWO']
    """
    if pool not in ("max", "median"):
        return IndexCode.NONE
    if windows.elements <= 8:
        return IndexCode.MASK
    if pool == "max":
        return IndexCode.PLACE
    counts = (
        range(1 if p else k, k + 1) for k, p in zip(windows.size, windows.padding, strict=True)
    )
    largest = max((n for n in map(prod, product(*counts)) if n % 2 == 0), default=0)
    return IndexCode.PAIR if largest * (largest - 1) // 2 <= 256 else IndexCode.TWO


def encode(
    places: SelectedIndices, code: IndexCode, windows: Windows, shape: Sequence[int]
) -> Tensor:
    """Write places down; `shape` is the pooling's input's."""
    low, high = places
    if code == IndexCode.MASK:
        one = torch.ones((), dtype=torch.int16, device=low.device)
        return (one << low | one << high).to(torch.uint8)
    if code == IndexCode.PLACE:
        return low.to(torch.uint8)
    if code == IndexCode.TWO:
        return torch.cat([low, high]).to(torch.uint8)
    box = _Box(windows, shape, low.device)
    a, b = box.local(low), box.local(high)
    less, more = torch.minimum(a, b), torch.maximum(a, b)
    return torch.where(box.elements % 2 == 1, a, more * (more - 1) // 2 + less).to(torch.uint8)


def decode(
    recorded: Tensor, code: IndexCode, windows: Windows, shape: Sequence[int]
) -> SelectedIndices:
    """Read places back."""
    if code == IndexCode.TWO:
        low, high = recorded.to(torch.int16).chunk(2)
        return SelectedIndices(low, high)
    number = recorded.to(torch.int16)
    if code == IndexCode.PLACE:
        return SelectedIndices(number, number)
    if code == IndexCode.MASK:
        low, high = torch.full_like(number, -1), torch.zeros_like(number)
        for place in range(windows.elements):
            taken = (number >> place & 1).bool()
            low = torch.where(taken & (low < 0), place, low)
            high = torch.where(taken, place, high)
        return SelectedIndices(low, high)
    box = _Box(windows, shape, recorded.device)
    more = ((1 + (1 + 8 * number.float()).sqrt()) / 2).to(torch.int16)
    single = box.elements % 2 == 1
    high = torch.where(single, number, more)
    low = torch.where(single, number, number - more * (more - 1) // 2)
    return SelectedIndices(box.place(low), box.place(high))


class _Box:
    """The part of each window that lies inside the volume: per axis its first place and length."""

    def __init__(self, windows: Windows, shape: Sequence[int], device: torch.device):
        self.size = windows.size
        self.first, self.count = [], []
        axes = zip(shape[-3:], windows.output_shape(shape), *windows.axes, strict=True)
        for axis, (n, out, size, stride, padding) in enumerate(axes):
            start = torch.arange(out, device=device, dtype=torch.int16) * stride - padding
            first = (-start).clamp(min=0)
            count = (n - start).clamp(max=size) - first
            along = [-1 if a == axis else 1 for a in range(3)]
            self.first.append(first.view(along))
            self.count.append(count.view(along))
        self.elements = self.count[0] * self.count[1] * self.count[2]

    def local(self, place: Tensor) -> Tensor:
        _, height, width = self.size
        d, h, w = place // (height * width), place // width % height, place % width
        (d0, h0, w0), (_, rows, columns) = self.first, self.count
        return ((d - d0) * rows + h - h0) * columns + w - w0

    def place(self, local: Tensor) -> Tensor:
        _, height, width = self.size
        (d0, h0, w0), (_, rows, columns) = self.first, self.count
        d, h, w = local // (rows * columns), local // columns % rows, local % columns
        return ((d + d0) * height + h + h0) * width + w + w0
