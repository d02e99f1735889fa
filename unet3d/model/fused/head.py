"""The head of a decoder level: a convolution with a 1x1x1 kernel, whose logits may be lazy."""

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.custom_ops import get_device_type
from unet3d.lazy_logits import LazyLogits, Rows, Tile, TileGradient
from unet3d.model.fused.conv_ops import cast_bias, cast_weight
from unet3d.model.fused.feature_maps import LazyActivation
from unet3d.model.fused.layers import ParameterGradients

MAX_LOGITS_BYTES = 256 * 2**20
"""The largest tile of lazy logits and their gradient, for one volume."""


class Head:
    """Logits of an activation, and their backward, tile by tile.

    With `lazy`, logits that have more channels than the activation are never in memory as a whole.
    """

    source: LazyActivation

    def __init__(self, module: nn.Conv3d, gradients: ParameterGradients, *, lazy: bool):
        self.weight, self.bias, self.gradients = module.weight, module.bias, gradients
        self.classes = module.out_channels
        self.lazy = lazy and module.out_channels > module.in_channels
        self.logit_gradients: list[TileGradient] = []  # of lazy logits
        self.versions: list[int] = []  # of the block's parameters, as they made the activation

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop); in memory are rows of the activation, and logits where lazy."""
        layout, channels = self.source.layout, self.source.channels
        if not self.lazy:
            return layout.tiles(channels)
        layout = replace(layout, tile_bytes=min(layout.tile_bytes, MAX_LOGITS_BYTES))
        return layout.tiles(channels + 2 * self.classes, min_rows=1)

    def make_lazy(self, edge: Tensor) -> LazyLogits:
        """Return the logits, given their place in autograd's graph."""
        layout = self.source.layout
        shape = torch.Size([layout.batch, self.classes, *layout.size])
        self.versions = self._read_versions()
        return LazyLogits(edge, shape, self._iter_logits, self.logit_gradients.append)

    def compute_logits(self) -> Tensor:
        """Return the logits (B, K, D, H, W) as a whole."""
        layout = self.source.layout
        logits = layout.empty(self.classes).contiguous()  # the layout that the loss reads
        for rows, part in self._iter_logits():
            layout.narrow_rows(logits, rows.start, rows.stop).copy_(part)
        return logits

    def has_gradient(self, to_logits: Tensor | None) -> bool:
        """Return whether the loss depends on the logits."""
        return to_logits is not None or bool(self.logit_gradients)

    def differentiate(
        self, to_logits: Tensor | None, start: int, stop: int, *, update: bool
    ) -> Tensor:
        """Return rows of the activation's gradient, given that of the logits unless these are lazy.

        With `update`, also add the rows to the gradients of the head's parameters.
        """
        layout = self.source.layout
        weight = cast_weight(self.weight, layout.dtype).flatten(1)
        if to_logits is not None:
            part = _voxels(layout.narrow_rows(to_logits, start, stop)).contiguous()
            if update:
                self._add_gradients(part, _voxels(self.source.rows(start, stop)))
            return _channels(part @ weight)
        activation, rows = self.source.rows(start, stop), Rows(layout.axis, start, stop)
        logits = self._compute(activation)
        g = reduce(Tensor.add_, [compute(rows, logits) for compute in self.logit_gradients])
        del logits
        if get_device_type(g) == "cuda":
            if update:
                self._add_gradients(_voxels(g), _voxels(activation))
            del activation
            return _channels(_voxels(g) @ weight)
        if update:
            for volume, x in zip(g, activation, strict=True):
                self._add_gradients(volume.flatten(1).t(), x.flatten(1).t())
        to_activation = g.flatten(2).mT @ weight
        return _channels(to_activation.unflatten(1, activation.shape[2:]))

    def _iter_logits(self) -> Iterator[Tile]:
        """Yield the logits (B, K, ...) of each tile."""
        if self.lazy and self._read_versions() != self.versions:
            raise RuntimeError(
                "lazy logits are read after the weights have changed: read them before the "
                "optimizer's step, or call the network again"
            )
        for start, stop in self.tiles():
            rows = Rows(self.source.layout.axis, start, stop)
            yield rows, self._compute(self.source.rows(start, stop))

    def _read_versions(self) -> list[int]:
        return [p._version for p in self.gradients.parameters if not p.is_inference()]

    def _compute(self, activation: Tensor) -> Tensor:
        """Return the logits (B, K, ...) of some rows of the activation.

        The kernels of a GPU read lazy ones class by class, those of a CPU voxel by voxel.
        """
        dtype = self.source.layout.dtype
        weight, bias = cast_weight(self.weight, dtype).flatten(1), cast_bias(self.bias, dtype)
        if not self.lazy or get_device_type(activation) == "cuda":
            return _channels(F.linear(_voxels(activation), weight, bias))
        x, weight = activation.flatten(2), weight.expand(len(activation), -1, -1)
        product = torch.bmm(weight, x) if bias is None else bias[:, None].baddbmm(weight, x)
        return product.unflatten(2, activation.shape[2:])

    def _add_gradients(self, g: Tensor, activation: Tensor) -> None:
        """Add the parameters' gradients, given `g` (..., K) and the activation (..., C)."""
        g, x = g.flatten(0, -2), activation.flatten(0, -2)
        dtype = self.source.layout.accumulate_dtype
        self.gradients.add(self.weight, multiply(g.t(), x, dtype))
        if self.bias is not None:
            self.gradients.add(self.bias, g.sum(0, dtype=dtype))


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
