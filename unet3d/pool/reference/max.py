"""The maximum, written to be read: the first of equals; NaN wins, and the last NaN over others."""

import torch
from torch import Tensor

from unet3d.pool.argmax_codes import SelectedIndices
from unet3d.pool.windows import Windows


def maximum(x: Tensor, windows: Windows) -> tuple[Tensor, SelectedIndices]:
    """The greatest element of each window and its place, as nn.MaxPool3d chooses it."""
    inside = windows.valid_masks(x)
    best, place = None, None
    for i, view in enumerate(windows.views(x, fill=0)):
        if best is None or place is None:
            best, place = view, torch.full(view.shape, -1, dtype=torch.int16, device=x.device)
        wins = (view > best) | view.isnan() | (place < 0)
        if inside is not None:
            wins = wins & inside[i]
        best, place = torch.where(wins, view, best), torch.where(wins, i, place)
    assert best is not None
    assert place is not None
    return best, SelectedIndices(place, place)
