"""Run encoder and decoder blocks as one autograd node each.

A block stores raw convolution outputs and nothing else; reading a map normalizes and activates it
tile by tile. The gradient stays in one buffer from the end of a block to its start. The `mode` of
a block, one of unet3d.types.Retention, says which outputs are stored and which recomputed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unet3d.model.fused import tiled_conv
from unet3d.model.fused.feature_maps import (
    Convolution,
    ConvOutput,
    FeatureMap,
    FeatureMapSource,
    LazyActivation,
    StoredFeatureMap,
    cast_bias,
    cast_weight,
)
from unet3d.model.fused.norms import Moments, NormGradient, fold_norm, make_stat_groups
from unet3d.model.fused.tiled_conv import Sink, add_norm_gradient_sums, backward_norm_act
from unet3d.model.fused.tiling import MapLayout, choose_tile_bytes, find_longest_axis
from unet3d.model.fused.upsampling import UpsampledMap
from unet3d.simulated_cuda import get_device_type
from unet3d.types import HasInputGradient, Triple


def make_input_map(x: Tensor, dtype: torch.dtype, tile_bytes: int | None) -> FeatureMap:
    """Wrap the network's input as a map; `dtype` is that of the step without autocast.

    `tile_bytes` is the size of tiles; None leaves it to the device.
    """
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else dtype
    d, h, w = x.shape[2:]
    axis, tile_bytes = find_longest_axis((d, h, w)), choose_tile_bytes(x, tile_bytes)
    layout = MapLayout(len(x), (d, h, w), axis, dtype, x.device, tile_bytes)
    return FeatureMap(x, StoredFeatureMap(x.detach(), layout))


def run_encoder_block(
    x: FeatureMap,
    convs: Sequence[nn.Module],
    pool: nn.Module | None,
    pool_kernel: Triple,
    mode: str,
) -> tuple[FeatureMap, FeatureMap]:
    """Return the pooled map and the map; without pooling, both are the map."""
    block = _Encoder(x, convs, pool, pool_kernel, mode)
    *small, edge = _Node.apply(block, x.edge, *block.parameters)
    skip = FeatureMap(edge, block.output)
    if not small:
        return skip, skip
    size = tuple(small[0].shape[2:])
    layout = replace(block.layout, size=size)
    return FeatureMap(small[0], StoredFeatureMap(small[0].detach(), layout)), skip


def run_decoder_block(
    low: FeatureMap,
    skip: FeatureMap,
    up: nn.Module,
    convs: Sequence[nn.Module],
    head: nn.Conv3d | None,
    *,
    last: bool,
    mode: str,
) -> tuple[FeatureMap | None, Tensor | None]:
    """Return the map, unless the block is the `last` one, and the head's logits, if any."""
    block = _Decoder(low, skip, up, convs, head, last, mode)
    outputs = list(_Node.apply(block, low.edge, skip.edge, *block.parameters))
    logits = None if head is None else outputs.pop()
    return (FeatureMap(outputs[0], block.output) if outputs else None), logits


MakeSinks = Callable[[Tensor], list[Sink | None]]
"""Given a buffer that may be overwritten, return the sink of each source's gradient."""


class _Node(Function):
    """The autograd node of a block; the block computes its own backward."""

    @staticmethod
    def forward(ctx: Any, block: "_Encoder | _Decoder", *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.block = block
        with torch.autocast(block.layout.device.type, enabled=False):
            return block.forward(needs_grad=any(ctx.needs_input_grad))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        block, ctx.block = ctx.block, None
        if block is None:
            raise RuntimeError(
                "fused blocks free their activations in the first backward and cannot run a second "
                "one: remove retain_graph=True, or use checkpointing=blocks or none"
            )
        with torch.autocast(block.layout.device.type, enabled=False):
            return None, *block.backward(list(gradients), ctx.needs_input_grad[1:])


class _Layer:
    """A convolution with its norm and activation, for the duration of a step."""

    def __init__(self, module: Any, sources: Sequence[FeatureMapSource]):
        self.module = module
        self.convolution = Convolution(module.conv, sources)
        self.raw = ConvOutput(self.convolution)
        self.output: LazyActivation

    def forward(self, *, store: bool) -> LazyActivation:
        """Convolve, and compute the norm's statistics; store the raw output if `store`."""
        layout, channels = self.convolution.layout, self.module.conv.out_channels
        groups = make_stat_groups(self.module.norm, channels)
        moments = None if groups is None else Moments()
        if store or moments is not None:
            self.raw.stored = self.convolution.forward(store=store, moments=moments)
        like = torch.empty(
            layout.batch, channels, dtype=layout.accumulate_dtype, device=layout.device
        )
        self.output = LazyActivation(
            self.raw,
            fold_norm(self.module.norm, self.module.act, self.module.conv.bias, moments, like),
        )
        return self.output


class _GradientBuffer:
    """Collects a gradient's rows, in the memory of `g` if that has enough channels."""

    def __init__(self, g: Tensor | None, channels: int, layout: MapLayout):
        self.layout = layout
        reuse = g is not None and g.shape[1] >= channels
        self.tensor = (
            g.narrow(1, 0, channels) if g is not None and reuse else layout.empty(channels)
        )

    def __call__(self, rows: Tensor, start: int, stop: int) -> None:
        if stop - start == self.layout.rows and rows._base is None:
            self.tensor = rows
        else:
            self.layout.narrow_rows(self.tensor, start, stop).copy_(rows)


class _Block:
    """The convolutions of an encoder or decoder block."""

    def __init__(self, convs: Sequence[Any], sources: Sequence[FeatureMapSource], mode: str):
        self.convs, self.sources, self.mode = list(convs), list(sources), mode
        self.is_streamed = mode == "stream"  # outputs before the last are never stored in full
        self.layout = sources[0].layout
        self.parameters = [p for module in self.convs for p in module.parameters()]
        self.layers: list[_Layer] = []
        self.inputs: list[LazyActivation] = []  # sources that may be freed once they are read
        self.gradients: dict[Tensor, Tensor] = {}  # by parameter

    @property
    def output(self) -> LazyActivation:
        return self.layers[-1].output

    def convolve(self, *, needs_grad: bool) -> None:
        """Run all layers and store the last raw output; free outputs that backward never reads."""
        sources = self.sources
        for n, module in enumerate(self.convs, start=1):
            layer = _Layer(module, sources)
            sources = [layer.forward(store=not self.is_streamed or n == len(self.convs))]
            self.layers.append(layer)
            # Streamed layers read the sources until the last one is done.
            if n == len(self.convs) or (n == 1 and not self.is_streamed):
                for source in self.inputs:
                    if source.raw.drop_after_read or not needs_grad:
                        source.raw.stored = None
        if self.mode != "store_all" or not needs_grad:
            for layer in self.layers[:-1]:
                layer.raw.stored = None

    def edge(self) -> Tensor:
        """Return a tensor for autograd's graph: the map's shape, with the memory of one element."""
        one = torch.zeros(1, dtype=self.layout.dtype, device=self.layout.device)
        return one.expand(self.layout.batch, self.output.channels, *self.layout.size)

    def backward_layers(self, layers: int, g: Tensor, sums: Tensor, make_sinks: MakeSinks) -> None:
        """Run the backward of the first `layers` layers, in the memory of `g`.

        `g` is the gradient of the last one's activation, `sums` what that layer's norm needs of it.
        """
        for n in reversed(range(layers)):
            layer = self.layers[n]
            activation = (layer.output, self.backward_norm(layer, sums))
            if layer.raw.stored is not None:
                backward_norm_act(g, layer.raw.stored, *activation, out=g)
                layer.raw.stored = activation = None
            g, sums = self.backward_conv(n, g, make_sinks, activation)

    def backward_norm(self, layer: _Layer, sums: Tensor) -> NormGradient:
        """Return the norm's gradient, and store those of its parameters."""
        gradient = layer.output.norm.gradient(sums)
        if layer.module.conv.bias is not None:
            self.gradients[layer.module.conv.bias] = gradient.bias
        if getattr(layer.module.norm, "weight", None) is not None:
            self.gradients[layer.module.norm.weight] = gradient.weight
            self.gradients[layer.module.norm.bias] = gradient.shift
        return gradient

    def backward_conv(
        self,
        n: int,
        g: Tensor,
        make_sinks: MakeSinks,
        activation: tuple[LazyActivation, NormGradient] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the previous layer's activation and its sums.

        The first layer's input gradient goes to the sinks instead.
        """
        layer = self.layers[n]
        conv = layer.module.conv
        previous = self.layers[n - 1] if n else None
        if previous is not None and not self.is_streamed:
            previous.raw.restore()
        buffer = None if previous is None else _GradientBuffer(g, conv.in_channels, self.layout)
        weight_gradient, sums = tiled_conv.backward(
            layer.convolution,
            g,
            make_sinks(g) if buffer is None else [buffer],
            needs_weight=conv.weight.requires_grad,
            activation=activation,
            previous=previous.output if previous is not None and self.is_streamed else None,
        )
        if weight_gradient is not None:
            self.gradients[conv.weight] = weight_gradient
        if previous is None or buffer is None:
            return g, torch.empty(0)
        if previous.raw.stored is not None:
            y = previous.raw.stored
            sums = add_norm_gradient_sums(buffer.tensor, y, previous.output, None)
        assert sums is not None
        return buffer.tensor, sums

    def parameter_gradients(self) -> list[Tensor | None]:
        """Return the gradients in the order, shape and dtype of the parameters."""
        gradients = [self.gradients.get(p) if p.requires_grad else None for p in self.parameters]
        return [
            None if g is None else g.reshape(p.shape).to(p.dtype)
            for p, g in zip(self.parameters, gradients, strict=True)
        ]


class _Encoder(_Block):
    """Convolutions, then pooling."""

    def __init__(
        self,
        x: FeatureMap,
        convs: Sequence[Any],
        pool: nn.Module | None,
        pool_kernel: Triple,
        mode: str,
    ):
        super().__init__(convs, [x.source], mode)
        self.pool, self.pool_kernel = pool, pool_kernel

    def forward(self, *, needs_grad: bool) -> tuple[Tensor, ...]:
        self.convolve(needs_grad=needs_grad)
        small = None if self.pool is None else self._pool(self.pool)
        raw = self.output.raw
        if self.is_streamed:
            raw.stored = None
        elif self.mode == "offload" and needs_grad and small is not None:
            raw.offload()
        raw.drop_after_read = self.mode in ("recompute", "recompute_tiled")
        raw.restore_for_decoder = self.mode == "recompute"
        return (self.edge(),) if small is None else (small, self.edge())

    def backward(
        self, gradients: list[Tensor | None], needs_grad: Sequence[bool]
    ) -> list[Tensor | None]:
        g = gradients.pop()
        to_small = gradients.pop() if self.pool is not None else None
        if not self.is_streamed:
            self.layers[-1].raw.restore()
        if g is None:
            g = self.layout.empty(self.output.channels).zero_()
        sums = self._add_pool_gradient(g, to_small)
        channels = self.sources[0].channels
        buffer = _GradientBuffer(None, channels, self.layout) if needs_grad[0] else None
        self.backward_layers(len(self.layers), g, sums, lambda _: [buffer])
        return [None if buffer is None else buffer.tensor, *self.parameter_gradients()]

    def _pool(self, pool: nn.Module) -> Tensor:
        """Pool tile by tile."""
        small = None
        for start, stop in self._pool_tiles():
            # Not a call of the module: hooks of a fused block's modules never run.
            rows = pool.forward(self.output.rows(start, stop))
            if stop - start == self.layout.rows:
                return rows
            if small is None:
                size = [n // k for n, k in zip(self.layout.size, self.pool_kernel, strict=True)]
                small = rows.new_empty(*rows.shape[:2], *size)
            kernel = self.pool_kernel[self.layout.axis - 2]
            self.layout.narrow_rows(small, start // kernel, stop // kernel).copy_(rows)
        assert small is not None
        return small

    def _add_pool_gradient(self, g: Tensor, to_small: Tensor | None) -> Tensor:
        """Add the gradient through the pooling to `g`; return the sums that the norm needs."""
        output, kernel = self.output, self.pool_kernel[self.layout.axis - 2]
        sums = None
        for start, stop in self._pool_tiles():
            y, rows = output.raw.rows(start, stop), self.layout.narrow_rows(g, start, stop)
            if self.pool is not None and to_small is not None:
                part = self.layout.narrow_rows(to_small, start // kernel, stop // kernel)
                a = output.activate(y, self.layout.empty(output.channels, stop - start))
                rows.add_(compute_input_gradient(self.pool, a, part))
                del a
            sums = add_norm_gradient_sums(rows, y, output, sums)
        assert sums is not None
        return sums

    def _pool_tiles(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of tiles that end at a pooling window's end or at the map's end."""
        multiple = 1 if self.pool is None else self.pool_kernel[self.layout.axis - 2]
        return self.layout.tiles(self.output.channels, multiple=multiple)


class _Decoder(_Block):
    """Upsampling, concatenation of the skip, convolutions, and a 1x1x1 head at some levels."""

    def __init__(
        self,
        low: FeatureMap,
        skip: FeatureMap,
        up: nn.Module,
        convs: Sequence[Any],
        head: nn.Conv3d | None,
        last: bool,
        mode: str,
    ):
        self.up = UpsampledMap(up, low.source, skip.source.layout)
        super().__init__(convs, [skip.source, self.up], mode)
        self.skip, self.low = skip.source, low.source
        self.inputs = [skip.source, low.source]
        self.head, self.last = head, last
        self.parameters += [*up.parameters(), *([] if head is None else head.parameters())]

    def forward(self, *, needs_grad: bool) -> tuple[Tensor, ...]:
        self.convolve(needs_grad=needs_grad)
        outputs = [] if self.last else [self.edge()]
        if self.head is not None:
            outputs.append(self._logits(self.head))
        return tuple(outputs)

    def backward(
        self, gradients: list[Tensor | None], needs_grad: Sequence[bool]
    ) -> list[Tensor | None]:
        to_logits = gradients.pop() if self.head is not None else None
        g = None if self.last else gradients.pop()
        to_low = to_skip = None
        for source in self.inputs:
            if source.raw.restore_for_decoder:
                source.raw.restore()

        def make_sinks(g: Tensor) -> list[Sink | None]:
            nonlocal to_low, to_skip
            to_skip = _GradientBuffer(g, self.skip.channels, self.layout) if needs_grad[1] else None
            if not needs_grad[0] and not any(p.requires_grad for p in self.up.module.parameters()):
                return [to_skip, None]
            to_low = self.low.layout.empty(self.low.channels).zero_()
            return [to_skip, partial(self.up.gradient, low=to_low)]

        n = len(self.layers) - 1
        g, sums = self.backward_conv(n, self._backward_head(g, to_logits), make_sinks)
        self.backward_layers(n, g, sums, make_sinks)
        for p, gradient in zip(self.up.module.parameters(), self.up.method.gradients, strict=False):
            self.gradients[p] = gradient
        return [to_low, None if to_skip is None else to_skip.tensor, *self.parameter_gradients()]

    def _logits(self, head: nn.Conv3d) -> Tensor:
        dtype = self.layout.dtype
        weight, bias = cast_weight(head, dtype), cast_bias(head, dtype)
        logits = self.layout.empty(head.out_channels).contiguous()  # the layout that the loss reads
        for start, stop in self.layout.tiles(self.output.channels):
            rows = F.linear(_voxels(self.output.rows(start, stop)), weight.flatten(1), bias)
            self.layout.narrow_rows(logits, start, stop).copy_(_channels(rows))
        return logits

    def _activation_gradient(
        self, g: Tensor | None, to_logits: Tensor | None, start: int, stop: int, *, update: bool
    ) -> Tensor:
        """Return rows of the last activation's gradient, the head's part included.

        With `update`, also add the rows to the head's gradients and to `g`, where there is one.
        """
        rows = None if g is None else self.layout.narrow_rows(g, start, stop)
        if self.head is None or to_logits is None:
            if rows is None:
                rows = self.layout.empty(self.output.channels, stop - start).zero_()
            return rows
        if rows is not None and not update:
            return rows
        weight = cast_weight(self.head, self.layout.dtype).flatten(1)
        part = _voxels(self.layout.narrow_rows(to_logits, start, stop)).contiguous()
        if update:
            self._add_head_gradients(self.head, part, _voxels(self.output.rows(start, stop)))
        from_head = _channels(part @ weight)
        return from_head if rows is None else rows.add_(from_head)

    def _add_head_gradients(self, head: nn.Conv3d, g: Tensor, a: Tensor) -> None:
        """Add the head's gradients, given `g` (B, D, H, W, K) and activations (B, D, H, W, C)."""
        g, dtype = g.flatten(0, 3), self.layout.accumulate_dtype
        parts: dict[Tensor, Tensor] = {head.weight: multiply(g.t(), a.flatten(0, 3), dtype)}
        if head.bias is not None:
            parts[head.bias] = g.sum(0, dtype=dtype)
        for p, part in parts.items():
            self.gradients[p] = self.gradients[p].add_(part) if p in self.gradients else part

    def _backward_head(self, g: Tensor | None, to_logits: Tensor | None) -> Tensor:
        """Return the gradient of the last raw output, in the memory of `g` or of that output."""
        last = self.layers[-1]
        y, sums = last.raw.stored, None
        assert y is not None
        tiles = list(self.layout.tiles(self.output.channels))
        for start, stop in tiles:
            rows = self._activation_gradient(g, to_logits, start, stop, update=True)
            raw = self.layout.narrow_rows(y, start, stop)
            sums = add_norm_gradient_sums(rows, raw, last.output, sums)
            del rows
        assert sums is not None
        gradient = self.backward_norm(last, sums)
        out = y if g is None else g
        for start, stop in tiles:
            raw = self.layout.narrow_rows(y, start, stop)
            rows = self._activation_gradient(g, to_logits, start, stop, update=False)
            backward_norm_act(
                rows, raw, last.output, gradient, out=self.layout.narrow_rows(out, start, stop)
            )
            del rows
        last.raw.stored = None
        return out


def compute_input_gradient(layer: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of a layer's input, given that of its output."""
    if isinstance(layer, HasInputGradient):
        return layer.compute_input_gradient(x, grad)
    with torch.enable_grad():
        y = layer.forward(x.requires_grad_())
    y.backward(grad)
    assert x.grad is not None
    return x.grad


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in a wider dtype, which a GPU computes without rounding to that of a and b."""
    if a.dtype != dtype and get_device_type(a) == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _voxels(x: Tensor) -> Tensor:
    """(B, C, D, H, W) -> (B, D, H, W, C), the order of maps in memory."""
    return x.movedim(1, -1)


def _channels(x: Tensor) -> Tensor:
    """(B, D, H, W, C) -> (B, C, D, H, W)."""
    return x.movedim(-1, 1)
