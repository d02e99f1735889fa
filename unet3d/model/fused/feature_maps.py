"""Define feature maps that return any of their rows on demand: stored or recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unet3d.model.fused import operators
from unet3d.model.fused.convolution import Convolution
from unet3d.model.fused.norms import FoldedNorm
from unet3d.model.fused.tiling import MapLayout
from unet3d.pool.operators import Pool3d
from unet3d.types import Triple


class FeatureMap(NamedTuple):
    """A map between blocks: its place in autograd's graph, and its values."""

    # Has the map's shape and the memory of one element, unless it is that of a StoredFeatureMap.
    placeholder: Tensor
    source: Any  # a StoredFeatureMap where it is an input, else a LazyActivation


class Part:
    """A tensor that a map is computed from; it can be dropped, and restored."""

    stored: Tensor | None = None
    keep: str | None = "store"
    """A policy of unet3d.types.Retention; None: recompute a few rows wherever they are read."""

    def restore(self) -> None:
        """Recompute it if it was dropped."""

    def parts(self) -> Iterator[Part]:
        """Yield what a map is computed from; later parts are needed to restore earlier ones."""
        yield self


class StoredFeatureMap(Part):
    """A map in memory: the image, the output of a pooling layer, or any map without gradient."""

    width = 0
    gradient: Tensor | None = None

    @property
    def whole(self) -> Tensor | None:
        """Return the map, if it is in memory as a convolution reads it."""
        x = self.stored
        assert x is not None
        is_dense = x.is_contiguous(memory_format=torch.channels_last_3d)
        is_ready = is_dense and x.stride(1) == 1 and x.dtype == self.layout.dtype
        return x if is_ready else None

    def __init__(self, x: Tensor, layout: MapLayout):
        self.stored = x
        self.layout, self.channels = layout, x.shape[1]

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        out.copy_(self.rows(start, stop))

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) as a view."""
        assert self.stored is not None
        return self.layout.narrow_rows(self.stored, start, stop)


class ConvOutput(Part):
    """A convolution's output before its norm: in memory, or recomputed."""

    def __init__(self, convolution: Convolution):
        self.convolution = convolution

    def restore(self) -> None:
        if self.stored is None:
            self.stored = self.convolution.forward(store=True, moments=None)

    def rows(self, start: int, stop: int) -> Tensor:
        if self.stored is not None:
            return self.convolution.layout.narrow_rows(self.stored, start, stop)
        return self.convolution.rows(start, stop)


class LazyActivation:
    """A convolution's output that is normalized and activated each time it is read.

    With a `skip`, that map is added before the activation, which has the negative slope `slope`;
    `factors`, one per volume, scale what it is added to.
    """

    whole = None

    def __init__(
        self,
        raw: ConvOutput,
        norm: FoldedNorm,
        *,
        skip: LazyActivation | PooledMap | StoredFeatureMap | None = None,
        slope: float | None = None,
        factors: Tensor | None = None,
    ):
        self.raw, self.norm, self.skip = raw, norm, skip
        self.layout, self.channels = raw.convolution.layout, raw.convolution.module.out_channels
        self.slope = norm.slope if slope is None else slope
        self.factors = None if factors is None else factors[:, None].to(norm.scale.dtype)
        self.scale, self.shift = norm.scale, norm.shift
        if self.factors is not None:
            self.scale, self.shift = norm.scale * self.factors, norm.shift * self.factors
        self.gradient: Tensor | None = None
        """The gradient of the decoder; a next level that reads this map with stride adds to it."""

    @property
    def width(self) -> int:
        """Return the number of channels in memory at a time for a row that is read."""
        own = self.raw.convolution.width if self.raw.stored is None else 0
        return max(own, self.skip.width if self.skip is not None else 0)

    @property
    def keep(self) -> str | None:
        """Return the policy of the raw output, without which the map cannot be read."""
        return self.raw.keep

    def parts(self) -> Iterator[Part]:
        """Yield the raw output and the parts of the skip."""
        if self.raw.keep is not None:
            yield self.raw
        if self.skip is not None:
            yield from self.skip.parts()

    def fill(self, out: Tensor, start: int, stop: int) -> Tensor:
        """Write rows [start, stop) to `out`; return the raw rows."""
        y = self.raw.rows(start, stop)
        self.activate(y, out, start, stop)
        return y

    def activate(self, y: Tensor, out: Tensor, start: int, stop: int) -> None:
        """Normalize, add and activate raw rows `y`, which are rows [start, stop), into `out`."""
        terms: list[LazyActivation] = [self]
        maps, skip = [y], self.skip
        while isinstance(skip, LazyActivation) and skip.raw.stored is not None:
            if len(terms) == operators.MAX_TERMS:
                break
            terms.insert(0, skip)
            maps.insert(0, skip.raw.rows(start, stop))
            skip = skip.skip
        if skip is not None:
            skip.fill(out, start, stop)
        scales, shifts, slopes = zip(*((t.scale, t.shift, t.slope) for t in terms), strict=True)
        operators.normalize(maps, scales, shifts, slopes, skip is not None, out)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) as a new tensor."""
        out = self.layout.empty(self.channels, stop - start)
        self.fill(out, start, stop)
        return out


class PooledMap(Part):
    """The pooling of a finer map, computed as a whole when its first row is read.

    If `is_transient`, it is freed when its last row has been read.
    """

    whole, width = None, 0
    keep = "recompute"

    def __init__(self, pool: nn.Module, kernel_size: Triple, finer: Any, *, is_transient: bool):
        self.pool, self.kernel_size, self.finer = pool, kernel_size, finer
        self.layout, self.channels = finer.layout.shrink(kernel_size), finer.channels
        self.is_transient = is_transient

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        self.restore()
        assert self.stored is not None
        out.copy_(self.layout.narrow_rows(self.stored, start, stop))
        if self.is_transient and stop == self.layout.rows:
            self.stored = None

    def pool_rows(self, x: Tensor, start: int, stop: int) -> None:
        """Compute rows [start, stop) from the rows of the finer map that they pool."""
        if self.stored is None:
            self.stored = self.layout.empty(self.channels)
        out = self.layout.narrow_rows(self.stored, start, stop)
        pool_volumes(self.pool, x, out, at_once=self.layout.is_whole)

    def restore(self) -> None:
        if self.stored is None:
            self.stored = pool_map(self.finer, self.pool, self.kernel_size)


def free_parts(source: Any, *policies: str) -> None:
    """Free what a map is computed from, where it is kept by one of these policies."""
    for part in source.parts():
        if part.keep in policies:
            part.stored = None


def restore_parts(source: Any, *policies: str) -> None:
    """Recompute what a map is computed from, where it is kept by one of these policies."""
    for part in reversed(list(source.parts())):
        if part.keep in policies:
            part.restore()


def pool_map(source: Any, pool: nn.Module, kernel_size: Triple) -> Tensor:
    """Pool a map tile by tile."""
    small, layout = None, source.layout
    kernel = kernel_size[layout.axis - 2]
    for start, stop in layout.tiles(max(source.channels, source.width), multiple=kernel):
        # Not a call of the module: hooks of a fused block's modules never run.
        rows = pool.forward(source.rows(start, stop))
        if stop - start == layout.rows:
            return rows
        if small is None:
            small = rows.new_empty(*rows.shape[:2], *layout.shrink(kernel_size).size)
        layout.narrow_rows(small, start // kernel, stop // kernel).copy_(rows)
    assert small is not None
    return small


def pool_volumes(pool: nn.Module, x: Tensor, out: Tensor, *, at_once: bool) -> None:
    """Write the pooling of some rows to `out`, one volume at a time or `at_once`.

    The rows of a batch are dense only if they are the whole map: the pooling copies others.
    """
    size = len(x) if at_once else 1
    for volume, target in zip(x.split(size), out.split(size), strict=True):
        target.copy_(pool.forward(volume))


def compute_input_gradient(layer: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of a layer's input, given that of its output."""
    if isinstance(layer, Pool3d) and type(layer).forward is Pool3d.forward:
        return layer.compute_input_gradient(x, grad)  # without an autograd graph
    with torch.enable_grad():
        y = layer.forward(x.requires_grad_())
    y.backward(grad)
    assert x.grad is not None
    return x.grad
