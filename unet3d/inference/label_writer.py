"""Labels at the resolution of a scan's file, from logits that come tile by tile."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from unet3d.data.dataset import get_region_labels
from unet3d.errors import RunError
from unet3d.inference.heads import SummedHead, iter_logits
from unet3d.inference.memory_plan import Slab
from unet3d.inference.window_grid import OutputTile, Span
from unet3d.types import get_label_dtype

LabelFunction = Callable[[Tensor], Tensor]
"""Logits (K, ...) -> labels (...), or another output such as probabilities (K, ...)."""


def argmax_labels(logits: Tensor) -> Tensor:
    """Return the class of each voxel; of equal logits, the first."""
    dtype = getattr(torch, get_label_dtype(len(logits)))
    return logits.max(0).indices.to(dtype)  # argmax takes ten times as long on a CPU


def label_regions(logits: Tensor, labels: Sequence[int]) -> Tensor:
    """Return the label of the last region that contains each voxel, uint8; 0 outside of all."""
    output = torch.zeros(logits.shape[1:], dtype=torch.uint8, device=logits.device)
    for region, label in zip(logits, labels, strict=True):
        output.masked_fill_(region > 0, label)
    return output


def choose_label_function(
    regions: Mapping[str, Sequence[int]] | None, region_labels: Sequence[int] | None
) -> LabelFunction:
    """Return what turns logits of classes, or of regions, into labels."""
    if regions is None:
        return argmax_labels
    return partial(label_regions, labels=get_region_labels(regions, region_labels))


@dataclass(frozen=True)
class Output:
    """A decision and the array (..., D, H, W) that receives it: a view of the file's grid."""

    decide: LabelFunction
    target: np.ndarray


class AxisInterpolator:
    """Linear interpolation along an axis from `old` to `new` voxels with the same outer edges."""

    def __init__(self, old: int, new: int, device: torch.device):
        position = (torch.arange(new, dtype=torch.float64) + 0.5) * old / new - 0.5
        position = position.clamp(0, old - 1)
        self.is_identity = old == new
        self.below = position.long()
        self.fraction = (position - self.below).float()
        self.above = self.below + (self.fraction > 0)  # do not wait for a voxel of weight 0
        self._fraction = self.fraction.to(device)

    def find_ready(self, span: Span) -> range:
        """Return the new voxels whose last source voxel lies in the span."""
        return range(*torch.searchsorted(self.above, torch.tensor(span)).tolist())

    def interpolate(self, values: Tensor, dim: int, new: range, begin: int) -> Tensor:
        """Return the new voxels, from old ones of which `begin` is the first."""
        if self.is_identity:
            return values.narrow(dim, new.start - begin, len(new))
        part = slice(new.start, new.stop)
        below, above = (
            values.index_select(dim, (n[part] - begin).to(values.device))
            for n in (self.below, self.above)
        )
        shape = [-1 if d == dim else 1 for d in range(values.ndim)]
        return below.lerp_(above, self._fraction[part].view(shape))


class LabelWriter:
    """Receives the tiles of a slab in their order and writes the outputs.

    Tiles before the slab's columns only serve interpolation. `box` is the size of the outputs,
    which hold the slab's columns alone where the first of these is given.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        slab: Slab,
        device: torch.device,
        head: SummedHead | None = None,
        *,
        box: Sequence[int],
        first_column: int = 0,
    ):
        window_grid, self.head = slab.window_grid, head
        if head is not None:
            check_finite(head.weight.sum() + head.bias.sum())
        self.order, self.columns = window_grid.order, slab.columns
        self.first_column = first_column
        self.axes = [
            AxisInterpolator(window_grid.size[axis], box[axis], device)
            for axis in window_grid.order
        ]
        dims = [axis - 3 for axis in window_grid.order]
        self.outputs = [
            Output(o.decide, np.moveaxis(o.target, dims, (-3, -2, -1))) for o in outputs
        ]
        self.last_rows: dict[Span, Tensor] = {}  # last row of the tiles above, by their columns
        self.last_columns: dict[Span, Tensor] = {}  # last column of the tiles to the left, by rows

    def write(self, tile: OutputTile, logits: Tensor) -> None:
        """Write every voxel that can be interpolated now that this tile (K, D, H, W) is known."""
        check_finite(logits.sum())
        tiled = logits.permute(0, *(axis + 1 for axis in self.order))  # (K, rows, columns, length)
        rows, columns, lengthwise = self.axes
        upper, left = self.last_rows.get(tile.columns), self.last_columns.pop(tile.rows, None)

        def get_row(index: int) -> Tensor:
            """(K, columns, length), after the column to the left if there is one."""
            values = tiled[:, index - tile.rows[0]] if index >= tile.rows[0] else upper
            assert values is not None
            if left is None:
                return values
            first = tile.rows[0] - (upper is not None)
            return torch.cat([left[:, index - first, None], values], 1)

        ready = columns.find_ready((max(tile.columns[0], self.columns[0]), tile.columns[1]))
        written = slice(ready.start - self.first_column, ready.stop - self.first_column)
        for n in rows.find_ready(tile.rows) if ready else ():
            row = get_row(int(rows.below[n]))
            if rows.fraction[n] > 0:
                row = row.lerp(get_row(int(rows.above[n])), float(rows.fraction[n]))
            row = columns.interpolate(row, 1, ready, tile.columns[0] - (left is not None))
            row = lengthwise.interpolate(row, 2, range(len(lengthwise.above)), 0)
            for part, values in iter_logits(row, self.head):
                for output in self.outputs:
                    target = output.target[..., n, written, :]
                    target[(..., *part)] = output.decide(values).cpu().numpy()
        if not columns.is_identity and tile.columns[1] < self.columns[1]:
            above = [] if upper is None else [upper[:, None, -1]]
            self.last_columns[tile.rows] = torch.cat([*above, tiled[:, :, -1]], 1)
        if not rows.is_identity:
            self.last_rows[tile.columns] = tiled[:, -1].clone()


def check_finite(total: Tensor) -> None:
    """Refuse a sum of logits, or of what they are computed from, that is not finite."""
    if not torch.isfinite(total):
        raise RunError(
            "the network's output is NaN or infinite; try precision=32; if the error persists, "
            "the weights are corrupted or training diverged"
        )
