"""Run an encoder level of residual blocks as one autograd node.

A block's output is the activation of a sum: of a normalized convolution output and of the block's
input, or its projection. Neither the sum nor its activation is stored: reading an output adds up
the raw outputs of the second convolutions of this block and those before it. These are stored,
except that of the last block, for which the mode decides, as for the first convolutions and the
stem. A projection is dropped once the decoder has read it, unless what it reads is dropped, too.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unet3d.model.blocks import ResidualBlock
from unet3d.model.fused import tiled_conv
from unet3d.model.fused.convolution import convolve
from unet3d.model.fused.encoder import Encoder, InputGradient
from unet3d.model.fused.feature_maps import (
    LazyActivation,
    PooledMap,
    StoredFeatureMap,
    compute_input_gradient,
    pool_volumes,
    restore_parts,
)
from unet3d.model.fused.layers import GradientSum, Layers, add_parameter_gradient
from unet3d.model.fused.norms import get_negative_slope
from unet3d.model.fused.ops import norm_ops
from unet3d.model.fused.tiled_conv import Sink, add_norm_gradient_sums, backward_norm_act


class ResidualEncoder(Encoder):
    """A level of residual blocks, the finest one after a stem."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.stem: Layers | None = None
        self.blocks: list[_Block] = []

    def forward(self, *, needs_grad: bool) -> tuple[Tensor, ...]:
        source, modules = self.source, self.modules
        if not isinstance(modules[0], ResidualBlock):
            self.stem = Layers(modules[:1], [source], self.gradients)
            self.stem.convolve(store_inner=True)
            source, modules = self.stem.output, modules[1:]
            source.raw.is_cheap = True
        for n, module in enumerate(modules):
            block = _Block(module, source, self.gradients, stream=self.mode == "stream")
            if self.mode in ("recompute_tiled", "stream"):
                block.layers.copies = 2
            store = needs_grad and (
                self.mode == "store_all" or (self.mode == "store_later" and n > 0)
            )
            block.forward(store_inner=store)
            if n == 0 and self.stem is not None and self.mode != "store_all":
                self.stem.output.raw.stored = None
            source = block.output if needs_grad else self._materialize(block.output)
            self.blocks.append(block)
        self.output = source
        if self.blocks[0].layers.layers[0].convolution.is_strided:
            self.source.finish_downsampling()
        if not needs_grad:
            self.blocks, self.stem = [], None
        return self.pool_output(needs_grad)

    def backward(
        self, gradients: list[Tensor | None], needs_grad: Sequence[bool]
    ) -> list[Tensor | None]:
        g, to_small = self.take_gradient(gradients)
        restore_parts(self.output)
        result = None
        while self.blocks:
            block, sums = self.blocks.pop(), None
            block.layers.is_streamed |= self.mode == "recompute_tiled"
            tiles = self.pool_tiles() if to_small is not None else self.layout.tiles(block.channels)
            for start, stop in tiles:
                a, rows = block.output.rows(start, stop), self.layout.narrow_rows(g, start, stop)
                if to_small is not None:
                    self.add_pool_gradient(a, rows, to_small, start)
                norm_ops.activation_gradient(a, block.output.slope, rows)
                del a
                sums = block.add_sums(rows, start, stop, sums)
            to_small = None
            assert sums is not None
            if self.blocks:
                block.backward(g, sums)
            elif self.stem is None:
                result = block.backward_to_source(g, sums, is_needed=needs_grad[0])
            else:
                sums = block.backward(g, sums, self.stem.output)
                assert sums is not None
                layer = self.stem.layers[0]
                stem = InputGradient(self.source, needs_grad[0], layer.convolution)
                self.stem.backward(1, g, sums, stem.make_sinks)
                result = stem.take()
        return [result, *self.parameter_gradients()]

    def _materialize(self, output: LazyActivation) -> StoredFeatureMap:
        """Return an output as a map in memory, and free what it was computed from."""
        y = StoredFeatureMap(output.layout.empty(output.channels), output.layout)
        for start, stop in output.layout.tiles(output.channels + output.width):
            output.fill(y.rows(start, stop), start, stop)
        for part in output.parts():
            part.stored = None
        return y


class _Block:
    """A residual block for the duration of a step."""

    def __init__(self, module: Any, source: Any, gradients: dict[Tensor, Tensor], *, stream: bool):
        self.module, self.source = module, source
        self.layers = Layers([module.conv1, module.conv2], [source], gradients, stream=stream)
        self.gradients = gradients
        self.projection: Layers | None = None
        self.pooled: PooledMap | None = None
        self.channels = module.conv2.conv.out_channels

    @property
    def output(self) -> LazyActivation:
        """Return the activated sum."""
        return self.layers.output

    def forward(self, *, store_inner: bool) -> None:
        """Run the block; store the second convolution's output."""
        module, skip = self.module, self.source
        if module.skip_pool is not None:
            self.pooled = skip = PooledMap(
                *(module.skip_pool, module.conv1.conv.stride, skip),
                is_transient=module.projection is not None,
            )
        self.layers.run_next(
            store=not self.layers.is_streamed,
            on_input=None if self.pooled is None else self.pooled.pool_rows,
        )
        if module.projection is not None:
            self.projection = Layers([module.projection], [skip], self.gradients)
            self.projection.convolve(store_inner=True)
            skip = self.projection.output
            is_cheap = not self.source.is_dropped
            skip.raw.drop_after_read = skip.raw.restore_for_decoder = is_cheap
        layout, slope = self.source.layout, get_negative_slope(module.act)
        factors = module.drop_path.draw(layout.batch, layout.device)
        self.layers.run_next(store=True, skip=skip, slope=slope, factors=factors)
        if not store_inner:
            self.layers.free_inner()

    def add_sums(self, m: Tensor, start: int, stop: int, sums: Tensor | None) -> Tensor:
        """Add the sums over these rows that the second norm needs, given the sum's gradient."""
        return add_norm_gradient_sums(m, self.output.raw.rows(start, stop), self.output, sums)

    def backward(
        self, g: Tensor, sums: Tensor, source: LazyActivation | None = None
    ) -> Tensor | None:
        """Turn the gradient of the sum, `g`, into that of the block's input, its skip.

        With a `source`, the input, return the sums that its norm needs.
        """
        to_conv, sums = self.layers.backward_conv(1, self._backward_norms(g, sums), _no_sinks)
        sink = GradientSum(g, self.source.layout)
        return self.layers.backward(1, to_conv, sums, lambda _: [sink], source)

    def backward_to_source(self, g: Tensor, sums: Tensor, *, is_needed: bool) -> Tensor | None:
        """Return the gradient of the level's input, given that of the sum."""
        convolution = self.layers.layers[0].convolution
        if not convolution.is_strided and self.projection is None:
            self.backward(g, sums)
            return g if is_needed else None
        to_conv = self._backward_norms(g, sums)
        if convolution.is_strided:
            restore_parts(self.source)
            convolution.add_gradient = partial(self._backward_skip, g)
        to_conv, sums = self.layers.backward_conv(1, to_conv, _no_sinks)
        result = InputGradient(self.source, is_needed, convolution)
        self.layers.backward(1, to_conv, sums, result.make_sinks)
        convolution.add_gradient = None  # it refers to this block
        gradient = result.take()
        if self.projection is not None and not convolution.is_strided:
            sink = None if gradient is None else GradientSum(gradient, self.source.layout)
            self.projection.backward_conv(0, g, lambda _: [sink])
        return gradient

    def _backward_norms(self, g: Tensor, sums: Tensor) -> Tensor:
        """Return the gradient of the second raw output, given that of the sum.

        With a projection, turn `g` into the gradient of its raw output.
        """
        second, output = self.layers.layers[1], self.output
        gradient = self.layers.backward_norm(second, sums, output.factors)
        y = output.raw.stored
        assert y is not None
        backward_norm_act(g, y, output, gradient, out=y)
        output.raw.stored = None
        if self.projection is not None:
            layer = self.projection.layers[0]
            assert layer.raw.stored is not None
            sums = add_norm_gradient_sums(g, layer.raw.stored, layer.output, None)
            self.projection.backward_norm_in_place(layer, g, sums)
        return y

    def _backward_skip(self, g: Tensor, windows: Tensor, start: int, stop: int) -> Tensor:
        """Return the gradient of the rows `windows` that rows [start, stop) of the skip pool.

        `g` is the gradient of the projection's raw output, or else of the pooled map.
        """
        convolution, pool = self.layers.layers[0].convolution, self.module.skip_pool
        rows = convolution.layout.narrow_rows(g, start, stop)
        if self.projection is not None:
            conv, none = self.module.projection.conv, [0, 0, 0]
            weight = self.projection.layers[0].convolution.weight()
            if conv.weight.requires_grad:
                pooled = convolution.layout.empty(conv.in_channels, stop - start)
                pool_volumes(pool, windows, pooled)
                part = tiled_conv.compute_weight_gradient(rows, pooled, weight, none)
                add_parameter_gradient(self.gradients, conv.weight, part)
                del pooled
            transposed = weight.transpose(0, 1).contiguous(memory_format=torch.channels_last_3d)
            rows = convolve(rows, transposed, none)
        return compute_input_gradient(pool, windows, rows)


def _no_sinks(_: Tensor) -> list[Sink | None]:
    """Return no sinks: the gradient goes to another layer."""
    return []
