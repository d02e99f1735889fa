"""Feature maps that give any of their rows on demand, whether they lie in memory or not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.model.lean.host_offload import HostMap
from unet3d.model.lean.norms import FoldedNorm, Moments
from unet3d.model.lean.ops import norm_ops
from unet3d.model.lean.tiling import MapLayout


class MapSource(Protocol):
    """What a convolution reads."""

    channels: int
    space: MapLayout

    def fill(self, out: Tensor, start: int, stop: int) -> Tensor | None:
        """Write rows [start, stop); return the raw rows that they come from, if there are any."""
        ...


class Map(NamedTuple):
    """A map between blocks: its edge in autograd's graph, without memory, and its values."""

    edge: Tensor
    source: Any  # a Source: Given where it is an input, else Activated


class StoredMap:
    """A tensor: the image, or what a pooling left."""

    def __init__(self, x: Tensor, space: MapLayout):
        self.x, self.space, self.channels = x, space, x.shape[1]

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        out.copy_(self.space.narrow_rows(self.x, start, stop))


def cast_weights(
    module: nn.Conv3d | nn.ConvTranspose3d, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in the type that a step computes in; channels-last, as the maps are."""
    bias = None if module.bias is None else module.bias.detach().to(dtype)
    weight = module.weight.detach().to(dtype=dtype, memory_format=torch.channels_last_3d)
    return weight, bias


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    """A convolution whose output is channels-last: some kernels for small inputs have no other."""
    y = F.conv3d(x, weight, bias, padding=list(padding))
    return y.contiguous(memory_format=torch.channels_last_3d)


class Convolution:
    """A convolution that keeps the size, of the concatenation of its sources."""

    def __init__(self, module: nn.Conv3d, sources: Sequence[MapSource]):
        self.module, self.sources, self.space = module, list(sources), sources[0].space
        self.halo = module.kernel_size[self.space.axis - 2] // 2

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """In the type that it computes in."""
        return cast_weights(self.module, self.space.dtype)

    def slabs(self) -> Iterator[tuple[int, int]]:
        """By what it reads and writes, and what is redone for that."""
        return self.space.slabs(self.width, least=2 * self.halo)

    @property
    def width(self) -> int:
        """The most channels that are there at a time for a row of its output."""
        widths = [self.module.in_channels + self.module.out_channels]
        for source in self.sources:
            if isinstance(source, LazyActivation) and source.raw.redone:
                widths.append(source.raw.convolution.width)
        return max(widths)

    def input(self, start: int, stop: int) -> tuple[Tensor, list[int], Tensor | None]:
        """The sources' rows with their halo; the padding that is left; the last one's raw rows."""
        space, halo = self.space, self.halo
        padding = [k // 2 for k in self.module.kernel_size]
        if start == 0 and stop == space.rows:
            halo = 0
        else:
            padding[space.axis - 2] = 0
        first, last = max(start - halo, 0), min(stop + halo, space.rows)
        x = space.empty(self.module.in_channels, stop - start + 2 * halo)
        before, after = first - (start - halo), stop + halo - last
        if before:
            space.narrow_rows(x, 0, before).zero_()
        if after:
            space.narrow_rows(x, x.shape[space.axis] - after, x.shape[space.axis]).zero_()
        inside, channel, raw = space.narrow_rows(x, before, before + last - first), 0, None
        for source in self.sources:
            part = inside if len(self.sources) == 1 else inside.narrow(1, channel, source.channels)
            raw = source.fill(part, first, last)
            channel += source.channels
        return x, padding, raw

    def rows(self, start: int, stop: int, weights: tuple[Tensor, Tensor | None]) -> Tensor:
        """Its output there."""
        x, padding, _ = self.input(start, stop)
        return convolve(x, *weights, padding)

    def forward(self, *, keep: bool, moments: Moments | None) -> Tensor | None:
        """Its output, whole if it is to be kept; what the norm needs is summed up on the way."""
        weights, whole = self.weights(), None
        for start, stop in self.slabs():
            rows = self.rows(start, stop, weights)
            if moments is not None:
                moments.add(rows)
            if keep and stop - start == self.space.rows:
                return rows
            if keep:
                whole = self.space.empty(rows.shape[1]) if whole is None else whole
                self.space.narrow_rows(whole, start, stop).copy_(rows)
            del rows
        return whole


@dataclass
class ConvOutput:
    """A convolution's output before its norm: in memory, or redone from what it reads."""

    convolution: Convolution
    kept: Tensor | None = None
    host: HostMap | None = None  # where it waits, out of the GPU's memory
    brief: bool = False  # to be forgotten once the decoder has read it
    again: bool = False  # and redone for the decoder's backward

    @property
    def redone(self) -> bool:
        """Whether reading it takes a convolution."""
        return self.kept is None and self.host is None

    def offload(self) -> None:
        """Let it wait in the host's memory."""
        assert self.kept is not None
        self.host, self.kept = HostMap(self.kept, self.convolution.space), None

    def restore(self) -> None:
        """Have it in memory again."""
        if self.host is not None:
            self.kept, self.host = self.host.rows(0, self.convolution.space.rows), None
        elif self.kept is None:
            self.kept = self.convolution.forward(keep=True, moments=None)

    def rows(self, start: int, stop: int) -> Tensor:
        if self.kept is not None:
            return self.convolution.space.narrow_rows(self.kept, start, stop)
        if self.host is not None:
            return self.host.rows(start, stop)
        return self.convolution.rows(start, stop, self.convolution.weights())


class LazyActivation:
    """A raw output, normalised and activated whenever somebody reads it."""

    def __init__(self, raw: ConvOutput, norm: FoldedNorm):
        self.raw, self.norm = raw, norm
        self.space, self.channels = raw.convolution.space, raw.convolution.module.out_channels

    def fill(self, out: Tensor, start: int, stop: int) -> Tensor:
        y = self.raw.rows(start, stop)
        self.activate(y, out)
        return y

    def activate(self, y: Tensor, out: Tensor) -> Tensor:
        """Of raw rows, into `out`."""
        norm_ops.normalize(y, self.norm.scale, self.norm.shift, self.norm.slope, out)
        return out

    def rows(self, start: int, stop: int) -> Tensor:
        """In new memory."""
        out = self.space.empty(self.channels, stop - start)
        self.fill(out, start, stop)
        return out
