"""Run consecutive convolutions, each with its norm and activation, and their backward.

Only raw convolution outputs are stored; reading a map normalizes and activates it tile by tile. The
gradient stays in one buffer from the last layer to the first.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from unet3d.model.fused.convolution import Convolution, GradientSink
from unet3d.model.fused.feature_maps import ConvOutput, LazyActivation
from unet3d.model.fused.norms import (
    FoldedNorm,
    NormGradient,
    fold_norm,
    make_moments,
    make_stat_groups,
)
from unet3d.model.fused.tiling import MapLayout

MakeGradientSinks = Callable[[Tensor], Sequence[GradientSink | None]]
"""Given a buffer that may be overwritten, return the sink of each source's gradient."""


class ParameterGradients:
    """Collects the gradients of parameters, in any shape and at least in float32.

    The parameters are those of this forward: torch.func.functional_call replaces them until it
    returns, and a tensor in place of a parameter is not among those of its module.
    """

    def __init__(self, modules: Sequence[nn.Module]):
        parts = [part for module in modules for part in module.modules()]
        found = [getattr(part, name, None) for part in parts for name in ("weight", "bias")]
        # Convolutions may share a parameter: its gradient is the sum of their parts.
        self.parameters = list(dict.fromkeys(p for p in found if p is not None))
        self.sums: dict[Tensor, Tensor] = {}

    def add(self, p: Tensor | None, part: Tensor | None) -> None:
        """Add a part of a parameter's gradient, if there are both."""
        if p is None or part is None:
            return
        if p in self.sums:
            self.sums[p].add_(part.reshape(self.sums[p].shape))
        else:
            self.sums[p] = part

    def collect(self) -> list[Tensor | None]:
        """Return the gradients in the order, shape and dtype of the parameters."""
        gradients = [self.sums.get(p) if p.requires_grad else None for p in self.parameters]
        return [
            None if g is None else g.reshape(p.shape).to(p.dtype)
            for p, g in zip(self.parameters, gradients, strict=True)
        ]


class GradientBuffer:
    """Collects a gradient's rows, in the memory of `g` if that has enough channels."""

    def __init__(self, g: Tensor | None, channels: int, layout: MapLayout):
        self.layout = layout
        if g is not None and g.shape[1] >= channels:
            self.tensor = g.narrow(1, 0, channels)
        else:
            self.tensor = layout.empty(channels)

    def __call__(self, rows: Tensor, start: int, stop: int) -> Tensor:
        owns_memory = rows.untyped_storage().nbytes() == rows.numel() * rows.itemsize
        if self.layout.is_whole and stop - start == self.layout.rows and owns_memory:
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


class ConvChain:
    """Consecutive layers; the first reads `sources`."""

    def __init__(
        self,
        modules: Sequence[Any],
        sources: Sequence[Any],
        gradients: ParameterGradients,
        *,
        inner: str = "store",
        copies: int = 1,
    ):
        self.modules, self.sources, self.gradients = list(modules), list(sources), gradients
        self.inner, self.copies = inner, copies  # policy of outputs before the last; tiles at once
        self.outputs: list[LazyActivation] = []  # of layers that have run
        self.parameters: list[list[Tensor | None]] = []  # of these: all but the weights

    @property
    def output(self) -> LazyActivation:
        """Return the last layer's output."""
        return self.outputs[-1]

    @property
    def is_strided(self) -> bool:
        """Return whether the first layer has a stride."""
        return self.outputs[0].raw.convolution.is_strided

    def convolve(
        self, *, needs_grad: bool, on_sources_read: Callable[[], None] | None = None
    ) -> None:
        """Run all layers; store the last raw output and, for backward, what the policy says."""
        for n in range(len(self.modules)):
            self.run_next()
            # Streamed layers read the sources until the last one is done.
            is_read = n + 1 == len(self.modules) or (n == 0 and self.inner != "stream")
            if on_sources_read and is_read:
                on_sources_read()
        self.free_inner(needs_grad=needs_grad)

    def run_next(
        self,
        *,
        on_input: Callable[[Tensor, int, int], None] | None = None,
        **residual: Any,
    ) -> None:
        """Run the next layer, and store its raw output if that is not streamed.

        `on_input` is called with what a strided layer reads, tile by tile. `residual` are options
        of LazyActivation.
        """
        module, *others = self.modules[len(self.outputs) :]
        sources = [self.output] if self.outputs else self.sources
        convolution = Convolution(module.conv, sources, self.copies)
        groups = make_stat_groups(module.norm, module.conv.out_channels)
        moments = make_moments(module.norm, groups, convolution.layout)
        raw = ConvOutput(convolution)
        store = not others or self.inner != "stream" or convolution.is_strided
        if store or moments is not None:
            raw.stored = convolution.forward(store=store, moments=moments, on_input=on_input)
        like = convolution.layout.empty_numbers(module.conv.out_channels)
        norm = fold_norm(module.norm, module.act, module.conv.bias, groups, moments, like)
        affine = [getattr(module.norm, name, None) for name in ("weight", "bias")]
        self.parameters.append([module.conv.bias, *affine])
        self.outputs.append(LazyActivation(raw, norm, **residual))

    def free_inner(self, *, needs_grad: bool) -> None:
        """Free the raw outputs before the last one, unless they are stored for backward."""
        if self.inner != "store" or not needs_grad:
            for output in self.outputs[:-1]:
                output.raw.stored = None

    def backward(
        self,
        layers: int,
        g: Tensor,
        sums: Tensor,
        make_sinks: MakeGradientSinks,
        source: FoldedNorm | None = None,
    ) -> Tensor | None:
        """Run the backward of the first `layers` layers, in the memory of `g`.

        `g` is the gradient of the last one's activation, `sums` what that layer's norm needs of it.
        With a `source`, the norm of the only one, return the sums that it needs.
        """
        for n in reversed(range(layers)):
            raw = self.outputs[n].raw
            if raw.convolution.is_strided:
                self.backward_norm_in_place(n, g, sums)
                return self.backward_conv(n, g, make_sinks)[1]
            activation = self.backward_norm(n, sums)
            if raw.stored is not None:
                activation.apply(g, raw.stored, out=g)
                raw.stored = activation = None
            g, sums = self.backward_conv(n, g, make_sinks, activation, source)
        return sums

    def backward_norm_in_place(self, n: int, g: Tensor, sums: Tensor) -> None:
        """Turn the gradient of an activation into that of the raw output, and free that."""
        raw = self.outputs[n].raw
        raw.restore()
        assert raw.stored is not None
        self.backward_norm(n, sums).apply(g, raw.stored, out=g)
        raw.stored = None

    def backward_norm(self, n: int, sums: Tensor, factors: Tensor | None = None) -> NormGradient:
        """Return the norm's gradient, and add those of its parameters.

        `factors`, one per volume, scale the norm's output.
        """
        gradient = self.outputs[n].norm.gradient(sums if factors is None else sums * factors)
        parts = (gradient.bias, gradient.weight, gradient.shift)
        for parameter, part in zip(self.parameters[n], parts, strict=True):
            self.gradients.add(parameter, part)
        return gradient if factors is None else replace(gradient, scale=gradient.scale * factors)

    def backward_conv(
        self,
        n: int,
        g: Tensor,
        make_sinks: MakeGradientSinks = lambda _: [None],
        activation: NormGradient | None = None,
        source: FoldedNorm | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the gradient of the previous layer's activation and its sums.

        The first layer's input gradient goes to the sinks instead; the sums are those that `source`
        needs, if that is given.
        """
        convolution = self.outputs[n].raw.convolution
        weight = convolution.parameter
        if convolution.is_strided:  # the first layer
            self.gradients.add(weight, convolution.backward_strided(g, make_sinks(g)[0]))
            return g, None
        if n == 0:
            weight_gradient, sums = convolution.backward(g, make_sinks(g), activation, source)
            self.gradients.add(weight, weight_gradient)
            return g, sums
        norm, raw = self.outputs[n - 1].norm, self.outputs[n - 1].raw
        if self.inner not in ("recompute_tiled", "stream") or raw.convolution.is_strided:
            raw.restore()
        buffer = GradientBuffer(g, convolution.module.in_channels, convolution.layout)
        read = norm if raw.stored is None else None
        weight_gradient, sums = convolution.backward(g, [buffer], activation, read)
        self.gradients.add(weight, weight_gradient)
        if raw.stored is not None:
            sums = norm.add_gradient_sums(buffer.tensor, raw.stored, None)
        assert sums is not None
        return buffer.tensor, sums
