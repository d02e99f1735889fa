"""Make test volumes: every kind of value, every memory layout."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALVES)

KINDS: dict[str, Callable[[Tensor, torch.finfo], Tensor]] = {
    "random": lambda x, _: x,
    "post-ReLU": lambda x, _: x.relu(),
    "tied": lambda x, _: x.round(),
    "constant": lambda x, _: torch.ones_like(x),
    "huge": lambda x, info: (x * info.max / 2).clamp(-info.max, info.max),
    "subnormal": lambda x, info: x * info.tiny / 8,
    "infinite": lambda x, _: torch.where(x > 0.5, torch.inf, torch.where(x < -1, -torch.inf, x)),
    "nan": lambda x, _: torch.where(x > 1.5, torch.nan, x),
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last_3d),
    "transposed": lambda x: x.transpose(2, 4).contiguous().transpose(2, 4),
    "strided": lambda x: x.repeat_interleave(2, dim=4)[..., ::2],
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}

WINDOWS = {
    "2x2x2": (2, None, 0),
    "1x2x2": ((1, 2, 2), None, 0),
    "2x2x1": ((2, 2, 1), None, 0),
    "3x3x3 stride 2": (3, 2, 0),
    "3x3x3 stride 2 padding 1": (3, 2, 1),
    "3x3x3 stride 3": (3, None, 0),
    "3x2x2 padding 1,1,0": ((3, 2, 2), 2, (1, 1, 0)),
    "4x4x2 stride 3 padding 2,1,1": ((4, 4, 2), 3, (2, 1, 1)),
    "4x4x2": ((4, 4, 2), None, 0),
    "5x5x1 stride 2 padding 2,2,0": ((5, 5, 1), 2, (2, 2, 0)),
    "1x1x1": (1, None, 0),
}


def cover_pairs(
    first: Iterable[Any], second: Iterable[Any], third: Iterable[Any]
) -> list[tuple[Any, Any, Any]]:
    """Return every pair of the first two with one of the third, so that other pairs occur, too.

    `third` must be the shortest. What is wrong for one value, or for a pair of values, fails as it
    would with all combinations.
    """
    a, b, c = list(first), list(second), list(third)
    return [(x, y, c[(i + j) % len(c)]) for i, x in enumerate(a) for j, y in enumerate(b)]


def make_volume(shape: tuple[int, ...], kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a volume of a kind of KINDS."""
    return KINDS[kind](torch.randn(shape, dtype=torch.float64), torch.finfo(dtype)).to(dtype)
