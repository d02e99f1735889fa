"""Run convolutions and their backward tile by tile on feature maps that need not be in memory."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from torch import Tensor, nn

from unet3d.model.blocks import crop_to_multiple
from unet3d.model.fused.conv_ops import (
    cast_weight,
    compute_input_gradient,
    compute_weight_gradient,
    convolve,
)
from unet3d.model.fused.norms import FoldedNorm, Moments, NormGradient
from unet3d.model.fused.tiling import MIN_ROWS

GradientSink = Callable[[Tensor, int, int], Tensor]
"""Receives rows [start, stop) of a source's gradient; returns these rows of the whole gradient."""


class Convolution:
    """A convolution of the concatenation of its sources, without its bias.

    The norm that follows knows the bias: no map needs a pass that adds it. With a stride, rows
    beyond a multiple of it are not read.
    """

    def __init__(self, module: nn.Conv3d, sources: Sequence[Any], copies: int):
        self.module, self.sources, self.source_layout = module, list(sources), sources[0].layout
        self.parameter = module.weight  # backward must not read one that replaced it
        self.stride = tuple(module.stride)
        self.is_strided = max(self.stride) > 1
        self.layout = self.source_layout.shrink(self.stride)
        self.halo = module.kernel_size[self.layout.axis - 2] // 2
        self.step = self.stride[self.layout.axis - 2]
        self.copies = 3 if self.is_strided else copies
        """Inputs and outputs in memory at a time: those of other convolutions, and gradients."""
        self.add_gradient: GradientSink | None = None
        """In backward of a strided convolution: the gradient of that input by another path."""

    def weight(self) -> Tensor:
        """Return the weight in the dtype of the step."""
        return cast_weight(self.parameter, self.layout.dtype)

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
        stride = list(self.stride)
        stride[layout.axis - 2] = 1  # rows are cropped already
        if layout.is_whole and len(self.sources) == 1 and (begin, end) == (0, layout.rows):
            whole = self.sources[0].whole
            if whole is not None:
                return crop_to_multiple(whole, stride), padding, None
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
        return crop_to_multiple(x, stride), padding, raw

    def take_windows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the part of the input of rows [start, stop) that a pooling reads, as a view."""
        begin, _ = self.source_rows(start, stop)
        return x.narrow(self.layout.axis, self.step * start - begin, self.step * (stop - start))

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of the output."""
        weight = self.weight()
        x, padding, _ = self.input(start, stop)
        return convolve(x, weight, padding, self.stride)

    def forward(
        self,
        *,
        store: bool,
        moments: Moments | None,
        on_input: Callable[[Tensor, int, int], None] | None = None,
    ) -> Tensor | None:
        """Convolve tile by tile; return the output if `store`, and add its tiles to `moments`.

        `on_input` is called with the input of rows [start, stop), without the halo.
        """
        weight, output = self.weight(), None
        for start, stop in self.tiles():
            x, padding, raw = self.input(start, stop)
            if on_input is not None:
                on_input(self.take_windows(x, start, stop), start, stop)
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

    def backward(
        self,
        g: Tensor,
        sinks: Sequence[GradientSink | None],
        activation: NormGradient | None,
        previous: FoldedNorm | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the weight's gradient, and send rows of the input's gradient to the sinks.

        The input's gradient in rows [s, t) needs the output's in [s - halo, t + halo), so it
        follows one halo behind. Sinks may overwrite `g`: a copy of its last rows is held until
        then.

        With `activation`, `g` is the gradient of the activation, whose raw rows were not stored:
        they are recomputed here, and `g` first goes through activation and norm. With `previous`,
        the norm of the only source, the sums that its backward needs are computed here, from raw
        rows that are in memory anyway, and returned second.
        """
        layout, halo = self.layout, self.halo
        weight = transposed = None
        if activation is not None or not layout.is_whole:
            # With tiles in any case: in the order of allocations that GPUs have measured.
            weight = self.weight()
        if any(sink is not None for sink in sinks):
            transposed = cast_weight(self.parameter, layout.dtype, transpose=True).flip(2, 3, 4)
        weight_gradient = sums = halo_before = None
        done = 0
        for start, stop in self.tiles():
            x, padding, raw = self.input(start, stop)
            rows = layout.narrow_rows(g, start, stop)
            if activation is not None and weight is not None:
                y = convolve(x, weight, padding)
                activation.apply(rows, y, out=rows)
                del y
            if self.parameter.requires_grad:
                shape = self.parameter.shape
                part = compute_weight_gradient(rows, x, shape, padding, contiguous=layout.is_whole)
                weight_gradient = part if weight_gradient is None else weight_gradient.add_(part)
            del x, rows
            if transposed is None:
                continue
            end = stop if stop == layout.rows else stop - halo
            padded, padding = self._add_halo(g, done, end, halo_before)
            halo_before = (
                layout.narrow_rows(g, end - halo, end).clone() if end < layout.rows else None
            )
            to_input = convolve(padded, transposed, padding)
            del padded
            channel = 0
            for source, sink in zip(self.sources, sinks, strict=True):
                if sink is not None:
                    own = to_input
                    if len(sinks) > 1:
                        own = to_input.narrow(1, channel, source.channels)
                    whole = sink(own, done, end)
                    del own
                    if previous is not None and raw is not None:
                        first = max(start - halo, 0)
                        y = layout.narrow_rows(raw, done - first, end - first)
                        sums = previous.add_gradient_sums(whole, y, sums)
                        del y
                    del whole
                channel += source.channels
            del raw
            done = end
            del to_input
        return weight_gradient, sums

    def backward_strided(self, g: Tensor, sink: GradientSink | None) -> Tensor | None:
        """Return the weight's gradient, and send rows of the input's gradient to the sink.

        Tiles overlap: the sink has to add them up.
        """
        weight, total = self.weight(), None
        for start, stop in self.tiles():
            x, padding = self.input(start, stop)[:2]
            rows = self.layout.narrow_rows(g, start, stop)
            if self.parameter.requires_grad:
                part = compute_weight_gradient(
                    *(rows, x, weight.shape, padding, self.stride),
                    contiguous=self.layout.is_whole,
                )
                total = part if total is None else total.add_(part)
            part, shape = None, x.shape
            if self.add_gradient is not None:
                part = self.add_gradient(self.take_windows(x, start, stop), start, stop)
            del x
            if sink is None:
                continue
            to_input = compute_input_gradient(rows, shape, weight, padding, self.stride)
            if part is not None:
                self.take_windows(to_input, start, stop).add_(part)
                del part
            begin, end = self.source_rows(start, stop)
            first, last = max(begin, 0), min(end, self.step * self.layout.rows)
            sink(to_input.narrow(self.layout.axis, first - begin, last - first), first, last)
            del to_input
        return total

    def _add_halo(
        self, g: Tensor, start: int, stop: int, halo_before: Tensor | None
    ) -> tuple[Tensor, list[int]]:
        """Return rows [start - halo, stop + halo) of `g`, zero outside, and the padding to add.

        `halo_before` is the copy of the rows before `start`, which have been overwritten.
        """
        layout, halo = self.layout, self.halo
        padding = [k // 2 for k in self.module.kernel_size]
        if start == 0 and stop == layout.rows:
            return g, padding
        padding[layout.axis - 2] = 0
        rows = stop - start
        padded = layout.empty(g.shape[1], rows + 2 * halo)
        before = layout.narrow_rows(padded, 0, halo)
        before.zero_() if halo_before is None else before.copy_(halo_before)
        last = min(stop + halo, layout.rows)
        layout.narrow_rows(padded, halo, halo + last - start).copy_(
            layout.narrow_rows(g, start, last)
        )
        if last < stop + halo:
            layout.narrow_rows(padded, halo + last - start, rows + 2 * halo).zero_()
        return padded, padding
