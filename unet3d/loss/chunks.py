"""Volumes worked through a few rows at a time, so that float32 copies never exist as a whole."""

from collections.abc import Iterator

import torch
from torch import Tensor

SLAB_ELEMENTS = 2**20
"""Logits of one volume that are in float32 at once: 4 MiB for each of a few temporaries."""


def list_chunks(logits: Tensor) -> Iterator[slice]:
    """Cut the first spatial axis so that a slab has at most SLAB_ELEMENTS logits."""
    _, k, rows, h, w = logits.shape
    step = max(1, SLAB_ELEMENTS // max(1, k * h * w))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def upcast(x: Tensor) -> Tensor:
    """In float32, or float64 if it is already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
