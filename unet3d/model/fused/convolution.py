"""Run convolutions tile by tile on feature maps that need not be in memory."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from unet3d.model.blocks import crop_to_multiple
from unet3d.model.fused import onednn
from unet3d.model.fused.norms import Moments
from unet3d.model.fused.tiling import MIN_ROWS, MapLayout


class FeatureMapSource(Protocol):
    """A map that a convolution reads."""

    channels: int
    layout: MapLayout

    @property
    def width(self) -> int:
        """Return the number of channels in memory at a time for a row that is read."""
        ...

    def fill(self, out: Tensor, start: int, stop: int) -> Tensor | None:
        """Write rows [start, stop) to `out`; return the raw rows that they come from, if any."""
        ...


def cast_weight(module: nn.Conv3d | nn.ConvTranspose3d, dtype: torch.dtype) -> Tensor:
    """Return the weight in the dtype of the step, channels-last as maps are."""
    return module.weight.detach().to(dtype=dtype, memory_format=torch.channels_last_3d)


def cast_bias(module: nn.Conv3d | nn.ConvTranspose3d, dtype: torch.dtype) -> Tensor | None:
    """Return the bias in the dtype of the step, if there is one."""
    return None if module.bias is None else module.bias.detach().to(dtype)


def convolve(
    x: Tensor, weight: Tensor, padding: Sequence[int], stride: Sequence[int] = (1, 1, 1)
) -> Tensor:
    """Convolve and return channels-last, which some of torch's kernels for small inputs do not."""
    y = onednn.convolve(x, weight, padding, stride)
    return y.contiguous(memory_format=torch.channels_last_3d)


class Convolution:
    """A convolution of the concatenation of its sources, without its bias.

    The norm that follows knows the bias: no map needs a pass that adds it. With a stride, rows
    beyond a multiple of it are not read.
    """

    def __init__(self, module: nn.Conv3d, sources: Sequence[FeatureMapSource]):
        self.module, self.sources, self.source_layout = module, list(sources), sources[0].layout
        self.stride = tuple(module.stride)
        self.is_strided = max(self.stride) > 1
        self.layout = self.source_layout.shrink(self.stride)
        self.halo = module.kernel_size[self.layout.axis - 2] // 2
        self.step = self.stride[self.layout.axis - 2]
        self.copies = 3 if self.is_strided else 1
        """Inputs and outputs in memory at a time: those of other convolutions, and gradients."""
        self.on_input: Callable[[Tensor, int, int], None] | None = None
        """Called in `forward` with the input of rows [start, stop), without the halo."""
        self.add_gradient: Callable[[Tensor, int, int], Tensor] | None = None
        """In backward of a strided convolution: the gradient of that input by another path."""

    def weight(self) -> Tensor:
        """Return the weight in the dtype of the step."""
        return cast_weight(self.module, self.layout.dtype)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of tiles sized for all that a row of output needs in memory.

        A strided convolution has at least three, unless it is small: its input is the larger map,
        next to which backward holds the gradients of all coarser levels' weights.
        """
        layout, min_rows = self.layout, max(MIN_ROWS, 2 * self.halo)
        nbytes = layout.get_row_bytes(self.width) * layout.rows
        if not self.is_strided or nbytes < layout.tile_bytes // 4:
            return layout.tiles(self.width, min_rows=min_rows)
        third = max(1, layout.rows // 3)
        return layout.tiles(self.width, min_rows=min(min_rows // 2, third), max_rows=third)

    @property
    def width(self) -> int:
        """Return the largest number of channels in memory at a time for a row of output."""
        inputs = prod(self.stride) * self.module.in_channels
        others = [prod(self.stride) * source.width for source in self.sources]
        return self.copies * max(inputs + self.module.out_channels, *others)

    def source_rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of source rows, halo included, from which [start, stop) is computed.

        It may reach beyond the map, where the source counts as zero.
        """
        if start == 0 and stop == self.layout.rows:
            return 0, self.step * stop
        last = max(self.step * (stop - 1) + self.halo + 1, self.step * stop)
        return self.step * start - self.halo, last

    def input(self, start: int, stop: int) -> tuple[Tensor, list[int], Tensor | None]:
        """Read the input of rows [start, stop) with its halo.

        Return it with the padding that the convolution still has to add, and the raw rows of the
        last source, if any.
        """
        layout = self.source_layout
        padding = [k // 2 for k in self.module.kernel_size]
        if start != 0 or stop != self.layout.rows:
            padding[layout.axis - 2] = 0
        begin, end = self.source_rows(start, stop)
        first, last = max(begin, 0), min(end, self.step * self.layout.rows)
        x = layout.empty(self.module.in_channels, end - begin)
        before, after = first - begin, end - last
        if before:
            layout.narrow_rows(x, 0, before).zero_()
        if after:
            layout.narrow_rows(x, end - begin - after, end - begin).zero_()
        inside, channel, raw = layout.narrow_rows(x, before, before + last - first), 0, None
        for source in self.sources:
            part = inside if len(self.sources) == 1 else inside.narrow(1, channel, source.channels)
            raw = source.fill(part, first, last)
            channel += source.channels
        return self._crop(x), padding, raw

    def take_windows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the part of the input of rows [start, stop) that a pooling reads, as a view."""
        begin, _ = self.source_rows(start, stop)
        return x.narrow(self.layout.axis, self.step * start - begin, self.step * (stop - start))

    def rows(self, start: int, stop: int, weight: Tensor) -> Tensor:
        """Return rows [start, stop) of the output."""
        x, padding, _ = self.input(start, stop)
        return convolve(x, weight, padding, self.stride)

    def forward(self, *, store: bool, moments: Moments | None) -> Tensor | None:
        """Convolve tile by tile; return the output if `store`, and add its tiles to `moments`."""
        weight, output = self.weight(), None
        for start, stop in self.tiles():
            x, padding, raw = self.input(start, stop)
            if self.on_input is not None:
                self.on_input(self.take_windows(x, start, stop), start, stop)
            rows = convolve(x, weight, padding, self.stride)
            del x, raw
            if moments is not None:
                moments.add(rows)
            if store and stop - start == self.layout.rows:
                return rows
            if store:
                output = self.layout.empty(rows.shape[1]) if output is None else output
                self.layout.narrow_rows(output, start, stop).copy_(rows)
            del rows
        return output

    def _crop(self, x: Tensor) -> Tensor:
        """Return x without the columns beyond a multiple of the stride; its rows are cropped."""
        stride = list(self.stride)
        stride[self.layout.axis - 2] = 1
        return crop_to_multiple(x, stride)
