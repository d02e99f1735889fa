"""Encoder and decoder blocks, each one node of autograd.

A block keeps raw convolution outputs and nothing else; whoever reads a map normalises and activates
it on demand, a slab at a time. Its gradient lives in one buffer from the block's end to its
beginning. Which outputs are kept, and which are redone, is told by a word for each block.
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

from unet3d.model.lean import tiled_conv as by_slabs
from unet3d.model.lean.feature_maps import (
    Convolution,
    ConvOutput,
    LazyActivation,
    Map,
    MapSource,
    StoredMap,
    cast_weights,
)
from unet3d.model.lean.norms import Gradient, Moments, fold_norm, make_stat_groups
from unet3d.model.lean.tiled_conv import Sink, backward_norm_act, compute_norm_gradient_sums
from unet3d.model.lean.tiling import MapLayout, longest_axis
from unet3d.model.lean.upsampling import Upsampled
from unet3d.types import Triple


def make_input_map(x: Tensor, dtype: torch.dtype) -> Map:
    """The network's input as the first map; without autocast the step computes in `dtype`."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else dtype
    d, h, w = x.shape[2:]
    space = MapLayout(len(x), (d, h, w), longest_axis((d, h, w)), dtype, x.device)
    return Map(x, StoredMap(x.detach(), space))


def run_encoder_block(
    x: Map, convs: Sequence[nn.Module], pool: nn.Module | None, window: Triple, keep: str
) -> tuple[Map, Map]:
    """The pooled map (the map itself where nothing pools it) and the map."""
    block = _Encoder(x, convs, pool, window, keep)
    *small, edge = _Node.apply(block, x.edge, *block.parameters)
    skip = Map(edge, block.output)
    if not small:
        return skip, skip
    size = tuple(small[0].shape[2:])
    space = replace(block.space, size=size)
    return Map(small[0], StoredMap(small[0].detach(), space)), skip


def run_decoder_block(
    low: Map,
    skip: Map,
    up: nn.Module,
    convs: Sequence[nn.Module],
    head: nn.Conv3d | None,
    *,
    last: bool,
    keep: str,
) -> tuple[Map | None, Tensor | None]:
    """The map, unless it is the `last`, and the head's logits."""
    block = _Decoder(low, skip, up, convs, head, last, keep)
    outputs = list(_Node.apply(block, low.edge, skip.edge, *block.parameters))
    logits = None if head is None else outputs.pop()
    return (Map(outputs[0], block.output) if outputs else None), logits


Sinks = Callable[[Tensor], list[Sink | None]]
"""Who takes the gradient of each source, given the buffer that may be written over."""


class _Node(Function):
    """A block in autograd's graph; the block itself knows the way back."""

    @staticmethod
    def forward(ctx: Any, block: "_Encoder | _Decoder", *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.block = block
        with torch.autocast(block.space.device.type, enabled=False):
            return block.forward(needed=any(ctx.needs_input_grad))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        block, ctx.block = ctx.block, None
        if block is None:
            raise RuntimeError(
                "a lean block was asked for its gradient twice, and it keeps nothing after the "
                "first: leave out retain_graph=True, or use checkpointing=blocks"
            )
        with torch.autocast(block.space.device.type, enabled=False):
            return None, *block.backward(list(gradients), ctx.needs_input_grad[1:])


class _Layer:
    """A convolution with its norm and activation, while a step lasts."""

    def __init__(self, module: Any, sources: Sequence[MapSource]):
        self.module = module
        self.convolution = Convolution(module.conv, sources)
        self.raw = ConvOutput(self.convolution)
        self.output: LazyActivation

    def forward(self, *, whole: bool) -> LazyActivation:
        """Convolve, and know the norm; the raw output stays only if it is wanted `whole`."""
        space, channels = self.convolution.space, self.module.conv.out_channels
        sets = make_stat_groups(self.module.norm, channels)
        moments = None if sets is None else Moments()
        if whole or moments is not None:
            self.raw.kept = self.convolution.forward(keep=whole, moments=moments)
        like = torch.empty(space.batch, channels, dtype=space.accumulate_dtype, device=space.device)
        self.output = LazyActivation(
            self.raw, fold_norm(self.module.norm, self.module.act, moments, like)
        )
        return self.output


class _Buffer:
    """Takes a gradient's rows, in the memory of another one if that has enough channels."""

    def __init__(self, g: Tensor | None, channels: int, space: MapLayout):
        self.space = space
        fits = g is not None and g.shape[1] >= channels
        self.whole = g.narrow(1, 0, channels) if g is not None and fits else space.empty(channels)

    def __call__(self, rows: Tensor, start: int, stop: int) -> None:
        if stop - start == self.space.rows and rows._base is None:
            self.whole = rows
        else:
            self.space.narrow_rows(self.whole, start, stop).copy_(rows)


class _Block:
    """What encoder and decoder share: convolutions in a row."""

    def __init__(self, convs: Sequence[Any], sources: Sequence[MapSource], keep: str):
        self.convs, self.sources, self.keep = list(convs), list(sources), keep
        self.whole = keep != "stream"  # whether outputs before the last are ever in memory as such
        self.space = sources[0].space
        self.parameters = [p for module in self.convs for p in module.parameters()]
        self.layers: list[_Layer] = []
        self.read: list[LazyActivation] = []  # sources that may be kept until they are read
        self.found: dict[Tensor, Tensor] = {}

    @property
    def output(self) -> LazyActivation:
        return self.layers[-1].output

    def convolve(self, *, needed: bool) -> None:
        """All of the layers; the last raw output is whole. What nobody will need is let go."""
        sources = self.sources
        for n, module in enumerate(self.convs, start=1):
            layer = _Layer(module, sources)
            sources = [layer.forward(whole=self.whole or n == len(self.convs))]
            self.layers.append(layer)
            if n == len(self.convs) or (n == 1 and self.whole):
                for source in self.read:
                    if source.raw.brief or not needed:
                        source.raw.kept = None
        if self.keep != "store_all" or not needed:
            for layer in self.layers[:-1]:
                layer.raw.kept = None

    def edge(self) -> Tensor:
        """An edge of autograd's graph: the map's shape, and the memory of one element."""
        one = torch.zeros(1, dtype=self.space.dtype, device=self.space.device)
        return one.expand(self.space.batch, self.output.channels, *self.space.size)

    def back(self, layers: int, g: Tensor, sums: Tensor, sinks: Sinks) -> None:
        """From the gradient of an activation, that of the last of so many layers, to the sources'.

        It happens in the memory of `g`; `sums` are what that layer's norm needs to know of it.
        """
        for n in reversed(range(layers)):
            layer = self.layers[n]
            step = self.through_norm(layer, sums)
            through = (layer.output, step)
            if layer.raw.kept is not None:
                backward_norm_act(g, layer.raw.kept, *through, out=g)
                layer.raw.kept = through = None
            g, sums = self.through_convolution(n, g, sinks, through)

    def through_norm(self, layer: _Layer, sums: Tensor) -> Gradient:
        """Note the gradients of what the norm learns."""
        step = layer.output.norm.gradient(sums)
        if layer.module.conv.bias is not None:
            self.found[layer.module.conv.bias] = step.bias
        if getattr(layer.module.norm, "weight", None) is not None:
            self.found[layer.module.norm.weight] = step.weight
            self.found[layer.module.norm.bias] = step.shift
        return step

    def through_convolution(
        self,
        n: int,
        g: Tensor,
        sinks: Sinks,
        through: tuple[LazyActivation, Gradient] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the layer before, with its sums; of the first layer, it goes to sinks."""
        layer = self.layers[n]
        below = self.layers[n - 1] if n else None
        if below is not None and self.whole:
            below.raw.restore()
        buffer = None if below is None else _Buffer(g, layer.module.conv.in_channels, self.space)
        to_weight, sums = by_slabs.backward(
            layer.convolution,
            g,
            sinks(g) if buffer is None else [buffer],
            weight=layer.module.conv.weight.requires_grad,
            through=through,
            below=None if below is None or self.whole else below.output,
        )
        if to_weight is not None:
            self.found[layer.module.conv.weight] = to_weight
        if below is None or buffer is None:
            return g, torch.empty(0)
        if below.raw.kept is not None:
            sums = compute_norm_gradient_sums(buffer.whole, below.raw.kept, below.output)
        assert sums is not None
        return buffer.whole, sums

    def gradients(self) -> list[Tensor | None]:
        """In the order and the type of the parameters."""
        found = [self.found.get(p) if p.requires_grad else None for p in self.parameters]
        return [
            None if g is None else g.reshape(p.shape).to(p.dtype)
            for p, g in zip(self.parameters, found, strict=True)
        ]


class _Encoder(_Block):
    """Convolutions, then a pooling."""

    def __init__(
        self, x: Map, convs: Sequence[Any], pool: nn.Module | None, window: Triple, keep: str
    ):
        super().__init__(convs, [x.source], keep)
        self.pool, self.window = pool, window

    def forward(self, *, needed: bool) -> tuple[Tensor, ...]:
        self.convolve(needed=needed)
        small = None if self.pool is None else self._pooled(self.pool)
        if self.keep == "stream":
            self.output.raw.kept = None
        elif self.keep == "offload" and needed and small is not None:
            self.output.raw.offload()
        self.output.raw.brief = self.keep in ("recompute", "recompute_tiled")
        self.output.raw.again = self.keep == "recompute"
        return (self.edge(),) if small is None else (small, self.edge())

    def backward(
        self, gradients: list[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        g = gradients.pop()
        to_small = gradients.pop() if self.pool is not None else None
        if self.whole:
            self.layers[-1].raw.restore()
        if g is None:
            g = self.space.empty(self.output.channels).zero_()
        sums = self._join(g, to_small)
        buffer = _Buffer(None, self.sources[0].channels, self.space) if needed[0] else None
        self.back(len(self.layers), g, sums, lambda _: [buffer])
        return [None if buffer is None else buffer.whole, *self.gradients()]

    def _pooled(self, pool: nn.Module) -> Tensor:
        """By slabs of whole windows."""
        small = None
        for start, stop in self._windows():
            rows = pool.forward(self.output.rows(start, stop))  # a part of this block: no hooks
            if stop - start == self.space.rows:
                return rows
            if small is None:
                size = [n // w for n, w in zip(self.space.size, self.window, strict=True)]
                small = rows.new_empty(*rows.shape[:2], *size)
            window = self.window[self.space.axis - 2]
            self.space.narrow_rows(small, start // window, stop // window).copy_(rows)
        assert small is not None
        return small

    def _join(self, g: Tensor, to_small: Tensor | None) -> Tensor:
        """Add to `g` what comes back through the pooling; the sums that the norm needs."""
        output, window = self.output, self.window[self.space.axis - 2]
        sums = None
        for start, stop in self._windows():
            y, rows = output.raw.rows(start, stop), self.space.narrow_rows(g, start, stop)
            if self.pool is not None and to_small is not None:
                part = self.space.narrow_rows(to_small, start // window, stop // window)
                a = output.activate(
                    y, self.space.empty(output.channels, stop - start)
                ).requires_grad_()
                with torch.enable_grad():
                    small = self.pool.forward(a)
                small.backward(part)
                assert a.grad is not None
                rows.add_(a.grad)
                del a, small
            more = compute_norm_gradient_sums(rows, y, output)
            sums = more if sums is None else sums.add_(more)
        assert sums is not None
        return sums

    def _windows(self) -> Iterator[tuple[int, int]]:
        """Slabs that end where a pooling window does, or where the map does."""
        multiple = 1 if self.pool is None else self.window[self.space.axis - 2]
        return self.space.slabs(self.output.channels, multiple=multiple)


class _Decoder(_Block):
    """Upsampling, the skip, convolutions, and a 1x1x1 head at some levels."""

    def __init__(
        self,
        low: Map,
        skip: Map,
        up: nn.Module,
        convs: Sequence[Any],
        head: nn.Conv3d | None,
        last: bool,
        keep: str,
    ):
        self.up = Upsampled(up, low.source, skip.source.space)
        super().__init__(convs, [skip.source, self.up], keep)
        self.skip, self.low = skip.source, low.source
        self.read = [skip.source, low.source]
        self.head, self.last = head, last
        self.parameters += [*up.parameters(), *([] if head is None else head.parameters())]

    def forward(self, *, needed: bool) -> tuple[Tensor, ...]:
        self.convolve(needed=needed)
        outputs = [] if self.last else [self.edge()]
        if self.head is not None:
            outputs.append(self._logits(self.head))
        return tuple(outputs)

    def backward(
        self, gradients: list[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        to_logits = gradients.pop() if self.head is not None else None
        g = None if self.last else gradients.pop()
        to_low = to_skip = None
        for source in self.read:
            if source.raw.again:
                source.raw.restore()

        def sinks(g: Tensor) -> list[Sink | None]:
            nonlocal to_low, to_skip
            to_skip = _Buffer(g, self.skip.channels, self.space) if needed[1] else None
            if not needed[0] and not any(p.requires_grad for p in self.up.module.parameters()):
                return [to_skip, None]
            to_low = self.low.space.empty(self.low.channels).zero_()
            return [to_skip, partial(self.up.gradient, low=to_low)]

        n = len(self.layers) - 1
        g, sums = self.through_convolution(n, self._through_head(g, to_logits), sinks)
        self.back(n, g, sums, sinks)
        for p, found in zip(self.up.module.parameters(), self.up.way.gradients, strict=False):
            self.found[p] = found
        return [to_low, None if to_skip is None else to_skip.whole, *self.gradients()]

    def _logits(self, head: nn.Conv3d) -> Tensor:
        weight, bias = cast_weights(head, self.space.dtype)
        logits = self.space.empty(head.out_channels).contiguous()  # as the loss reads them
        for start, stop in self.space.slabs(self.output.channels):
            rows = F.linear(_voxels(self.output.rows(start, stop)), weight.flatten(1), bias)
            self.space.narrow_rows(logits, start, stop).copy_(_channels(rows))
        return logits

    def _from_head(
        self, g: Tensor | None, to_logits: Tensor | None, start: int, stop: int, *, learn: bool
    ) -> Tensor:
        """Rows of the last activation's gradient; those in `g` are completed while it learns."""
        rows = None if g is None else self.space.narrow_rows(g, start, stop)
        if self.head is None or to_logits is None:
            none = rows is None
            return self.space.empty(self.output.channels, stop - start).zero_() if none else rows
        if rows is not None and not learn:
            return rows
        weight, _ = cast_weights(self.head, self.space.dtype)
        weight = weight.flatten(1)
        part = _voxels(self.space.narrow_rows(to_logits, start, stop)).contiguous()
        if learn:
            self._learn(self.head, part, _voxels(self.output.rows(start, stop)))
        made = _channels(part @ weight)
        return made if rows is None else rows.add_(made)

    def _learn(self, head: nn.Conv3d, g: Tensor, a: Tensor) -> None:
        """The gradients of the head, from (B, D, H, W, K) and (B, D, H, W, C)."""
        g, wide = g.flatten(0, 3), self.space.accumulate_dtype
        found: dict[Tensor, Tensor] = {head.weight: (g.t() @ a.flatten(0, 3)).to(wide)}
        if head.bias is not None:
            found[head.bias] = g.sum(0, dtype=wide)
        for p, more in found.items():
            self.found[p] = self.found[p].add_(more) if p in self.found else more

    def _through_head(self, g: Tensor | None, to_logits: Tensor | None) -> Tensor:
        """The gradient of the last raw output, in the memory of `g` or of that output itself."""
        last = self.layers[-1]
        y, sums = last.raw.kept, None
        assert y is not None
        slabs = list(self.space.slabs(self.output.channels))
        for start, stop in slabs:
            rows = self._from_head(g, to_logits, start, stop, learn=True)
            more = compute_norm_gradient_sums(
                rows, self.space.narrow_rows(y, start, stop), last.output
            )
            sums = more if sums is None else sums.add_(more)
            del rows
        assert sums is not None
        step = self.through_norm(last, sums)
        into = y if g is None else g
        for start, stop in slabs:
            raw = self.space.narrow_rows(y, start, stop)
            rows = self._from_head(g, to_logits, start, stop, learn=False)
            backward_norm_act(
                rows, raw, last.output, step, out=self.space.narrow_rows(into, start, stop)
            )
            del rows
        last.raw.kept = None
        return into


def _voxels(x: Tensor) -> Tensor:
    """(B, C, D, H, W) -> (B, D, H, W, C), which is how maps lie in memory."""
    return x.movedim(1, -1)


def _channels(x: Tensor) -> Tensor:
    """(B, D, H, W, C) -> (B, C, D, H, W)."""
    return x.movedim(-1, 1)
