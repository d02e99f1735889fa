"""Parse sizes and spacings: three numbers, one per axis."""

from collections.abc import Sequence
from numbers import Integral, Real

from unet3d.errors import UsageError
from unet3d.types import Triple


def parse_size(key: str, size: Sequence[int], *, minimum: int = 1) -> Triple:
    """Return three sizes in voxels; an error begins with `key`."""
    if len(size) != 3 or not all(isinstance(n, Integral) and n >= minimum for n in size):
        raise UsageError(f"{key} must be three ints >= {minimum}, got {list(size)}")
    d, h, w = map(int, size)
    return d, h, w


def parse_spacing(key: str, spacing_mm: Sequence[float]) -> tuple[float, float, float]:
    """Return three spacings in mm; an error begins with `key`."""
    if len(spacing_mm) != 3 or not all(isinstance(s, Real) and s > 0 for s in spacing_mm):
        raise UsageError(f"{key} must be three numbers above 0, got {list(spacing_mm)}")
    d, h, w = map(float, spacing_mm)
    return d, h, w
