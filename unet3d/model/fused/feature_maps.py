"""Define feature maps that return any of their rows on demand: stored, on the host, recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from unet3d.model.fused import operators
from unet3d.model.fused.convolution import Convolution
from unet3d.model.fused.norms import FoldedNorm
from unet3d.model.fused.tiling import MapLayout
from unet3d.types import Triple

CHUNK_BYTES = 4 * 2**20
"""Size of a copy for one volume: enough to saturate the bus, small next to a map."""


@cache
def get_copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that copies maps to and from the host."""
    return torch.cuda.Stream(device)


class FeatureMap(NamedTuple):
    """A map between blocks: its place in autograd's graph, and its values."""

    # Has the map's shape and the memory of one element, unless it is that of a StoredFeatureMap.
    placeholder: Tensor
    source: Any  # a StoredFeatureMap where it is an input, else a LazyActivation


class Part:
    """A tensor that a map is computed from; it can be dropped or offloaded, and restored."""

    stored: Tensor | None = None
    drop_after_read = False  # free it once the decoder has read it
    restore_for_decoder = False  # bring it back as a whole for the decoder's backward

    def restore(self) -> None:
        """Bring it back to the device, from the host or by recomputing it."""


class StoredFeatureMap(Part):
    """A map in memory: the image, the output of a pooling layer, or any map without gradient."""

    width = 0
    is_dropped = False
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

    def parts(self) -> Iterator[Part]:
        """Yield the map itself."""
        yield self

    def finish_downsampling(self) -> None:
        """Do nothing: only blocks have outputs that change where they are stored."""


class HostFeatureMap:
    """A map in pinned host memory, copied on a stream of its own, concurrently with the work.

    The GPU holds the map until its copy is done, then the chunk that is read and its neighbors. The
    working stream waits for a copy before its memory is freed, so how much memory is in use does
    not depend on how far the CPU has run ahead of the GPU.
    """

    def __init__(self, x: Tensor, layout: MapLayout):
        self.layout, self.channels = layout, x.shape[1]
        row_bytes = layout.get_row_bytes(self.channels)
        self.step = min(max(1, CHUNK_BYTES // row_bytes), layout.rows)
        self.chunks: list[list[Tensor]] = []  # per chunk, one tensor per volume
        self.in_flight: list[Tensor] = []  # must live until the copy to the host is done
        self.on_device: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}  # by chunk
        pinned = x.is_cuda or isinstance(x, FakeTensor)
        for start in range(0, layout.rows, self.step):
            rows = layout.narrow_rows(x, start, min(start + self.step, layout.rows))
            # Rows along D are views; rows along H are strided and copied here.
            parts = [v.contiguous(memory_format=torch.channels_last_3d) for v in rows.split(1)]
            chunk = [torch.empty_like(part, device="cpu", pin_memory=pinned) for part in parts]
            self._copy(parts, chunk)
            self.in_flight += parts
            self.chunks.append(chunk)
        self.offloaded = self._record_event()

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) as a new tensor, and prefetch the chunk after them."""
        if self.in_flight:
            self._wait(self.offloaded)
            self.in_flight.clear()
        out = self.layout.empty(self.channels, stop - start)
        for n in range(start // self.step, (stop - 1) // self.step + 1):
            for m in [m for m in self.on_device if not n - 1 <= m <= n + 1]:  # n - 1: tiles overlap
                self._wait(self.on_device[m][1])
                del self.on_device[m]
            for m in range(n, min(n + 2, len(self.chunks))):
                if m not in self.on_device:
                    self._prefetch(m)
            block, done = self.on_device[n]
            self._wait(done)
            first = n * self.step
            low, high = max(start, first), min(stop, first + self.step)
            part = self.layout.narrow_rows(block, low - first, high - first)
            self.layout.narrow_rows(out, low - start, high - start).copy_(part)
        if stop == self.layout.rows:
            self.on_device.clear()
        return out

    def _prefetch(self, n: int) -> None:
        chunk = self.chunks[n]
        block = self.layout.empty(self.channels, chunk[0].shape[self.layout.axis])
        self._copy(chunk, list(block.split(1)))
        self.on_device[n] = block, self._record_event()

    def _copy(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        """Copy after the work queued so far, concurrently with later work."""
        device = self.layout.device
        stream = get_copy_stream(device) if device.type == "cuda" else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # None: does nothing
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=stream is not None)

    def _record_event(self) -> torch.cuda.Event | None:
        device = self.layout.device
        return get_copy_stream(device).record_event() if device.type == "cuda" else None

    def _wait(self, done: torch.cuda.Event | None) -> None:
        if done is not None:
            torch.cuda.current_stream(self.layout.device).wait_event(done)


class ConvOutput(Part):
    """A convolution's output before its norm: in memory, in host memory, or recomputed."""

    host: HostFeatureMap | None = None
    is_cheap = False  # recomputed a few rows at a time wherever it is read

    def __init__(self, convolution: Convolution):
        self.convolution = convolution

    @property
    def is_recomputed(self) -> bool:
        """Return whether reading it takes a convolution."""
        return self.stored is None and self.host is None

    def offload(self) -> None:
        """Move it to host memory."""
        if self.stored is not None:
            self.host = HostFeatureMap(self.stored, self.convolution.layout)
            self.stored = None

    def restore(self) -> None:
        if self.host is not None:
            self.stored, self.host = self.host.rows(0, self.convolution.layout.rows), None
        elif self.stored is None:
            self.stored = self.convolution.forward(store=True, moments=None)

    def rows(self, start: int, stop: int) -> Tensor:
        if self.stored is not None:
            return self.convolution.layout.narrow_rows(self.stored, start, stop)
        if self.host is not None:
            return self.host.rows(start, stop)
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
        self.offload_when_downsampled = self.drop_when_downsampled = False
        self.gradient: Tensor | None = None
        """The gradient of the decoder; a next level that reads this map with stride adds to it."""

    @property
    def width(self) -> int:
        """Return the number of channels in memory at a time for a row that is read."""
        own = self.raw.convolution.width if self.raw.is_recomputed else 0
        return max(own, self.skip.width if self.skip is not None else 0)

    @property
    def is_dropped(self) -> bool:
        """Return whether it takes a convolution to read the map in backward."""
        return self.drop_when_downsampled or self.raw.drop_after_read

    def parts(self) -> Iterator[Part]:
        """Yield what the map is computed from; later parts are needed to restore earlier ones."""
        if not self.raw.is_cheap:
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

    def finish_downsampling(self) -> None:
        """Drop or offload what is brought back when it is read, now that the level is pooled."""
        if self.drop_when_downsampled:
            self.raw.stored = None
        if self.offload_when_downsampled:
            for part in self.parts():
                if isinstance(part, ConvOutput) and not part.drop_after_read:
                    part.offload()


class PooledMap(Part):
    """The pooling of a finer map, computed as a whole when its first row is read.

    If `is_transient`, it is freed when its last row has been read.
    """

    whole, width = None, 0
    drop_after_read = restore_for_decoder = True

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

    def parts(self) -> Iterator[Part]:
        """Yield the map itself."""
        yield self

    def pool_rows(self, x: Tensor, start: int, stop: int) -> None:
        """Compute rows [start, stop) from the rows of the finer map that they pool."""
        if self.stored is None:
            self.stored = self.layout.empty(self.channels)
        out = self.layout.narrow_rows(self.stored, start, stop)
        pool_volumes(self.pool, x, out, at_once=self.layout.is_whole)

    def restore(self) -> None:
        if self.stored is None:
            self.stored = pool_map(self.finer, self.pool, self.kernel_size)


def restore_parts(source: Any, *, for_decoder: bool = False) -> None:
    """Bring back what a map is computed from; `for_decoder`, only what the decoder asks for."""
    for part in reversed(list(source.parts())):
        if part.restore_for_decoder or not for_decoder:
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
    if hasattr(layer, "compute_input_gradient"):  # without an autograd graph
        return cast(Any, layer).compute_input_gradient(x, grad)
    with torch.enable_grad():
        y = layer.forward(x.requires_grad_())
    y.backward(grad)
    assert x.grad is not None
    return x.grad
