"""Launch the Triton kernels; Triton is imported on first use."""

from typing import Any

import torch
from torch import Tensor

from unet3d.triton_kernels import launch

TILE = 1024  # elements that a program holds in registers
PROGRAMS = 512  # approximate number of programs that sum up a batch


def sum_terms(
    logits: Tensor, labels: Tensor, table: Tensor | None, gamma: float, smoothing: float
) -> Tensor:
    """Run dice_terms.sum_terms in one kernel."""
    from unet3d.loss.kernels.triton import sum_terms_kernel

    b, k = logits.shape[:2]
    sizes = _sizes(logits, table, gamma, smoothing)
    tiles = -(-labels[0].numel() // sizes["BV"])
    per_program = max(1, tiles * b // PROGRAMS)
    grid = (-(-tiles // per_program), b)
    parts = torch.empty(grid[0], 5, b, k, dtype=torch.float32, device=logits.device)
    tensors = (logits, labels.contiguous(), _to_bytes(logits, table), parts)
    numbers = (labels[0].numel(), b, k, per_program, gamma, smoothing)
    launch(sum_terms_kernel, logits.device, grid, *tensors, *numbers, **sizes)
    return parts.sum(0)


def compute_gradient(
    logits: Tensor,
    labels: Tensor,
    table: Tensor | None,
    grad: Tensor,
    gamma: float,
    smoothing: float,
) -> Tensor:
    """Run dice_terms.compute_gradient in one kernel."""
    from unet3d.loss.kernels.triton import gradient_kernel

    b, k = logits.shape[:2]
    out = torch.empty_like(logits)
    sizes = _sizes(logits, table, gamma, smoothing)
    grid = (-(-labels[0].numel() // sizes["BV"]), b)
    tensors = (logits, labels.contiguous(), _to_bytes(logits, table), grad, out)
    numbers = (labels[0].numel(), b, k, gamma, smoothing)
    launch(gradient_kernel, logits.device, grid, *tensors, *numbers, **sizes)
    return out


def _sizes(logits: Tensor, table: Tensor | None, gamma: float, smoothing: float) -> dict[str, Any]:
    """Return the voxels and outputs of a tile, and the kinds of outputs, layout and loss."""
    outputs = 1 << (logits.shape[1] - 1).bit_length()
    return {
        "BV": max(1, TILE // outputs),
        "BK": outputs,
        "REGIONS": table is not None,
        "LAST": not logits.is_contiguous(),
        "FOCAL": gamma != 0,
        "SMOOTH": smoothing != 0,
    }


def _to_bytes(logits: Tensor, table: Tensor | None) -> Tensor:
    return logits if table is None else table.view(torch.uint8)
