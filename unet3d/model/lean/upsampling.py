"""A coarser map seen at a finer level: rows on demand, and their gradient straight back."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.model.blocks import Interpolate
from unet3d.model.lean.feature_maps import LazyActivation, cast_weights
from unet3d.model.lean.ops.upsample_ops import interpolate, interpolate_gradient
from unet3d.model.lean.tiling import MapLayout

aten = torch.ops.aten


class Upsampled:
    """What the module makes of a coarser map, between zeros where the finer level is larger."""

    def __init__(self, module: nn.Module, low: LazyActivation, space: MapLayout):
        self.module, self.low, self.space = module, low, space
        self.way: Any = (
            _Interpolated(module) if isinstance(module, Interpolate) else _Transposed(module)
        )
        self.channels = self.way.channels or low.channels
        self.size = [n * w for n, w in zip(low.space.size, self.way.window, strict=True)]
        self.offset = [(n - m) // 2 for n, m in zip(space.size, self.size, strict=True)]

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        """Write rows [start, stop)."""
        if self.size != list(self.space.size):
            out.zero_()
        part = self._part(out, start, stop)
        if part is not None:
            self.way.fill(self.low.rows(*part.low), part)

    def gradient(self, g: Tensor, start: int, stop: int, low: Tensor) -> None:
        """Add to `low` what the gradient of these rows means for the coarser map."""
        part = self._part(g, start, stop)
        if part is not None:
            into = self.low.space.narrow_rows(low, *part.low)
            self.way.gradient(self.low, part, into)

    def _part(self, rows: Tensor, start: int, stop: int) -> "_Part | None":
        """What of these rows is not padding."""
        axis = self.space.axis - 2
        first = max(start - self.offset[axis], 0)
        last = min(stop - self.offset[axis], self.size[axis])
        if last <= first:
            return None
        for n, (offset, size) in enumerate(zip(self.offset, self.size, strict=True)):
            if n == axis:
                rows = rows.narrow(n + 2, first + offset - start, last - first)
            else:
                rows = rows.narrow(n + 2, offset, size)
        size, low_size = self.size[axis], self.low.space.size[axis]
        low = self.way.reads(first, last, size, low_size)
        return _Part(rows, first, last, low, size, low_size, self.space.axis)


@dataclass(frozen=True)
class _Part:
    """Rows [first, last) of an upsampled map, and the coarser rows that they come from."""

    rows: Tensor
    first: int
    last: int
    low: tuple[int, int]
    size: int  # of the whole, along the axis
    low_size: int
    axis: int

    def axes(self, low: Tensor) -> list[int]:
        """As interpolation.py wants them: only the rows' axis does not begin at the beginning."""
        found = []
        for axis in (2, 3, 4):
            if axis == self.axis:
                found += [self.first, self.size, self.low[0], self.low_size]
            else:
                found += [0, self.rows.shape[axis], 0, low.shape[axis]]
        return found


class _Interpolated:
    """Trilinear with aligned corners, or nearest."""

    channels = None

    def __init__(self, module: Interpolate):
        self.window, self.linear = module.window, module.mode == "trilinear"
        self.gradients: list[Tensor] = []  # there is nothing to learn

    def reads(self, first: int, last: int, size: int, low_size: int) -> tuple[int, int]:
        """Which coarser rows these come from."""
        if not self.linear:
            return first * low_size // size, (last - 1) * low_size // size + 1
        reach = (low_size - 1) / max(1, size - 1)
        return int(first * reach), min(int((last - 1) * reach) + 2, low_size)

    def fill(self, low: Tensor, part: _Part) -> None:
        interpolate(low, part.axes(low), self.linear, part.rows)

    def gradient(self, low: LazyActivation, part: _Part, into: Tensor) -> None:
        interpolate_gradient(part.rows, part.axes(into), self.linear, into)


class _Transposed:
    """A transposed convolution whose windows do not overlap."""

    def __init__(self, module: nn.Module):
        assert isinstance(module, nn.ConvTranspose3d)
        self.module, self.window, self.channels = module, module.stride, module.out_channels
        self.gradients: list[Tensor] = []  # of weight and bias

    def reads(self, first: int, last: int, size: int, low_size: int) -> tuple[int, int]:
        """Which coarser rows these come from."""
        window = size // low_size
        return first // window, -(-last // window)

    def fill(self, low: Tensor, part: _Part) -> None:
        weight, bias = cast_weights(self.module, low.dtype)
        up = F.conv_transpose3d(low, weight, bias, stride=self.window)
        start = part.first - part.low[0] * (part.size // part.low_size)
        part.rows.copy_(up.narrow(part.axis, start, part.last - part.first))

    def gradient(self, low: LazyActivation, part: _Part, into: Tensor) -> None:
        x = low.rows(*part.low)
        weight, bias = cast_weights(self.module, x.dtype)
        window = part.size // part.low_size
        before = part.first - part.low[0] * window
        after = part.low[1] * window - part.last
        padding = [0] * 6
        padding[2 * (4 - part.axis) : 2 * (4 - part.axis) + 2] = [before, after]
        g = F.pad(part.rows, padding) if before or after else part.rows.contiguous()
        sizes = None if bias is None else [bias.numel()]
        to_low, *found = aten.convolution_backward(
            g, x, weight, sizes, self.window, [0] * 3, [1] * 3, True, [0] * 3, 1,
            [True, True, bias is not None],
        )  # fmt: skip
        into += to_low
        wide = torch.promote_types(x.dtype, torch.float32)
        found = [t.to(wide) for t in found if t is not None]
        self.gradients = (
            [a + b for a, b in zip(self.gradients, found, strict=True)] if self.gradients else found
        )
