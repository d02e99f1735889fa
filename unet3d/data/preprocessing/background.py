"""The value of voxels where nothing was scanned: 0, another number, or found at the border."""

from collections.abc import Sequence
from itertools import product

import numpy as np

from unet3d.errors import UsageError

AUTO = "auto"
"""In place of a number: the constant value of the border, found for each channel of each case."""

LEAST_SHARE = 0.5
"""The share of a border's voxels that must have its corners' value: a brain may be cut off."""

Background = tuple[float | str, ...]
"""One for all channels or one for each; numbers or AUTO."""


def auto_background(channels: Sequence[str]) -> Background:
    """Return AUTO for every channel but CT, in which air is a value like others."""
    return tuple(0 if name.upper() == "CT" else AUTO for name in channels)


def border_value(channel: np.ndarray) -> float | None:
    """Return the value of all eight corners, if most of the faces (D, H, W) have it too."""
    corners = {channel[corner].item() for corner in product((0, -1), repeat=3)}
    if len(corners) > 1:
        return None
    value = corners.pop()
    faces = [np.moveaxis(channel, axis, 0)[end] for axis in range(3) for end in (0, -1)]
    equal = sum(np.count_nonzero(face == value) for face in faces)
    return float(value) if equal >= LEAST_SHARE * sum(face.size for face in faces) else None


class StreamedBorder:
    """Finds the same value where a volume of `shape` comes in pieces, its first axis fastest."""

    def __init__(self, shape: Sequence[int]):
        x, y, z = shape
        plane = np.arange(x * y)
        column, row = plane % x, plane // x
        ring = plane[(column == 0) | (column == x - 1) | (row == 0) | (row == y - 1)]
        inner = [n * x * y + ring for n in range(1, z - 1)]
        last = [(z - 1) * x * y + plane] if z > 1 else []
        self.border = np.concatenate([plane, *inner, *last])  # of the border's voxels, in order
        self.corners = [
            a + x * (b + y * c) for a in (0, x - 1) for b in (0, y - 1) for c in (0, z - 1)
        ]
        self.begun = self.equal = 0
        self.constant = True
        self.first = np.float32(0)

    def add(self, values: np.ndarray) -> None:
        """Look at the next piece."""
        ended = self.begun + len(values)
        if self.begun == 0:
            self.first = values[0]
        for corner in self.corners:
            if self.begun <= corner < ended and values[corner - self.begun] != self.first:
                self.constant = False
        low, high = np.searchsorted(self.border, (self.begun, ended))
        here = values[self.border[low:high] - self.begun]
        self.equal += np.count_nonzero(here == self.first)
        self.begun = ended

    @property
    def value(self) -> float | None:
        """The border's, once all pieces are there."""
        most = self.equal >= LEAST_SHARE * len(self.border)
        return float(self.first) if self.constant and most else None


def find_background(channels: np.ndarray, asked: Background) -> list[float]:
    """Return the value of each channel (C, D, H, W); AUTO is 0 where the border is not constant."""
    wanted = asked if len(asked) > 1 else asked * len(channels)
    if len(wanted) != len(channels):
        raise UsageError(
            f"data.background must be one value or one for each of the {len(channels)} channels, "
            f"got {list(asked)}"
        )
    return [
        (border_value(channel) or 0.0) if value == AUTO else float(value)
        for channel, value in zip(channels, wanted, strict=True)
    ]


def check_background(asked: Background) -> None:
    """Refuse what is neither a finite number nor AUTO."""
    good = [
        value == AUTO
        or (isinstance(value, int | float) and type(value) is not bool and np.isfinite(value))
        for value in asked
    ]
    if not good or not all(good):
        raise UsageError(
            f"data.background must be auto or a number, one for all channels or a list with one "
            f"for each, got {list(asked)}"
        )
