"""Describe pooling windows and view their elements by strides, without unfolding or copying."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.errors import UsageError
from unet3d.types import Size


def to_triple(value: Size, name: str) -> tuple[int, int, int]:
    """Expand an int for all axes, or check one int per axis.

    >>> to_triple(2, "kernel_size"), to_triple([1, 2, 2], "kernel_size")
    ((2, 2, 2), (1, 2, 2))
    """
    values = (value,) * 3 if isinstance(value, int) else tuple(value)
    if len(values) != 3 or not all(isinstance(v, int) for v in values):
        raise UsageError(f"{name} of a pooling layer must be an int or three ints, got {value!r}")
    return values


@dataclass(frozen=True)
class PoolWindows:
    """Kernel size, stride and padding of a pooling layer per axis (D, H, W)."""

    size: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]

    @classmethod
    def from_args(cls, kernel_size: Size, stride: Size | None, padding: Size) -> "PoolWindows":
        """Check and expand arguments as users give them to nn.MaxPool3d."""
        size = to_triple(kernel_size, "kernel_size")
        steps = size if stride is None else to_triple(stride, "stride")
        pads = to_triple(padding, "padding")
        if min(size) < 1 or min(steps) < 1 or min(pads) < 0:
            raise UsageError(
                "a pooling layer needs kernel_size >= 1, stride >= 1, padding >= 0, "
                f"got {size}, {steps}, {pads}"
            )
        if any(2 * p > k for p, k in zip(pads, size, strict=True)):
            raise UsageError(f"padding must be at most half of kernel_size, got {pads} for {size}")
        if prod(size) > 256:  # an index in a window must fit a byte
            raise UsageError(f"a pooling window may hold at most 256 elements, got {size}")
        return cls(size, steps, pads)

    def __str__(self) -> str:
        return f"kernel_size={self.size}, stride={self.stride}, padding={self.padding}"

    @property
    def axes(self) -> tuple[tuple[int, int, int], ...]:
        """Return (size, stride, padding), each per axis."""
        return self.size, self.stride, self.padding

    @property
    def elements(self) -> int:
        """Return K, the number of elements in a window."""
        return prod(self.size)

    def output_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return (D, H, W) of the output for an input whose `shape` ends in (D, H, W)."""
        space = tuple(shape)[-3:]
        d, h, w = (
            (n + 2 * p - k) // s + 1
            for n, k, s, p in zip(space, self.size, self.stride, self.padding, strict=True)
        )
        if min(d, h, w) < 1:
            raise UsageError(
                f"a pooling window of {self.size} is larger than the feature map {tuple(space)}: "
                "use larger patches (data.patch_size) or fewer levels (model.depth)"
            )
        return d, h, w

    def views(self, x: Tensor, fill: float) -> Iterator[Tensor]:
        """Yield K tensors shaped as the output: the k-th elements of windows, `fill` as padding."""
        out = self.output_shape(x.shape)
        if any(self.padding):
            pd, ph, pw = self.padding
            x = F.pad(x, (pw, pw, ph, ph, pd, pd), value=fill)
        for start in product(*(range(k) for k in self.size)):
            axes = zip(start, self.stride, out, strict=True)
            yield x[(..., *(slice(b, b + s * (n - 1) + 1, s) for b, s, n in axes))]

    def scatter_add(self, shape: Sequence[int], parts: Iterable[Tensor]) -> Tensor:
        """Add K parts of the output's shape to their elements: the transpose of `views`."""
        pd, ph, pw = self.padding
        *batch, d, h, w = shape
        padded = torch.empty(0)
        unpadded = PoolWindows(self.size, self.stride, (0, 0, 0))
        for i, part in enumerate(parts):
            if i == 0:
                padded = part.new_zeros(*batch, d + 2 * pd, h + 2 * ph, w + 2 * pw)
                views = list(unpadded.views(padded, fill=0))
            views[i] += part
        return padded[..., pd : pd + d, ph : ph + h, pw : pw + w]

    def valid_masks(self, x: Tensor) -> list[Tensor] | None:
        """Return, for each of the K elements, which windows have it inside; None: all of them."""
        if not any(self.padding):
            return None
        ones = torch.ones(x.shape[-3:], dtype=torch.bool, device=x.device)
        return list(self.views(ones, fill=False))
