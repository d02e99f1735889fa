"""Run an encoder level, plain or with residual blocks, as one autograd node.

The policy of a level says which outputs are stored and which are recomputed. A level ends with the
pooling for the next one, unless that begins with a stride.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.model.blocks import ResidualBlock, Strided
from unet3d.model.fused.conv_ops import cast_weight, compute_weight_gradient, convolve
from unet3d.model.fused.feature_maps import (
    FeatureMap,
    LazyActivation,
    PooledMap,
    StoredFeatureMap,
    compute_input_gradient,
    free_parts,
    pool_map,
    pool_volumes,
    restore_parts,
)
from unet3d.model.fused.layers import ConvChain, GradientBuffer, GradientSum, ParameterGradients
from unet3d.model.fused.node import FusedBlock
from unet3d.model.fused.norms import FoldedNorm, get_negative_slope
from unet3d.model.fused.tiling import MapLayout, choose_tile_bytes
from unet3d.types import LAST_POLICIES, LevelPolicy, Triple

aten = torch.ops.aten


def make_input_map(x: Tensor, dtype: torch.dtype, tile_bytes: int | None) -> FeatureMap:
    """Wrap the network's input as a map; `dtype` is that of the step without autocast.

    `tile_bytes` is the size of tiles; None leaves it to the device.
    """
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and dtype != torch.float64  # as torch
    if x.dtype != dtype and (x.dtype == torch.float64 or not autocast):
        raise RuntimeError(f"Input type ({x.dtype}) and weight type ({dtype}) should be the same")
    dtype = torch.get_autocast_dtype(device) if autocast else dtype
    d, h, w = x.shape[2:]
    axis = 2 if d >= h else 3  # the longer of D and H: rows stay contiguous along W
    layout = MapLayout(len(x), (d, h, w), axis, dtype, x.device, choose_tile_bytes(x, tile_bytes))
    # A view of another network's output: nodes do not save maps of other blocks.
    edge = x.view_as(x) if type(x.grad_fn).__name__ == "_NodeBackward" else x
    return FeatureMap(edge, StoredFeatureMap(x.detach(), layout))


class FusedEncoderLevel(FusedBlock):
    """An encoder level: what subclasses compute, then the pooling, if any."""

    def __init__(
        self,
        x: FeatureMap,
        modules: Sequence[nn.Module],
        pool: nn.Module | None,
        pool_kernel: Triple,
        policy: LevelPolicy,
    ):
        super().__init__(modules, x.source.layout.device)
        self.modules = list(modules)
        self.source, self.policy, self.pool_kernel = x.source, policy, pool_kernel
        self.next_is_strided = isinstance(pool, Strided)
        self.pool = None if self.next_is_strided else pool

    def run_on(self, x: FeatureMap) -> tuple[FeatureMap, FeatureMap]:
        """Return the map that the next level reads, and the map that the decoder reads."""
        *small, placeholder = self.run(x.placeholder)
        skip = FeatureMap(placeholder, self.output)
        if not small:
            return skip, skip
        layout = self.layout.shrink(self.pool_kernel)
        return FeatureMap(small[0], StoredFeatureMap(small[0].detach(), layout)), skip

    def pool_output(self) -> tuple[Tensor, ...]:
        """Return the pooled map, if any, and the placeholder of the output."""
        output = self.output
        small = None if self.pool is None else pool_map(output, self.pool, self.pool_kernel)
        if isinstance(output, LazyActivation):
            output.raw.keep = self.policy.last
            if not self.next_is_strided:
                free_parts(output, "stream")
        return (
            (self.placeholder(self.output.channels),)
            if small is None
            else (small, self.placeholder(self.output.channels))
        )

    def take_gradient(self, gradients: list[Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of the output, to be overwritten, and that of the pooled map."""
        self.output.gradient = None
        g = gradients.pop()
        to_small = gradients.pop() if self.pool is not None else None
        return self.layout.empty(self.output.channels).zero_() if g is None else g, to_small

    def add_pool_gradient(self, a: Tensor, rows: Tensor, to_small: Tensor, start: int) -> None:
        """Add the gradient through the pooling to `rows`, given the activations of these rows."""
        kernel, count = self.pool_kernel[self.layout.axis - 2], a.shape[self.layout.axis]
        part = self.layout.narrow_rows(to_small, start // kernel, (start + count) // kernel)
        assert self.pool is not None
        rows.add_(compute_input_gradient(self.pool, a, part))

    def pool_tiles(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of tiles that end at a pooling window's end or at the map's end."""
        multiple = 1 if self.pool is None else self.pool_kernel[self.layout.axis - 2]
        return self.layout.tiles(self.output.channels, multiple=multiple)


class ConvEncoderLevel(FusedEncoderLevel):
    """A level of consecutive convolutions."""

    layers: ConvChain

    def forward(self, *, needs_grad: bool) -> tuple[Tensor, ...]:
        inner = self.policy.inner
        self.layers = ConvChain(self.modules, [self.source], self.gradients, inner=inner)
        self.layers.convolve(needs_grad=needs_grad)
        self.output = self.layers.output
        if self.layers.is_strided:
            free_parts(self.source, "stream")
        return self.pool_output()

    def backward(
        self, gradients: list[Tensor | None], needs_grad: Sequence[bool]
    ) -> list[Tensor | None]:
        g, to_small = self.take_gradient(gradients)
        output, sums = self.layers.output, None
        if self.policy.last != "stream":
            output.raw.restore()
        for start, stop in self.pool_tiles():
            y, rows = output.raw.rows(start, stop), self.layout.narrow_rows(g, start, stop)
            if to_small is not None:
                a = self.layout.empty(output.channels, stop - start)
                output.activate(y, a, start, stop)
                self.add_pool_gradient(a, rows, to_small, start)
                del a
            sums = output.norm.add_gradient_sums(rows, y, sums)
        del y, rows
        assert sums is not None
        if self.layers.is_strided:
            restore_parts(self.source, *LAST_POLICIES)
        is_needed, is_strided = needs_grad[0], self.layers.is_strided
        sink = make_input_sink(self.source, is_needed=is_needed, is_strided=is_strided)
        self.layers.backward(len(self.modules), g, sums, lambda _: [sink])
        return [take_input_gradient(self.source, sink), *self.gradients.collect()]


InputSink = GradientBuffer | GradientSum | None


def make_input_sink(source: Any, *, is_needed: bool, is_strided: bool) -> InputSink:
    """Return the sink of the gradient of an encoder level's input.

    Where the first convolution is strided, the input is also a skip: the gradient is added to that
    of the decoder, which autograd has already, so that there is one tensor of that size.
    """
    layout, channels = source.layout, source.channels
    if not is_needed:
        return None
    if not is_strided:
        return GradientBuffer(None, channels, layout)
    shared = source.gradient
    return GradientSum(layout.empty(channels).zero_() if shared is None else shared, layout)


def take_input_gradient(source: Any, sink: InputSink) -> Tensor | None:
    """Return what autograd has to be given of an encoder level's input."""
    return None if sink is None or sink.tensor is source.gradient else sink.tensor


class ResidualEncoderLevel(FusedEncoderLevel):
    """A level of residual blocks, the finest one after a stem.

    A block's output is the activation of a sum: of a normalized convolution output and of the
    block's input, or its projection. Neither the sum nor its activation is stored: reading an
    output adds up the raw outputs of the second convolutions of this block and those before it.
    These are stored, except that of the last block, for which the policy decides, as for the first
    convolutions and the stem. A projection is dropped once the decoder has read it, unless what it
    reads is dropped, too.
    """

    stem: ConvChain | None = None
    blocks: list[_Block]

    def forward(self, *, needs_grad: bool) -> tuple[Tensor, ...]:
        source, modules, self.blocks = self.source, self.modules, []
        if not isinstance(modules[0], ResidualBlock):
            self.stem = ConvChain(modules[:1], [source], self.gradients)
            self.stem.convolve(needs_grad=needs_grad)
            source, modules = self.stem.output, modules[1:]
            source.raw.keep = None
        for n, module in enumerate(modules):
            inner = self.policy.inner
            if inner == "store_later":
                inner = "store" if n else "recompute"
            block = _Block(module, source, self.gradients, inner)
            block.forward(needs_grad=needs_grad)
            if n == 0 and self.stem is not None and inner != "store":
                self.stem.output.raw.stored = None
            source = block.output if needs_grad else self._materialize(block.output)
            self.blocks.append(block)
        self.output = source
        if self.blocks[0].layers.is_strided:
            free_parts(self.source, "stream")
        if not needs_grad:
            self.blocks, self.stem = [], None
        return self.pool_output()

    def backward(
        self, gradients: list[Tensor | None], needs_grad: Sequence[bool]
    ) -> list[Tensor | None]:
        g, to_small = self.take_gradient(gradients)
        restore_parts(self.output, *LAST_POLICIES)
        result = None
        while self.blocks:
            block, sums = self.blocks.pop(), None
            tiles = self.pool_tiles() if to_small is not None else self.layout.tiles(g.shape[1])
            for start, stop in tiles:
                a, rows = block.output.rows(start, stop), self.layout.narrow_rows(g, start, stop)
                if to_small is not None:
                    self.add_pool_gradient(a, rows, to_small, start)
                # True: a is the output of the activation. In place, for any slope (0 is ReLU).
                slope = block.output.slope
                aten.leaky_relu_backward.grad_input(rows, a, slope, True, grad_input=rows)
                del a
                raw = block.output.raw.rows(start, stop)
                sums = block.output.norm.add_gradient_sums(rows, raw, sums)
                del raw
            to_small = None
            assert sums is not None
            if self.blocks:
                block.backward(g, sums)
            elif self.stem is None:
                result = block.backward_to_source(g, sums, is_needed=needs_grad[0])
            else:
                sums = block.backward(g, sums, self.stem.output.norm)
                assert sums is not None
                sink = make_input_sink(self.source, is_needed=needs_grad[0], is_strided=False)
                self.stem.backward(1, g, sums, lambda _, sink=sink: [sink])
                result = take_input_gradient(self.source, sink)
        return [result, *self.gradients.collect()]

    def _materialize(self, output: LazyActivation) -> StoredFeatureMap:
        """Return an output as a map in memory, and free what it was computed from."""
        y = StoredFeatureMap(output.layout.empty(output.channels), output.layout)
        for start, stop in output.layout.tiles(output.channels + output.width):
            output.fill(y.rows(start, stop), start, stop)
        free_parts(output, *LAST_POLICIES)
        return y


class _Block:
    """A residual block for the duration of a step."""

    def __init__(self, module: Any, source: Any, gradients: ParameterGradients, inner: str):
        self.module, self.source, self.gradients = module, source, gradients
        options: Any = {
            "inner": inner,
            "copies": 2 if inner in ("recompute_tiled", "stream") else 1,
        }
        self.layers = ConvChain([module.conv1, module.conv2], [source], gradients, **options)
        self.projection: ConvChain | None = None

    @property
    def output(self) -> LazyActivation:
        """Return the activated sum."""
        return self.layers.output

    def forward(self, *, needs_grad: bool) -> None:
        """Run the block; store the second convolution's output."""
        module, skip, pool_rows = self.module, self.source, None
        if module.skip_pool is not None:
            stride, is_transient = module.conv1.conv.stride, module.projection is not None
            skip = PooledMap(module.skip_pool, stride, skip, is_transient=is_transient)
            pool_rows = skip.pool_rows
        self.layers.run_next(on_input=pool_rows)
        if module.projection is not None:
            self.projection = ConvChain([module.projection], [skip], self.gradients)
            self.projection.convolve(needs_grad=needs_grad)
            skip = self.projection.output
            if self.source.keep == "store":
                skip.raw.keep = "recompute"
        layout, slope = self.source.layout, get_negative_slope(module.act)
        factors = module.drop_path.draw(layout.batch, layout.device)
        self.layers.run_next(skip=skip, slope=slope, factors=factors)
        self.layers.free_inner(needs_grad=needs_grad)

    def backward(self, g: Tensor, sums: Tensor, source: FoldedNorm | None = None) -> Tensor | None:
        """Turn the gradient of the sum, `g`, into that of the block's input, its skip.

        With a `source`, the norm of the input, return the sums that it needs.
        """
        to_conv, sums = self.layers.backward_conv(1, self._backward_norms(g, sums))
        sink = GradientSum(g, self.source.layout)
        return self.layers.backward(1, to_conv, sums, lambda _: [sink], source)

    def backward_to_source(self, g: Tensor, sums: Tensor, *, is_needed: bool) -> Tensor | None:
        """Return the gradient of the level's input, given that of the sum."""
        convolution, is_strided = self.layers.outputs[0].raw.convolution, self.layers.is_strided
        if not is_strided and self.projection is None:
            self.backward(g, sums)
            return g if is_needed else None
        to_conv = self._backward_norms(g, sums)
        if is_strided:
            restore_parts(self.source, *LAST_POLICIES)
            convolution.add_gradient = partial(self._backward_skip, g)
        to_conv, sums = self.layers.backward_conv(1, to_conv)
        sink = make_input_sink(self.source, is_needed=is_needed, is_strided=is_strided)
        self.layers.backward(1, to_conv, sums, lambda _: [sink])
        convolution.add_gradient = None  # it refers to this block
        gradient = take_input_gradient(self.source, sink)
        if self.projection is not None and not is_strided:
            added = None if gradient is None else GradientSum(gradient, self.source.layout)
            self.projection.backward_conv(0, g, lambda _: [added])
        return gradient

    def _backward_norms(self, g: Tensor, sums: Tensor) -> Tensor:
        """Return the gradient of the second raw output, given that of the sum.

        With a projection, turn `g` into the gradient of its raw output.
        """
        output = self.output
        gradient = self.layers.backward_norm(1, sums, output.factors)
        y = output.raw.stored
        assert y is not None
        gradient.apply(g, y, out=y)
        output.raw.stored = None
        if self.projection is not None:
            projected = self.projection.output
            assert projected.raw.stored is not None
            sums = projected.norm.add_gradient_sums(g, projected.raw.stored, None)
            self.projection.backward_norm_in_place(0, g, sums)
        return y

    def _backward_skip(self, g: Tensor, windows: Tensor, start: int, stop: int) -> Tensor:
        """Return the gradient of the rows `windows` that rows [start, stop) of the skip pool.

        `g` is the gradient of the projection's raw output, or else of the pooled map.
        """
        convolution, pool = self.layers.outputs[0].raw.convolution, self.module.skip_pool
        rows = convolution.layout.narrow_rows(g, start, stop)
        if self.projection is not None:
            weight, none = self.projection.output.raw.convolution.parameter, [0, 0, 0]
            if weight.requires_grad:
                pooled = convolution.layout.empty(weight.shape[1], stop - start)
                is_whole = convolution.layout.is_whole
                pool_volumes(pool, windows, pooled, at_once=is_whole)
                shape = weight.shape
                part = compute_weight_gradient(rows, pooled, shape, none, contiguous=is_whole)
                self.gradients.add(weight, part)
                del pooled
            rows = convolve(rows, cast_weight(weight, rows.dtype, transpose=True), none)
        return compute_input_gradient(pool, windows, rows)
