"""Run a decoder level as one autograd node: upsampling, concatenation, convolutions, head."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.custom_ops import get_device_type
from unet3d.model.fused.convolution import cast_bias, cast_weight
from unet3d.model.fused.feature_maps import FeatureMap, restore_parts
from unet3d.model.fused.layers import GradientBuffer, Layers, add_parameter_gradient
from unet3d.model.fused.node import Block, run_block
from unet3d.model.fused.tiled_conv import Sink, add_norm_gradient_sums, backward_norm_act
from unet3d.model.fused.upsampling import UpsampledMap


def run_decoder_block(
    low: FeatureMap,
    skip: FeatureMap,
    up: nn.Module,
    convs: Sequence[nn.Module],
    head: nn.Conv3d | None,
    *,
    last: bool,
    mode: str,
    skip_first: bool = True,
) -> tuple[FeatureMap | None, Tensor | None]:
    """Return the map, unless the block is the `last` one, and the head's logits, if any."""
    block = Decoder(low, skip, up, convs, head, last, mode, skip_first)
    outputs = run_block(block, low.edge, skip.edge)
    logits = None if head is None else outputs.pop()
    return (FeatureMap(outputs[0], block.output) if outputs else None), logits


class Decoder(Block):
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
        skip_first: bool,
    ):
        super().__init__([*convs, up, *([] if head is None else [head])], skip.source.layout.device)
        self.up = UpsampledMap(up, low.source, skip.source.layout)
        self.skip, self.low = skip.source, low.source
        self.inputs = [skip.source, low.source]
        self.head, self.last, self.mode = head, last, mode
        self.skip_first = skip_first
        sources = self._order(skip.source, self.up)
        self.layers = Layers(convs, sources, self.gradients, stream=mode == "stream")

    def forward(self, *, needs_grad: bool) -> tuple[Tensor, ...]:
        self.layers.convolve(
            store_inner=self.mode == "store_all" and needs_grad,
            on_sources_read=partial(self._release_inputs, needs_grad),
        )
        self.output = self.layers.output
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
            restore_parts(source, for_decoder=True)

        def make_sinks(g: Tensor) -> list[Sink | None]:
            nonlocal to_low, to_skip
            to_skip = GradientBuffer(g, self.skip.channels, self.layout) if needs_grad[1] else None
            if not needs_grad[0] and not any(p.requires_grad for p in self.up.module.parameters()):
                return self._order(to_skip, None)
            to_low = self.low.layout.empty(self.low.channels).zero_()
            return self._order(to_skip, partial(self.up.gradient, low=to_low))

        n = len(self.layers.layers) - 1
        g, sums = self.layers.backward_conv(n, self._backward_head(g, to_logits), make_sinks)
        self.layers.backward(n, g, sums, make_sinks)
        for p, gradient in zip(self.up.module.parameters(), self.up.method.gradients, strict=False):
            self.gradients[p] = gradient
        self.skip.gradient = None if to_skip is None else to_skip.tensor
        return [to_low, self.skip.gradient, *self.parameter_gradients()]

    def _order(self, skip: Any, up: Any) -> list[Any]:
        """Return what belongs to the skip and to the upsampled map in the order of the inputs."""
        return [skip, up] if self.skip_first else [up, skip]

    def _release_inputs(self, needs_grad: bool) -> None:
        """Free what is not read again before backward."""
        for source in self.inputs:
            for part in source.parts():
                if part.drop_after_read or not needs_grad:
                    part.stored = None

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
            add_parameter_gradient(self.gradients, p, part)

    def _backward_head(self, g: Tensor | None, to_logits: Tensor | None) -> Tensor:
        """Return the gradient of the last raw output, in the memory of `g` or of that output."""
        last = self.layers.layers[-1]
        y, sums = last.raw.stored, None
        assert y is not None
        tiles = list(self.layout.tiles(self.output.channels))
        for start, stop in tiles:
            rows = self._activation_gradient(g, to_logits, start, stop, update=True)
            raw = self.layout.narrow_rows(y, start, stop)
            sums = add_norm_gradient_sums(rows, raw, last.output, sums)
            del rows
        assert sums is not None
        gradient = self.layers.backward_norm(last, sums)
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
