"""Loss terms, each in one kernel: Triton on CUDA, C++ on a CPU."""

import torch
from torch import Tensor


def make_dense(logits: Tensor) -> Tensor:
    """Return logits whose voxels are evenly spaced: contiguous or channels-last."""
    is_channels_last = logits.is_contiguous(memory_format=torch.channels_last_3d)
    return logits if is_channels_last else logits.contiguous()
