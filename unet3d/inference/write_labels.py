"""Turn the logits of a preprocessed volume into labels at its file's resolution, row by row.

Linear interpolation needs the row and the column before a tile: only these are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unet3d.errors import RunError
from unet3d.inference.memory_plan import InferencePlan, Slab
from unet3d.inference.sliding_window import Decision, WindowRunner
from unet3d.inference.window_order import OutputTile, Span


@dataclass(frozen=True)
class Output:
    """A decision and the array (..., D, H, W) that receives it: a view of the file's grid."""

    decide: Decision
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

    Tiles before the slab's columns only serve interpolation.
    """

    def __init__(self, outputs: Sequence[Output], slab: Slab, device: torch.device):
        schedule = slab.schedule
        self.order, self.columns = schedule.order, slab.columns
        box = outputs[0].target.shape[-3:]
        self.axes = [
            AxisInterpolator(schedule.size[axis], box[axis], device) for axis in schedule.order
        ]
        dims = [axis - 3 for axis in schedule.order]
        self.outputs = [
            Output(o.decide, np.moveaxis(o.target, dims, (-3, -2, -1))) for o in outputs
        ]
        self.last_rows: dict[Span, Tensor] = {}  # of the tiles above, by their columns
        self.last_columns: dict[Span, Tensor] = {}  # of the tiles to the left, by their rows

    def write(self, tile: OutputTile, logits: Tensor) -> None:
        """Write every voxel that can be interpolated now that this tile (K, D, H, W) is known."""
        if not torch.isfinite(logits.sum()):
            raise RunError(
                "the network's output is NaN or infinite; try precision=32; if the error persists, "
                "the weights are corrupted or training diverged"
            )
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
        for n in rows.find_ready(tile.rows) if ready else ():
            row = get_row(int(rows.below[n]))
            if rows.fraction[n] > 0:
                row = row.lerp(get_row(int(rows.above[n])), float(rows.fraction[n]))
            row = columns.interpolate(row, 1, ready, tile.columns[0] - (left is not None))
            row = lengthwise.interpolate(row, 2, range(len(lengthwise.above)), 0)
            for output in self.outputs:
                target = output.target[..., n, ready.start : ready.stop, :]
                target[...] = output.decide(row).cpu().numpy()
        if not columns.is_identity and tile.columns[1] < self.columns[1]:
            above = [] if upper is None else [upper[:, None, -1]]
            self.last_columns[tile.rows] = torch.cat([*above, tiled[:, :, -1]], 1)
        if not rows.is_identity:
            self.last_rows[tile.columns] = tiled[:, -1].clone()


def segment(
    image: Tensor, runner: WindowRunner, plan: InferencePlan, outputs: Sequence[Output]
) -> int:
    """Fill the targets of all outputs, at their own resolution, from `image` (C, D, H, W).

    Return the number of windows that are not computed.
    """
    num_skipped = 0
    sum_device = torch.device("cpu") if plan.sums_in_ram else runner.device
    for slab in plan.slabs:
        writer = LabelWriter(outputs, slab, sum_device)
        num_skipped += runner.run(image, slab.schedule, writer.write, sum_device)
    return num_skipped
