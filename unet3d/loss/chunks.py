"""Split volumes into chunks of rows, so that float32 copies never have the full size."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**20
"""Logits of one volume that are in float32 at once: 4 MiB for each of a few temporaries."""


def iter_chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the first spatial axis, each of at most CHUNK_ELEMENTS logits per volume."""
    _, k, rows, h, w = logits.shape
    step = max(1, CHUNK_ELEMENTS // max(1, k * h * w))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def upcast(x: Tensor) -> Tensor:
    """Cast to float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
