"""Run consecutive convolutions, each with its norm and activation, and their backward.

Only raw convolution outputs are stored; reading a map normalizes and activates it tile by tile. The
gradient stays in one buffer from the last layer to the first.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unet3d.model.fused import tiled_conv
from unet3d.model.fused.convolution import Convolution, FeatureMapSource
from unet3d.model.fused.feature_maps import ConvOutput, LazyActivation
from unet3d.model.fused.norms import Moments, NormGradient, fold_norm, make_stat_groups
from unet3d.model.fused.tiled_conv import Sink, add_norm_gradient_sums, backward_norm_act
from unet3d.model.fused.tiling import MapLayout

MakeSinks = Callable[[Tensor], Sequence[Sink | None]]
"""Given a buffer that may be overwritten, return the sink of each source's gradient."""


class Layer:
    """A convolution with its norm and activation, for the duration of a step."""

    def __init__(self, module: Any, sources: Sequence[FeatureMapSource]):
        self.module = module
        self.convolution = Convolution(module.conv, sources)
        self.raw = ConvOutput(self.convolution)
        self.output: LazyActivation

    def forward(self, *, store: bool, **residual: Any) -> LazyActivation:
        """Convolve, and compute the norm's statistics; store the raw output if `store`.

        `residual` are options of LazyActivation.
        """
        layout, channels = self.convolution.layout, self.module.conv.out_channels
        groups = make_stat_groups(self.module.norm, channels)
        moments = None if groups is None else Moments()
        if store or moments is not None:
            self.raw.stored = self.convolution.forward(store=store, moments=moments)
        like = torch.empty(
            layout.batch, channels, dtype=layout.accumulate_dtype, device=layout.device
        )
        norm = fold_norm(self.module.norm, self.module.act, self.module.conv.bias, moments, like)
        self.output = LazyActivation(self.raw, norm, **residual)
        return self.output


class GradientBuffer:
    """Collects a gradient's rows, in the memory of `g` if that has enough channels."""

    def __init__(self, g: Tensor | None, channels: int, layout: MapLayout):
        self.layout = layout
        reuse = g is not None and g.shape[1] >= channels
        self.tensor = (
            g.narrow(1, 0, channels) if g is not None and reuse else layout.empty(channels)
        )

    def __call__(self, rows: Tensor, start: int, stop: int) -> Tensor:
        if stop - start == self.layout.rows and rows._base is None:
            self.tensor = rows
        else:
            self.layout.narrow_rows(self.tensor, start, stop).copy_(rows)
        return rows


class GradientSum:
    """Adds a gradient's rows to `tensor`, which may have more columns."""

    def __init__(self, tensor: Tensor, layout: MapLayout):
        self.tensor, self.layout = tensor, layout

    def __call__(self, rows: Tensor, start: int, stop: int) -> Tensor:
        target = self.layout.narrow_rows(self.tensor, start, stop)
        for axis in (2, 3, 4):
            target = target.narrow(axis, 0, rows.shape[axis])
        return target.add_(rows)


def add_parameter_gradient(gradients: dict[Tensor, Tensor], p: Tensor, part: Tensor) -> None:
    """Add a part of a parameter's gradient to what there is of it."""
    gradients[p] = gradients[p].add_(part) if p in gradients else part


class Layers:
    """Consecutive layers; the first reads `sources`.

    `gradients` receives those of the parameters.
    """

    def __init__(
        self,
        modules: Sequence[Any],
        sources: Sequence[FeatureMapSource],
        gradients: dict[Tensor, Tensor],
        *,
        stream: bool = False,
    ):
        self.modules, self.sources, self.gradients = list(modules), list(sources), gradients
        self.is_streamed = stream  # outputs before the last are never stored as a whole
        self.layers: list[Layer] = []
        self.copies = 1  # of size-preserving convolutions

    @property
    def output(self) -> LazyActivation:
        """Return the last layer's output."""
        return self.layers[-1].output

    def convolve(
        self,
        *,
        store_inner: bool,
        on_sources_read: Callable[[], None] | None = None,
        **residual: Any,
    ) -> None:
        """Run all layers and store the last raw output, and the others if `store_inner`.

        `residual` are options of the last LazyActivation.
        """
        for n in range(len(self.modules)):
            is_last = n + 1 == len(self.modules)
            self.run_next(store=not self.is_streamed or is_last, **(residual if is_last else {}))
            # Streamed layers read the sources until the last one is done.
            if on_sources_read and (is_last or (n == 0 and not self.is_streamed)):
                on_sources_read()
        if not store_inner:
            self.free_inner()

    def run_next(
        self,
        *,
        store: bool,
        on_input: Callable[[Tensor, int, int], None] | None = None,
        **residual: Any,
    ) -> Layer:
        """Run the next layer, and store its raw output if `store` or if it has a stride.

        `on_input` is called with what a strided layer reads, tile by tile.
        """
        layer = Layer(
            self.modules[len(self.layers)], [self.output] if self.layers else self.sources
        )
        layer.convolution.on_input = on_input
        layer.convolution.copies = max(self.copies, layer.convolution.copies)
        layer.forward(store=store or layer.convolution.is_strided, **residual)
        layer.convolution.on_input = None
        self.layers.append(layer)
        return layer

    def free_inner(self) -> None:
        """Free the raw outputs before the last one."""
        for layer in self.layers[:-1]:
            layer.raw.stored = None

    def backward(
        self,
        layers: int,
        g: Tensor,
        sums: Tensor,
        make_sinks: MakeSinks,
        source: LazyActivation | None = None,
    ) -> Tensor | None:
        """Run the backward of the first `layers` layers, in the memory of `g`.

        `g` is the gradient of the last one's activation, `sums` what that layer's norm needs of it.
        With a `source`, the only one, return the sums that its norm needs.
        """
        for n in reversed(range(layers)):
            layer = self.layers[n]
            if layer.convolution.is_strided:
                self.backward_norm_in_place(layer, g, sums)
                return self.backward_conv(n, g, make_sinks)[1]
            activation = (layer.output, self.backward_norm(layer, sums))
            if layer.raw.stored is not None:
                backward_norm_act(g, layer.raw.stored, *activation, out=g)
                layer.raw.stored = activation = None
            g, sums = self.backward_conv(n, g, make_sinks, activation, source)
        return sums

    def backward_norm_in_place(self, layer: Layer, g: Tensor, sums: Tensor) -> None:
        """Turn the gradient of a layer's activation into that of its raw output, and free that."""
        layer.raw.restore()
        assert layer.raw.stored is not None
        gradient = self.backward_norm(layer, sums)
        backward_norm_act(g, layer.raw.stored, layer.output, gradient, out=g)
        layer.raw.stored = None

    def backward_norm(
        self, layer: Layer, sums: Tensor, factors: Tensor | None = None
    ) -> NormGradient:
        """Return the norm's gradient, and store those of its parameters.

        `factors`, one per volume, scale the norm's output.
        """
        gradient = layer.output.norm.gradient(sums if factors is None else sums * factors)
        if layer.module.conv.bias is not None:
            self.gradients[layer.module.conv.bias] = gradient.bias
        if getattr(layer.module.norm, "weight", None) is not None:
            self.gradients[layer.module.norm.weight] = gradient.weight
            self.gradients[layer.module.norm.bias] = gradient.shift
        return gradient if factors is None else replace(gradient, scale=gradient.scale * factors)

    def backward_conv(
        self,
        n: int,
        g: Tensor,
        make_sinks: MakeSinks,
        activation: tuple[LazyActivation, NormGradient] | None = None,
        source: LazyActivation | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the gradient of the previous layer's activation and its sums.

        The first layer's input gradient goes to the sinks instead; the sums are those that `source`
        needs, if that is given.
        """
        layer = self.layers[n]
        conv = layer.module.conv
        if layer.convolution.is_strided:  # the first layer
            weight_gradient = tiled_conv.backward_strided(
                layer.convolution, g, make_sinks(g)[0], needs_weight=conv.weight.requires_grad
            )
            if weight_gradient is not None:
                self.gradients[conv.weight] = weight_gradient
            return g, None
        previous = self.layers[n - 1] if n else None
        if previous is not None and (not self.is_streamed or previous.convolution.is_strided):
            previous.raw.restore()
        buffer = read = None
        if previous is not None:
            buffer = GradientBuffer(g, conv.in_channels, layer.convolution.layout)
            read = previous.output if previous.raw.stored is None else None
        weight_gradient, sums = tiled_conv.backward(
            layer.convolution,
            g,
            make_sinks(g) if buffer is None else [buffer],
            needs_weight=conv.weight.requires_grad,
            activation=activation,
            previous=source if previous is None else read,
        )
        if weight_gradient is not None:
            self.gradients[conv.weight] = weight_gradient
        if previous is None or buffer is None:
            return g, sums
        if previous.raw.stored is not None:
            y = previous.raw.stored
            sums = add_norm_gradient_sums(buffer.tensor, y, previous.output, None)
        assert sums is not None
        return buffer.tensor, sums
