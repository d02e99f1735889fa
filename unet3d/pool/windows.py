"""Describe pooling windows, view their elements by strides, and choose memory layouts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.errors import UsageError
from unet3d.types import Size, Triple


def to_triple(value: Size, name: str) -> Triple:
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

    size: Triple
    stride: Triple
    padding: Triple

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

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> "PoolWindows":
        """Return the windows of `numbers`, an argument of operators."""
        size, stride, padding = zip(*[iter(numbers)] * 3, strict=True)
        return cls(size, stride, padding)

    def __str__(self) -> str:
        return f"kernel_size={self.size}, stride={self.stride}, padding={self.padding}"

    @property
    def axes(self) -> tuple[Triple, Triple, Triple]:
        """Return (size, stride, padding), each per axis."""
        return self.size, self.stride, self.padding

    @property
    def numbers(self) -> list[int]:
        """Return size, stride and padding in one list, for operators."""
        return [*self.size, *self.stride, *self.padding]

    @property
    def elements(self) -> int:
        """Return K, the number of elements in a window."""
        return prod(self.size)

    def output_shape(self, shape: Sequence[int]) -> Triple:
        """Return (D, H, W) of the output for an input whose `shape` ends in (D, H, W)."""
        space = tuple(shape)[-3:]
        d, h, w = ((n + 2 * p - k) // s + 1 for n, k, s, p in zip(space, *self.axes, strict=True))
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

    def scatter_add(self, zeros: Tensor, parts: Iterable[Tensor]) -> Tensor:
        """Add K parts of the output's shape to their elements in an input of zeros.

        It is the transpose of `views`.
        """
        pd, ph, pw = self.padding
        d, h, w = zeros.shape[-3:]
        padded = F.pad(zeros, (pw, pw, ph, ph, pd, pd))
        views = PoolWindows(self.size, self.stride, (0, 0, 0)).views(padded, fill=0)
        for view, part in zip(views, parts, strict=True):
            view += part
        return padded[..., pd : pd + d, ph : ph + h, pw : pw + w]

    def valid_masks(self, x: Tensor) -> list[Tensor]:
        """Return, for each of the K elements, in which windows (D', H', W') it is not padding."""
        ones = torch.ones(x.shape[-3:], dtype=torch.bool, device=x.device)
        return list(self.views(ones, fill=False))


def is_channels_last(x: Tensor) -> bool:
    """Return whether x is channels-last and not also contiguous."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d)


def has_channels_last_strides(x: Tensor) -> bool:
    """Return whether x is channels-last, or a part of such a tensor, and not also contiguous."""
    return not x.is_contiguous() and x.shape[1] > 1 and x.stride(1) == 1


def get_memory_format(channels_last: bool) -> torch.memory_format:
    """Return torch's memory format for a layout."""
    return torch.channels_last_3d if channels_last else torch.contiguous_format
