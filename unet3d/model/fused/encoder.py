"""Run an encoder level, plain or with residual blocks, as one autograd node.

The `mode` of a level, one of unet3d.types.Retention, says which outputs are stored and which are
recomputed. A level ends with the pooling for the next one, unless that begins with a stride.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.model.blocks import Strided
from unet3d.model.fused.feature_maps import (
    FeatureMap,
    LazyActivation,
    StoredFeatureMap,
    compute_input_gradient,
    pool_map,
    restore_parts,
)
from unet3d.model.fused.layers import GradientBuffer, GradientSum, Layers
from unet3d.model.fused.node import Block, run_block
from unet3d.model.fused.tiled_conv import Sink, add_norm_gradient_sums
from unet3d.model.fused.tiling import MapLayout, choose_tile_bytes
from unet3d.types import Triple


def make_input_map(x: Tensor, dtype: torch.dtype, tile_bytes: int | None) -> FeatureMap:
    """Wrap the network's input as a map; `dtype` is that of the step without autocast.

    `tile_bytes` is the size of tiles; None leaves it to the device.
    """
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else dtype
    d, h, w = x.shape[2:]
    axis = 2 if d >= h else 3  # the longer of D and H: rows stay contiguous along W
    layout = MapLayout(len(x), (d, h, w), axis, dtype, x.device, choose_tile_bytes(x, tile_bytes))
    return FeatureMap(x, StoredFeatureMap(x.detach(), layout))


class Encoder(Block):
    """An encoder level: its convolutions, then the pooling, if any."""

    def __init__(
        self,
        x: FeatureMap,
        modules: Sequence[nn.Module],
        pool: nn.Module | None,
        pool_kernel: Triple,
        mode: str,
    ):
        super().__init__(modules, x.source.layout.device)
        self.modules = list(modules)
        self.source, self.mode, self.pool_kernel = x.source, mode, pool_kernel
        self.next_is_strided = isinstance(pool, Strided)
        self.pool = None if self.next_is_strided else pool

    def pool_output(self, needs_grad: bool) -> tuple[Tensor, ...]:
        """Return the pooled map, if any, and the edge of the output."""
        output = self.output
        small = None if self.pool is None else pool_map(output, self.pool, self.pool_kernel)
        if isinstance(output, LazyActivation):
            is_coarsest = self.pool is None and not self.next_is_strided
            output.drop_when_downsampled = self.mode == "stream"
            output.offload_when_downsampled = (
                self.mode == "offload" and needs_grad and not is_coarsest
            )
            output.raw.drop_after_read = self.mode in ("recompute", "recompute_tiled")
            output.raw.restore_for_decoder = self.mode == "recompute"
            if not self.next_is_strided:
                output.finish_downsampling()
        return (self.edge(),) if small is None else (small, self.edge())

    def take_gradient(self, gradients: list[Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of the output, to be overwritten, and that of the pooled map."""
        assert isinstance(self.output, LazyActivation)
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


class PlainEncoder(Encoder):
    """A level of consecutive convolutions."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        stream = self.mode == "stream"
        self.layers = Layers(self.modules, [self.source], self.gradients, stream=stream)

    def forward(self, *, needs_grad: bool) -> tuple[Tensor, ...]:
        self.layers.convolve(store_inner=self.mode == "store_all" and needs_grad)
        self.output = self.layers.output
        if self.layers.layers[0].convolution.is_strided:
            self.source.finish_downsampling()
        return self.pool_output(needs_grad)

    def backward(
        self, gradients: list[Tensor | None], needs_grad: Sequence[bool]
    ) -> list[Tensor | None]:
        g, to_small = self.take_gradient(gradients)
        if self.mode != "stream":
            self.layers.output.raw.restore()
        sums = self._add_sums(g, to_small)
        convolution = self.layers.layers[0].convolution
        if convolution.is_strided:
            restore_parts(self.source)
        result = InputGradient(self.source, needs_grad[0], convolution)
        self.layers.backward(len(self.layers.layers), g, sums, result.make_sinks)
        return [result.take(), *self.parameter_gradients()]

    def _add_sums(self, g: Tensor, to_small: Tensor | None) -> Tensor:
        """Add the gradient through the pooling to `g`; return the sums that the norm needs."""
        output, sums = self.layers.output, None
        for start, stop in self.pool_tiles():
            y, rows = output.raw.rows(start, stop), self.layout.narrow_rows(g, start, stop)
            if to_small is not None:
                a = self.layout.empty(output.channels, stop - start)
                output.activate(y, a, start, stop)
                self.add_pool_gradient(a, rows, to_small, start)
                del a
            sums = add_norm_gradient_sums(rows, y, output, sums)
        assert sums is not None
        return sums


class InputGradient:
    """The gradient of an encoder level's input.

    Where the first convolution is strided, the input is also a skip: the gradient is added to that
    of the decoder, which autograd has already, so that there is one tensor of that size.
    """

    def __init__(self, source: Any, is_needed: bool, convolution: Any):
        self.shared: Tensor | None = None
        self.sink: GradientBuffer | GradientSum | None = None
        layout, channels = source.layout, source.channels
        if is_needed and convolution.is_strided:
            self.shared = source.gradient
            tensor = layout.empty(channels).zero_() if self.shared is None else self.shared
            self.sink = GradientSum(tensor, layout)
        elif is_needed:
            self.sink = GradientBuffer(None, channels, layout)

    def make_sinks(self, _: Tensor) -> list[Sink | None]:
        """Return the sink of the only source."""
        return [self.sink]

    def take(self) -> Tensor | None:
        """Return what autograd has to be given."""
        if self.sink is None or self.shared is not None:
            return None
        return self.sink.tensor


def run_encoder(block: Encoder, x: FeatureMap) -> tuple[FeatureMap, FeatureMap]:
    """Return the map that the next level reads, and the map that the decoder reads."""
    *small, edge = run_block(block, x.edge)
    skip = FeatureMap(edge, block.output)
    if not small:
        return skip, skip
    layout = block.layout.shrink(block.pool_kernel)
    return FeatureMap(small[0], StoredFeatureMap(small[0].detach(), layout)), skip
