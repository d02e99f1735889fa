"""Encode which elements a pooling layer selected from each window: all that backward needs.

The K elements of a window have indices 0 .. K-1 in order (D, H, W). A pooling layer selects one or
two of them, and the most compact possible code says which:

- MASK, K <= 8: one bit per element.
- INDEX: the index, for a pooling method that always selects one element.
- PAIR: indices that count only elements inside the volume. A window with an odd number of elements
  stores the one index; any other stores i < j as j (j - 1) / 2 + i, a byte for up to 23 elements.
- TWO: both indices, a byte each; the second bytes follow the first ones along the batch.
"""

from collections.abc import Sequence
from enum import IntEnum
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.pool.windows import PoolWindows, get_memory_format, is_channels_last


class IndexCode(IntEnum):
    """The encodings of selected indices, with the numbers of kernels/cpp/grid.h."""

    NONE = 0
    MASK = 1
    INDEX = 2
    PAIR = 3
    TWO = 4


class SelectedIndices(NamedTuple):
    """The indices of the lower and upper selected element per window; equal where it is one."""

    low: Tensor  # (B, C, D', H', W'), int16
    high: Tensor


def choose_code(pool: str, windows: PoolWindows) -> IndexCode:
    """Return the encoding of a pooling layer's selected indices; NONE if it does not select.

    >>> choose_code("median", PoolWindows.from_args(2, 2, 0)).name
    'MASK'
    >>> choose_code("median", PoolWindows.from_args((4, 4, 2), 4, 0)).name
    'TWO'
    """
    if pool not in ("max", "median"):
        return IndexCode.NONE
    if windows.elements <= 8:
        return IndexCode.MASK
    if pool == "max":
        return IndexCode.INDEX
    counts = (
        range(1 if p else k, k + 1) for k, p in zip(windows.size, windows.padding, strict=True)
    )
    largest = max((n for n in map(prod, product(*counts)) if n % 2 == 0), default=0)
    return IndexCode.PAIR if largest * (largest - 1) // 2 <= 256 else IndexCode.TWO


def allocate_outputs(x: Tensor, pool: str, windows: PoolWindows) -> tuple[Tensor, Tensor]:
    """Allocate a pooling layer's output and its codes, which are empty if it has none."""
    b, c = x.shape[:2]
    space = windows.output_shape(x.shape)
    format = get_memory_format(is_channels_last(x))
    copies = {IndexCode.NONE: 0, IndexCode.TWO: 2}.get(choose_code(pool, windows), 1)
    y = torch.empty((b, c, *space), dtype=x.dtype, device=x.device, memory_format=format)
    codes = torch.empty(
        (b * copies, c, *space), dtype=torch.uint8, device=x.device, memory_format=format
    )
    return y, codes


def encode(
    indices: SelectedIndices, code: IndexCode, windows: PoolWindows, shape: Sequence[int]
) -> Tensor:
    """Encode indices; `shape` is that of the layer's input."""
    low, high = indices
    if code == IndexCode.MASK:
        one = torch.ones((), dtype=torch.int16, device=low.device)
        return (one << low | one << high).to(torch.uint8)
    if code == IndexCode.INDEX:
        return low.to(torch.uint8)
    if code == IndexCode.TWO:
        return torch.cat([low, high]).to(torch.uint8)
    box = _Box(windows, shape, low.device)
    a, b = box.to_local(low), box.to_local(high)
    small, large = torch.minimum(a, b), torch.maximum(a, b)
    return torch.where(box.elements % 2 == 1, a, large * (large - 1) // 2 + small).to(torch.uint8)


def decode(
    codes: Tensor, code: IndexCode, windows: PoolWindows, shape: Sequence[int]
) -> SelectedIndices:
    """Decode the result of `encode`."""
    if code == IndexCode.TWO:
        low, high = codes.to(torch.int16).chunk(2)
        return SelectedIndices(low, high)
    number = codes.to(torch.int16)
    if code == IndexCode.INDEX:
        return SelectedIndices(number, number)
    if code == IndexCode.MASK:
        low, high = torch.full_like(number, -1), torch.zeros_like(number)
        for index in range(windows.elements):
            selected = (number >> index & 1).bool()
            low = torch.where(selected & (low < 0), index, low)
            high = torch.where(selected, index, high)
        return SelectedIndices(low, high)
    box = _Box(windows, shape, codes.device)
    large = ((1 + (1 + 8 * number.float()).sqrt()) / 2).to(torch.int16)
    single = box.elements % 2 == 1
    high = torch.where(single, number, large)
    low = torch.where(single, number, number - large * (large - 1) // 2)
    return SelectedIndices(box.to_global(low), box.to_global(high))


class _Box:
    """The part of each window inside the volume: its first position and length per axis."""

    def __init__(self, windows: PoolWindows, shape: Sequence[int], device: torch.device):
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

    def to_local(self, index: Tensor) -> Tensor:
        _, height, width = self.size
        d, h, w = index // (height * width), index // width % height, index % width
        (d0, h0, w0), (_, rows, columns) = self.first, self.count
        return ((d - d0) * rows + h - h0) * columns + w - w0

    def to_global(self, local: Tensor) -> Tensor:
        _, height, width = self.size
        (d0, h0, w0), (_, rows, columns) = self.first, self.count
        d, h, w = local // (rows * columns), local // columns % rows, local % columns
        return ((d + d0) * height + h + h0) * width + w + w0
