"""Define feature maps that return any of their rows on demand, stored or recomputed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from unet3d.model.fused import onednn
from unet3d.model.fused.host_offload import HostFeatureMap
from unet3d.model.fused.norms import FoldedNorm, Moments
from unet3d.model.fused.ops import norm_ops
from unet3d.model.fused.tiling import MapLayout


class FeatureMapSource(Protocol):
    """A map that a convolution reads."""

    channels: int
    layout: MapLayout

    def fill(self, out: Tensor, start: int, stop: int) -> Tensor | None:
        """Write rows [start, stop) to `out`; return the raw rows that they come from, if any."""
        ...


class FeatureMap(NamedTuple):
    """A map between blocks: its place in autograd's graph, and its values."""

    # Has the map's shape and the memory of one element, unless it is that of a StoredFeatureMap.
    edge: Tensor
    source: Any  # a StoredFeatureMap where it is an input, else a LazyActivation


class StoredFeatureMap:
    """A map in memory: the image, or the output of a pooling layer."""

    def __init__(self, x: Tensor, layout: MapLayout):
        self.x, self.layout, self.channels = x, layout, x.shape[1]

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        out.copy_(self.layout.narrow_rows(self.x, start, stop))


def cast_weight(module: nn.Conv3d | nn.ConvTranspose3d, dtype: torch.dtype) -> Tensor:
    """Return the weight in the dtype of the step, channels-last as maps are."""
    return module.weight.detach().to(dtype=dtype, memory_format=torch.channels_last_3d)


def cast_bias(module: nn.Conv3d | nn.ConvTranspose3d, dtype: torch.dtype) -> Tensor | None:
    """Return the bias in the dtype of the step, if there is one."""
    return None if module.bias is None else module.bias.detach().to(dtype)


def convolve(x: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    """Convolve and return channels-last, which some of torch's kernels for small inputs do not."""
    return onednn.convolve(x, weight, padding).contiguous(memory_format=torch.channels_last_3d)


class Convolution:
    """A size-preserving convolution of the concatenation of its sources, without its bias.

    The norm that follows knows the bias: no map needs a pass that adds it.
    """

    def __init__(self, module: nn.Conv3d, sources: Sequence[FeatureMapSource]):
        self.module, self.sources, self.layout = module, list(sources), sources[0].layout
        self.halo = module.kernel_size[self.layout.axis - 2] // 2

    def weight(self) -> Tensor:
        """Return the weight in the dtype of the step."""
        return cast_weight(self.module, self.layout.dtype)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of tiles sized for all that a row of output needs in memory."""
        return self.layout.tiles(self.width, min_rows=2 * self.halo)

    @property
    def width(self) -> int:
        """Return the largest number of channels in memory at a time for a row of output."""
        widths = [self.module.in_channels + self.module.out_channels]
        for source in self.sources:
            if isinstance(source, LazyActivation) and source.raw.is_recomputed:
                widths.append(source.raw.convolution.width)
        return max(widths)

    def input(self, start: int, stop: int) -> tuple[Tensor, list[int], Tensor | None]:
        """Read the input of rows [start, stop) with its halo.

        Return it with the padding that the convolution still has to add, and the raw rows of the
        last source, if any.
        """
        layout, halo = self.layout, self.halo
        padding = [k // 2 for k in self.module.kernel_size]
        if start == 0 and stop == layout.rows:
            halo = 0
        else:
            padding[layout.axis - 2] = 0
        first, last = max(start - halo, 0), min(stop + halo, layout.rows)
        x = layout.empty(self.module.in_channels, stop - start + 2 * halo)
        before, after = first - (start - halo), stop + halo - last
        if before:
            layout.narrow_rows(x, 0, before).zero_()
        if after:
            layout.narrow_rows(x, x.shape[layout.axis] - after, x.shape[layout.axis]).zero_()
        inside, channel, raw = layout.narrow_rows(x, before, before + last - first), 0, None
        for source in self.sources:
            part = inside if len(self.sources) == 1 else inside.narrow(1, channel, source.channels)
            raw = source.fill(part, first, last)
            channel += source.channels
        return x, padding, raw

    def rows(self, start: int, stop: int, weight: Tensor) -> Tensor:
        """Return rows [start, stop) of the output."""
        x, padding, _ = self.input(start, stop)
        return convolve(x, weight, padding)

    def forward(self, *, store: bool, moments: Moments | None) -> Tensor | None:
        """Convolve tile by tile; return the output if `store`, and add its tiles to `moments`."""
        weight, output = self.weight(), None
        for start, stop in self.tiles():
            rows = self.rows(start, stop, weight)
            if moments is not None:
                moments.add(rows)
            if store and stop - start == self.layout.rows:
                return rows
            if store:
                output = self.layout.empty(rows.shape[1]) if output is None else output
                self.layout.narrow_rows(output, start, stop).copy_(rows)
            del rows
        return output


@dataclass
class ConvOutput:
    """A convolution's output before its norm: in memory, in host memory, or recomputed."""

    convolution: Convolution
    stored: Tensor | None = None
    host: HostFeatureMap | None = None
    drop_after_read: bool = False  # free it once the decoder has read it
    restore_for_decoder: bool = False  # recompute it as a whole for the decoder's backward

    @property
    def is_recomputed(self) -> bool:
        """Return whether reading it takes a convolution."""
        return self.stored is None and self.host is None

    def offload(self) -> None:
        """Move it to host memory."""
        assert self.stored is not None
        self.host, self.stored = HostFeatureMap(self.stored, self.convolution.layout), None

    def restore(self) -> None:
        """Bring it back to the device, from the host or by recomputing it."""
        if self.host is not None:
            self.stored, self.host = self.host.rows(0, self.convolution.layout.rows), None
        elif self.stored is None:
            self.stored = self.convolution.forward(store=True, moments=None)

    def rows(self, start: int, stop: int) -> Tensor:
        if self.stored is not None:
            return self.convolution.layout.narrow_rows(self.stored, start, stop)
        if self.host is not None:
            return self.host.rows(start, stop)
        return self.convolution.rows(start, stop, self.convolution.weight())


class LazyActivation:
    """A convolution's output that is normalized and activated each time it is read."""

    def __init__(self, raw: ConvOutput, norm: FoldedNorm):
        self.raw, self.norm = raw, norm
        self.layout, self.channels = raw.convolution.layout, raw.convolution.module.out_channels

    def fill(self, out: Tensor, start: int, stop: int) -> Tensor:
        y = self.raw.rows(start, stop)
        self.activate(y, out)
        return y

    def activate(self, y: Tensor, out: Tensor) -> Tensor:
        """Normalize and activate raw rows `y` into `out`."""
        norm_ops.normalize(y, self.norm.scale, self.norm.shift, self.norm.slope, out)
        return out

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) as a new tensor."""
        out = self.layout.empty(self.channels, stop - start)
        self.fill(out, start, stop)
        return out
