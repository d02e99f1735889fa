"""Run a decoder level as one autograd node: upsampling, concatenation, convolutions, head."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.lazy_logits import LazyLogits
from unet3d.model.blocks import Interpolate
from unet3d.model.fused import operators
from unet3d.model.fused.conv_ops import cast_bias, cast_weight
from unet3d.model.fused.convolution import GradientSink
from unet3d.model.fused.feature_maps import FeatureMap, LazyActivation, free_parts, restore_parts
from unet3d.model.fused.head import Head
from unet3d.model.fused.layers import ConvChain, GradientBuffer
from unet3d.model.fused.node import FusedBlock
from unet3d.model.fused.tiling import MapLayout
from unet3d.types import LAST_POLICIES, LevelPolicy

aten = torch.ops.aten


class _Part(NamedTuple):
    """Rows [first, last) of an upsampled map, and the coarser rows that they are computed from."""

    rows: Tensor
    first: int
    last: int
    low: tuple[int, int]


class UpsampledMap:
    """The upsampling of a coarser map, zero-padded to the finer level's size.

    `module` is an Interpolate, or a transposed convolution with stride equal to its kernel size.
    """

    whole = None
    width = 0  # rows that are upsampled are few

    def __init__(self, module: Any, low: LazyActivation, layout: MapLayout):
        self.module, self.low, self.layout = module, low, layout
        self.weight: Any = getattr(module, "weight", None)
        self.bias: Tensor | None = getattr(module, "bias", None)
        self.interpolates = isinstance(module, Interpolate)
        self.linear = self.interpolates and module.mode == "trilinear"
        self.channels = low.channels if self.interpolates else module.out_channels
        factors = module.scale_factor if self.interpolates else module.stride
        self.size = [n * w for n, w in zip(low.layout.size, factors, strict=True)]
        self.offset = [(n - m) // 2 for n, m in zip(layout.size, self.size, strict=True)]
        self.rows, self.low_rows = self.size[layout.axis - 2], low.layout.rows  # without padding
        self.factor = factors[layout.axis - 2]
        self.gradients: list[Tensor] = []  # of weight and bias
        self.to_low: Tensor | None = None  # the gradient of the coarser map

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        """Write rows [start, stop) to `out`."""
        self._zero_padding(out, start, stop)
        part = self._strip_padding(out, start, stop)
        if part is None:
            return
        low = self.low.rows(*part.low)
        if self.interpolates:
            operators.interpolate(low, self._axes(low, part), self.linear, part.rows)
            return
        weight, bias = cast_weight(self.weight, low.dtype), cast_bias(self.bias, low.dtype)
        up = F.conv_transpose3d(low, weight, bias, stride=self.module.stride)
        first = part.first - part.low[0] * self.factor
        part.rows.copy_(up.narrow(self.layout.axis, first, part.last - part.first))

    def begin_gradient(self) -> Tensor:
        """Return the gradient of the coarser map, to which rows are added."""
        if self.to_low is None:
            self.to_low = self.low.layout.empty(self.low.channels).zero_()
        return self.to_low

    def gradient(self, g: Tensor, start: int, stop: int) -> Tensor:
        """Add the gradient of the coarser map, given `g` of some rows, to `to_low`; return g."""
        part = self._strip_padding(g, start, stop)
        if part is None:
            return g
        rows = None if self.interpolates else self._transpose_gradient(part)
        if self.to_low is None and rows is not None and part.low == (0, self.low_rows):
            self.to_low = rows.contiguous(memory_format=torch.channels_last_3d)
            return g
        out = self.low.layout.narrow_rows(self.begin_gradient(), *part.low)
        if rows is not None:
            out += rows
        else:
            operators.interpolate_gradient(part.rows, self._axes(out, part), self.linear, out)
        return g

    def _transpose_gradient(self, part: _Part) -> Tensor:
        """Return the gradient of coarser rows, and add those of weight and bias."""
        x, stride = self.low.rows(*part.low), self.module.stride
        weight, bias = cast_weight(self.weight, x.dtype), self.bias
        before = part.first - part.low[0] * self.factor
        after = part.low[1] * self.factor - part.last
        padding = [0] * 6
        last = 2 * (4 - self.layout.axis)  # the last axis comes first
        padding[last : last + 2] = [before, after]
        g = F.pad(part.rows, padding) if before or after else part.rows.contiguous()
        sizes = None if bias is None else [bias.numel()]
        to_low, *gradients = aten.convolution_backward(
            g, x, weight, sizes, stride, [0] * 3, [1] * 3, True, [0] * 3, 1,
            [True, True, bias is not None],
        )  # fmt: skip
        dtype = torch.promote_types(x.dtype, torch.float32)
        layout = torch.contiguous_format if self.layout.is_whole else torch.preserve_format
        gradients = [t.to(dtype, memory_format=layout) for t in gradients if t is not None]
        if self.gradients:
            gradients = [a + b for a, b in zip(self.gradients, gradients, strict=True)]
        self.gradients = gradients
        return to_low

    def _axes(self, low: Tensor, part: _Part) -> list[int]:
        """Return the `axes` of the operators: only the tiled axis does not start at 0."""
        numbers = []
        for axis in (2, 3, 4):
            if axis == self.layout.axis:
                numbers += [part.first, self.rows, part.low[0], self.low_rows]
            else:
                numbers += [0, part.rows.shape[axis], 0, low.shape[axis]]
        return numbers

    def _zero_padding(self, rows: Tensor, start: int, stop: int) -> None:
        """Write zeros to the part of these rows that is padding."""
        for n, (offset, size) in enumerate(zip(self.offset, self.size, strict=True)):
            first, last = (start, stop) if n + 2 == self.layout.axis else (0, self.layout.size[n])
            begin = min(max(offset, first), last)
            end = min(max(offset + size, first), last)
            for low, high in ((first, begin), (end, last)):
                if low < high:
                    rows.narrow(n + 2, low - first, high - low).zero_()

    def _strip_padding(self, rows: Tensor, start: int, stop: int) -> _Part | None:
        """Return the part of these rows that is not padding; None: all of it is."""
        offsets, sizes, axis = list(self.offset), list(self.size), self.layout.axis - 2
        first, last = max(start - offsets[axis], 0), min(stop - offsets[axis], self.rows)
        if last <= first:
            return None
        offsets[axis], sizes[axis] = first + offsets[axis] - start, last - first
        for n, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            rows = rows.narrow(n + 2, offset, size)
        if self.interpolates:
            low = find_source_rows(first, last, self.rows, self.low_rows, linear=self.linear)
        else:
            low = first // self.factor, -(-last // self.factor)
        return _Part(rows, first, last, low)


def find_source_rows(
    first: int, last: int, size: int, low_size: int, *, linear: bool
) -> tuple[int, int]:
    """Return the range of coarser rows that rows [first, last) are interpolated from."""
    if not linear:
        return first * low_size // size, (last - 1) * low_size // size + 1
    # In integers, as in the kernels: a rounded product may be one row off.
    a, b = (n * (low_size - 1) // max(1, size - 1) for n in (first, last - 1))
    return a, min(b + 2, low_size)


class FusedDecoderLevel(FusedBlock):
    """Upsampling, concatenation of the skip, convolutions, and a 1x1x1 head at some levels.

    With `lazy`, the head's logits are LazyLogits if they have more channels than the map.
    """

    def __init__(
        self,
        low: FeatureMap,
        skip: FeatureMap,
        up: nn.Module,
        convs: Sequence[Any],
        head: nn.Conv3d | None,
        *,
        last: bool,
        policy: LevelPolicy,
        skip_first: bool,
        lazy: bool,
    ):
        super().__init__([*convs, up, *([] if head is None else [head])], skip.source.layout.device)
        self.up = UpsampledMap(up, low.source, skip.source.layout)
        self.skip, self.low = skip.source, low.source
        self.inputs = [skip.source, low.source]
        self.head = None if head is None else Head(head, self.gradients, lazy=lazy)
        self.last, self.skip_first = last, skip_first
        sources = self._order(skip.source, self.up)
        self.layers = ConvChain(convs, sources, self.gradients, inner=policy.inner)

    def run_on(
        self, low: FeatureMap, skip: FeatureMap
    ) -> tuple[FeatureMap | None, Tensor | LazyLogits | None]:
        """Return the map, unless the block is the `last` one, and the head's logits, if any."""
        outputs = self.run(low.placeholder, skip.placeholder)
        logits: Any = None if self.head is None else outputs.pop()
        if self.head is not None and self.head.lazy:
            logits = self.head.make_lazy(logits)
        return (FeatureMap(outputs[0], self.output) if outputs else None), logits

    def forward(self, *, needs_grad: bool) -> tuple[Tensor, ...]:
        # What is not read again before backward.
        policies = ("recompute", "recompute_tiled") if needs_grad else LAST_POLICIES

        def free_inputs() -> None:
            for source in self.inputs:
                free_parts(source, *policies)

        self.layers.convolve(needs_grad=needs_grad, on_sources_read=free_inputs)
        self.output = self.layers.output
        outputs = [] if self.last else [self.placeholder(self.output.channels)]
        if self.head is not None:
            head, self.head.source = self.head, self.output
            outputs.append(self.edge() if head.lazy else head.compute_logits())
        return tuple(outputs)

    def backward(
        self, gradients: list[Tensor | None], needs_grad: Sequence[bool]
    ) -> list[Tensor | None]:
        to_logits = gradients.pop() if self.head is not None else None
        g = None if self.last else gradients.pop()
        to_skip = None
        for source in self.inputs:
            restore_parts(source, "recompute")

        def make_sinks(g: Tensor) -> list[GradientSink | None]:
            nonlocal to_skip
            to_skip = GradientBuffer(g, self.skip.channels, self.layout) if needs_grad[1] else None
            parameters = [p for p in (self.up.weight, self.up.bias) if p is not None]
            if not needs_grad[0] and not any(p.requires_grad for p in parameters):
                return self._order(to_skip, None)
            if not self.layout.is_whole:
                # Before the first tile: in the order of allocations that GPUs have measured.
                self.up.begin_gradient()
            return self._order(to_skip, self.up.gradient)

        n = len(self.layers.outputs) - 1
        g, sums = self.layers.backward_conv(n, self._backward_head(g, to_logits), make_sinks)
        self.layers.backward(n, g, sums, make_sinks)
        for p, gradient in zip((self.up.weight, self.up.bias), self.up.gradients, strict=False):
            self.gradients.add(p, gradient)
        self.skip.gradient = None if to_skip is None else to_skip.tensor
        to_low, self.up.to_low = self.up.to_low, None
        return [to_low, self.skip.gradient, *self.gradients.collect()]

    def _order(self, skip: Any, up: Any) -> list[Any]:
        """Return what belongs to the skip and to the upsampled map in the order of the inputs."""
        return [skip, up] if self.skip_first else [up, skip]

    def _activation_gradient(
        self, g: Tensor | None, to_logits: Tensor | None, start: int, stop: int, *, update: bool
    ) -> Tensor:
        """Return rows of the last activation's gradient, the head's part included.

        With `update`, also add the rows to the head's gradients and to `g`, where there is one.
        """
        rows = None if g is None else self.layout.narrow_rows(g, start, stop)
        if self.head is None or not self.head.has_gradient(to_logits):
            if rows is None:
                rows = self.layout.empty(self.output.channels, stop - start).zero_()
            return rows
        if rows is not None and not update:
            return rows
        from_head = self.head.differentiate(to_logits, start, stop, update=update)
        return from_head if rows is None else rows.add_(from_head)

    def _backward_head(self, g: Tensor | None, to_logits: Tensor | None) -> Tensor:
        """Return the gradient of the last raw output, in the memory of `g` or of that output."""
        n = len(self.layers.outputs) - 1
        last = self.layers.outputs[n]
        y, sums = last.raw.stored, None
        assert y is not None
        tiles = list(
            self.layout.tiles(self.output.channels) if self.head is None else self.head.tiles()
        )
        for start, stop in tiles:
            rows = self._activation_gradient(g, to_logits, start, stop, update=True)
            raw = self.layout.narrow_rows(y, start, stop)
            sums = last.norm.add_gradient_sums(rows, raw, sums)
            del rows
        assert sums is not None
        gradient = self.layers.backward_norm(n, sums)
        out = y if g is None else g
        for start, stop in tiles:
            raw = self.layout.narrow_rows(y, start, stop)
            rows = self._activation_gradient(g, to_logits, start, stop, update=False)
            gradient.apply(rows, raw, out=self.layout.narrow_rows(out, start, stop))
            del rows
        last.raw.stored = None
        if self.head is not None:
            self.head.logit_gradients.clear()
        return out
