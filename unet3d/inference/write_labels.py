"""Logits of a prepared volume -> labels at its file's resolution, a row of a bar at a time.

Linear interpolation needs the row and the column before a bar: they are all that is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unet3d.errors import RunError
from unet3d.inference.window_order import Span, Tile, WindowSchedule
from unet3d.types import Triple

Decision = Callable[[Tensor], Tensor]
"""Logits (K, ...) of some voxels -> their labels (...), or whatever else is written of them."""


def argmax_labels(logits: Tensor) -> Tensor:
    """The class of each voxel, uint8."""
    return logits.argmax(0).to(torch.uint8)


def probabilities(logits: Tensor) -> Tensor:
    """Of each class, (K, ...)."""
    return logits.softmax(0)


class RegionsToLabels:
    """Overlapping regions, painted one upon the other in their order, each with its label."""

    def __init__(self, labels: Sequence[int]):
        self.labels = list(labels)

    def __call__(self, logits: Tensor) -> Tensor:
        """The label of the last region that a voxel belongs to; uint8."""
        painted = torch.zeros(logits.shape[1:], dtype=torch.uint8, device=logits.device)
        for region, label in zip(logits, self.labels, strict=True):
            painted.masked_fill_(region > 0, label)
        return painted


@dataclass(frozen=True)
class Output:
    """What is decided, and the array (..., D, H, W) that receives it: a view of the file's grid."""

    decide: Decision
    target: np.ndarray


class AxisInterpolator:
    """Linear interpolation along an axis: `new` voxels with the outer edges of `old` ones."""

    def __init__(self, old: int, new: int, device: torch.device):
        at = ((torch.arange(new, dtype=torch.float64) + 0.5) * old / new - 0.5).clamp(0, old - 1)
        self.same = old == new
        self.below = at.long()
        self.share = (at - self.below).float()
        self.above = self.below + (self.share > 0)  # no voxel is waited for that does not count
        self._share = self.share.to(device)

    def due(self, span: Span) -> range:
        """The new voxels whose last old one lies in a stretch."""
        first, end = torch.searchsorted(self.above, torch.tensor(span)).tolist()
        return range(first, end)

    def interpolate(self, values: Tensor, dim: int, new: range, begin: int) -> Tensor:
        """The new voxels from old ones, the first of which is number `begin`."""
        if self.same:
            return values.narrow(dim, new.start - begin, len(new))
        part = slice(new.start, new.stop)
        below, above = (
            values.index_select(dim, (n[part] - begin).to(values.device))
            for n in (self.below, self.above)
        )
        shape = [-1 if d == dim else 1 for d in range(values.ndim)]
        return below.lerp_(above, self._share[part].view(shape))


class LabelWriter:
    """Takes the bars of a walk, in its order, and writes what is decided of them.

    `columns` are the prepared volume's that count; bars before them are only interpolated with.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        *,
        walk: WindowSchedule,
        columns: Span,
        device: torch.device,
    ):
        self.order, self.columns = walk.order, columns
        box = outputs[0].target.shape[-3:]
        self.lines = [AxisInterpolator(walk.size[axis], box[axis], device) for axis in walk.order]
        self.outputs = [Output(o.decide, _ordered(o.target, walk.order)) for o in outputs]
        self.last_rows: dict[Span, Tensor] = {}  # of the bars above, by their columns
        self.last_columns: dict[Span, Tensor] = {}  # of the bars to the left, by their rows

    def write(self, bar: Tile, logits: Tensor) -> None:
        """Write what can be decided with this bar (K, D, H, W)."""
        if not torch.isfinite(logits.sum()):
            raise RunError("the network's output is NaN or infinite")
        own = logits.permute(0, *(axis + 1 for axis in self.order))  # (K, rows, columns, along)
        rows, columns, along = self.lines
        upper, left = self.last_rows.get(bar.columns), self.last_columns.pop(bar.rows, None)

        def row(number: int) -> Tensor:
            """(K, columns, along), behind the column to the left."""
            values = own[:, number - bar.rows[0]] if number >= bar.rows[0] else upper
            assert values is not None
            if left is None:
                return values
            first = bar.rows[0] - (upper is not None)
            return torch.cat([left[:, number - first, None], values], 1)

        due = columns.due((max(bar.columns[0], self.columns[0]), bar.columns[1]))
        for n in rows.due(bar.rows) if due else ():
            mixed = row(int(rows.below[n]))
            if rows.share[n] > 0:
                mixed = mixed.lerp(row(int(rows.above[n])), float(rows.share[n]))
            mixed = columns.interpolate(mixed, 1, due, bar.columns[0] - (left is not None))
            mixed = along.interpolate(mixed, 2, range(len(along.above)), 0)
            for output in self.outputs:
                output.target[..., n, due.start : due.stop, :] = output.decide(mixed).cpu().numpy()
        if not columns.same and bar.columns[1] < self.columns[1]:
            above = [] if upper is None else [upper[:, None, -1]]
            self.last_columns[bar.rows] = torch.cat([*above, own[:, :, -1]], 1)
        if not rows.same:
            self.last_rows[bar.columns] = own[:, -1].clone()


def _ordered(target: np.ndarray, order: Triple) -> np.ndarray:
    extra = target.ndim - 3
    return target.transpose(*range(extra), *(extra + axis for axis in order))
