"""Upsample a coarser map row by row, and accumulate the gradient row by row."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.model.blocks import Interpolate
from unet3d.model.fused.convolution import cast_bias, cast_weight
from unet3d.model.fused.feature_maps import LazyActivation
from unet3d.model.fused.ops.upsample_ops import interpolate, interpolate_gradient
from unet3d.model.fused.tiling import MapLayout

aten = torch.ops.aten


class UpsampledMap:
    """The upsampling of a coarser map, zero-padded to the finer level's size."""

    def __init__(self, module: nn.Module, low: LazyActivation, layout: MapLayout):
        self.module, self.low, self.layout = module, low, layout
        self.method: Any = (
            _Interpolation(module) if isinstance(module, Interpolate) else _TransposedConv(module)
        )
        self.channels = self.method.channels or low.channels
        self.size = [n * w for n, w in zip(low.layout.size, self.method.scale_factor, strict=True)]
        self.width = 0  # rows that are upsampled are few
        self.offset = [(n - m) // 2 for n, m in zip(layout.size, self.size, strict=True)]

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        """Write rows [start, stop) to `out`."""
        self._zero_padding(out, start, stop)
        part = self._strip_padding(out, start, stop)
        if part is not None:
            self.method.fill(self.low.rows(*part.low), part)

    def gradient(self, g: Tensor, start: int, stop: int, low: Tensor) -> Tensor:
        """Add the coarser map's gradient, given `g` of rows [start, stop), to `low`; return g."""
        part = self._strip_padding(g, start, stop)
        if part is not None:
            out = self.low.layout.narrow_rows(low, *part.low)
            self.method.gradient(self.low, part, out)
        return g

    def _zero_padding(self, rows: Tensor, start: int, stop: int) -> None:
        """Write zeros to the part of these rows that is padding."""
        for n, (offset, size) in enumerate(zip(self.offset, self.size, strict=True)):
            first, last = (start, stop) if n + 2 == self.layout.axis else (0, self.layout.size[n])
            begin = min(max(offset, first), last)
            end = min(max(offset + size, first), last)
            for low, high in ((first, begin), (end, last)):
                if low < high:
                    rows.narrow(n + 2, low - first, high - low).zero_()

    def _strip_padding(self, rows: Tensor, start: int, stop: int) -> "_Part | None":
        """Return the part of these rows that is not padding; None: all of it is."""
        axis = self.layout.axis - 2
        first = max(start - self.offset[axis], 0)
        last = min(stop - self.offset[axis], self.size[axis])
        if last <= first:
            return None
        for n, (offset, size) in enumerate(zip(self.offset, self.size, strict=True)):
            if n == axis:
                rows = rows.narrow(n + 2, first + offset - start, last - first)
            else:
                rows = rows.narrow(n + 2, offset, size)
        size, low_size = self.size[axis], self.low.layout.size[axis]
        low = self.method.source_rows(first, last, size, low_size)
        return _Part(rows, first, last, low, size, low_size, self.layout.axis)


@dataclass(frozen=True)
class _Part:
    """Rows [first, last) of an upsampled map, and the coarser rows that they are computed from."""

    rows: Tensor
    first: int
    last: int
    low: tuple[int, int]
    size: int  # of the whole upsampled map, along the axis
    low_size: int
    axis: int

    def axes(self, low: Tensor) -> list[int]:
        """Return the `axes` of upsample_ops: only the tiled axis does not start at 0."""
        numbers = []
        for axis in (2, 3, 4):
            if axis == self.axis:
                numbers += [self.first, self.size, self.low[0], self.low_size]
            else:
                numbers += [0, self.rows.shape[axis], 0, low.shape[axis]]
        return numbers


class _Interpolation:
    """Trilinear interpolation with aligned corners, or nearest-neighbor."""

    channels = None

    def __init__(self, module: Interpolate):
        self.scale_factor, self.linear = module.scale_factor, module.mode == "trilinear"
        self.gradients: list[Tensor] = []  # no parameters

    def source_rows(self, first: int, last: int, size: int, low_size: int) -> tuple[int, int]:
        """Return the range of coarser rows that rows [first, last) are computed from."""
        if not self.linear:
            return first * low_size // size, (last - 1) * low_size // size + 1
        # In integers, as in the kernels: a rounded product may be one row off.
        a, b = (n * (low_size - 1) // max(1, size - 1) for n in (first, last - 1))
        return a, min(b + 2, low_size)

    def fill(self, low: Tensor, part: _Part) -> None:
        interpolate(low, part.axes(low), self.linear, part.rows)

    def gradient(self, low: LazyActivation, part: _Part, out: Tensor) -> None:
        interpolate_gradient(part.rows, part.axes(out), self.linear, out)


class _TransposedConv:
    """A transposed convolution with stride equal to its kernel size."""

    def __init__(self, module: nn.Module):
        assert isinstance(module, nn.ConvTranspose3d)
        self.module, self.scale_factor = module, module.stride
        self.channels = module.out_channels
        self.gradients: list[Tensor] = []  # of weight and bias

    def source_rows(self, first: int, last: int, size: int, low_size: int) -> tuple[int, int]:
        """Return the range of coarser rows that rows [first, last) are computed from."""
        factor = size // low_size
        return first // factor, -(-last // factor)

    def fill(self, low: Tensor, part: _Part) -> None:
        weight, bias = cast_weight(self.module, low.dtype), cast_bias(self.module, low.dtype)
        up = F.conv_transpose3d(low, weight, bias, stride=self.scale_factor)
        start = part.first - part.low[0] * (part.size // part.low_size)
        part.rows.copy_(up.narrow(part.axis, start, part.last - part.first))

    def gradient(self, low: LazyActivation, part: _Part, out: Tensor) -> None:
        x = low.rows(*part.low)
        weight, bias = cast_weight(self.module, x.dtype), self.module.bias
        factor = part.size // part.low_size
        before = part.first - part.low[0] * factor
        after = part.low[1] * factor - part.last
        padding = [0] * 6
        padding[2 * (4 - part.axis) : 2 * (4 - part.axis) + 2] = [before, after]
        g = F.pad(part.rows, padding) if before or after else part.rows.contiguous()
        sizes = None if bias is None else [bias.numel()]
        to_low, *gradients = aten.convolution_backward(
            g, x, weight, sizes, self.scale_factor, [0] * 3, [1] * 3, True, [0] * 3, 1,
            [True, True, bias is not None],
        )  # fmt: skip
        out += to_low
        dtype = torch.promote_types(x.dtype, torch.float32)
        gradients = [t.to(dtype) for t in gradients if t is not None]
        if self.gradients:
            gradients = [a + b for a, b in zip(self.gradients, gradients, strict=True)]
        self.gradients = gradients
