"""Reference max pooling: the first of equal elements; NaN wins, and the last NaN over others."""

import torch
from torch import Tensor

from unet3d.pool.argmax_codes import SelectedIndices
from unet3d.pool.windows import PoolWindows


def maximum(x: Tensor, windows: PoolWindows) -> tuple[Tensor, SelectedIndices]:
    """Return the maximum of each window and the index that nn.MaxPool3d selects."""
    inside = windows.valid_masks(x)
    best, index = None, None
    for i, view in enumerate(windows.views(x, fill=0)):
        if best is None or index is None:
            best, index = view, torch.full(view.shape, -1, dtype=torch.int16, device=x.device)
        wins = (view > best) | view.isnan() | (index < 0)
        if inside is not None:
            wins = wins & inside[i]
        best, index = torch.where(wins, view, best), torch.where(wins, i, index)
    assert best is not None
    assert index is not None
    return best, SelectedIndices(index, index)
