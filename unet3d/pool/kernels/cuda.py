"""Launch the Triton kernels; Triton is imported on first use."""

from typing import Any

import torch
from torch import Tensor

from unet3d.pool.argmax_codes import choose_code
from unet3d.pool.kernels import plain
from unet3d.pool.sorting_network import build_median_network
from unet3d.pool.windows import PoolWindows, is_channels_last
from unet3d.triton_kernels import launch

HALVES = (torch.float16, torch.bfloat16)
PAIR_TYPES = {  # kernels tell bfloat16 and float16 apart by signed and unsigned integers
    torch.bfloat16: torch.int32,
    torch.float16: torch.uint32,
    torch.float32: torch.int64,
}


def forward(
    x: Tensor, y: Tensor, codes: Tensor, pool: str, windows: PoolWindows, tau: float
) -> None:
    """Write the output and the codes of the selected elements."""
    from unet3d.pool.kernels.forward_triton import forward_kernel

    last = is_channels_last(x)
    b, c, depth, height, width = x.shape
    d, h, w = y.shape[2:]
    pairs = not last and _in_pairs(x, windows)
    planes, per_plane = (b * d * h, w * c) if last else (b * c * d, h * w)
    _launch(
        *(forward_kernel, x.device, planes, per_plane, windows),
        **{"x": _view_pairs(x) if pairs else x, "y": y, "code": codes},
        **{"D": depth, "H": height, "W": width // 2 if pairs else width, "DO": d, "HO": h},
        **{"OUTPUTS": per_plane, "TOTAL": y.numel(), "tau": tau},
        **{"POOL": pool, "CODE": int(choose_code(pool, windows)), "NETWORK": _network(windows)},
        **_constants(windows, "KSP"),
        **{"GROUP": c if last else w, "LAST": last, "PAIRS": pairs, "HALF": x.dtype in HALVES},
    )


def backward(
    grad: Tensor, saved: Tensor | None, result: Tensor, pool: str, windows: PoolWindows, tau: float
) -> None:
    """Write the gradient of the input."""
    tiles = windows.size == windows.stride and not any(windows.padding) and windows.elements <= 8
    if tiles:
        _run_tiled(grad, saved, result, pool, windows, tau)
    elif pool == "approx_median":
        # Rare enough for plain PyTorch, which takes several times the memory.
        plain.backward(grad, saved, result, pool, windows, tau)
    else:
        _run_covering(grad, grad if saved is None else saved, result, pool, windows)


def _run_tiled(
    grad: Tensor, saved: Tensor | None, result: Tensor, pool: str, windows: PoolWindows, tau: float
) -> None:
    """Run the kernel for windows that tile the volume and whose codes are masks."""
    from unet3d.pool.kernels.backward_triton import tiled_kernel

    codes, x = (grad if saved is None else saved), result  # the kernel does not read these
    if pool == "approx_median" and saved is not None:
        codes, x = grad, saved
    last = is_channels_last(result)
    b, c, *space = result.shape
    d, h, w = grad.shape[2:]
    depth, height, width = (-(-n // k) for n, k in zip(space, windows.size, strict=True))
    pairs = not last and _in_pairs(result, windows) and _in_pairs(x, windows)
    planes, per_plane = (b * depth * height, width * c) if last else (b * c * depth, height * width)
    _launch(
        *(tiled_kernel, grad.device, planes, per_plane, windows),
        **{"grad": grad, "code": codes, "x": _view_pairs(x) if pairs else x},
        **{"to": _view_pairs(result) if pairs else result},
        **{"D": space[0], "H": space[1], "W": space[2] // 2 if pairs else space[2]},
        **{"DO": d, "HO": h, "WO": w, "DC": depth, "HC": height, "LANES": per_plane, "tau": tau},
        **{"POOL": pool, "NETWORK": _network(windows)},
        **_constants(windows, "K"),
        **{"CUT": (depth, height, width) != (d, h, w), "GROUP": c if last else width},
        **{"LAST": last, "PAIRS": pairs, "HALF": result.dtype in HALVES},
    )


def _run_covering(
    grad: Tensor, codes: Tensor, result: Tensor, pool: str, windows: PoolWindows
) -> None:
    """Run the kernel for all other windows."""
    from unet3d.pool.kernels.backward_triton import covering_kernel

    last = is_channels_last(result)
    b, c, depth, height, width = result.shape
    d, h, w = grad.shape[2:]
    planes, per_plane = (b * depth * height, width * c) if last else (b * c * depth, height * width)
    _launch(
        *(covering_kernel, grad.device, planes, per_plane, windows),
        **{"grad": grad, "code": codes, "to": result, "D": depth, "H": height},
        **{"DO": d, "HO": h, "WO": w, "ELEMENTS": per_plane, "TOTAL": grad.numel()},
        **{"POOL": pool, "CODE": int(choose_code(pool, windows))},
        **_constants(windows, "KSP"),
        **{"W": width, "C": c if last else 1, "LAST": last},
    )


def _launch(
    kernel: Any,
    device: torch.device,
    planes: int,
    per_plane: int,
    windows: PoolWindows,
    **arguments: Any,
) -> None:
    """Launch a kernel with one row of programs per plane.

    A program has 4 lanes per thread of 4 warps, fewer where windows are large.
    """
    limit = 512 if windows.elements <= 8 else 128
    block = min(limit, max(32, 1 << (per_plane - 1).bit_length()))
    launch(kernel, device, (planes, -(-per_plane // block)), **arguments, BLOCK=block)


def _network(windows: PoolWindows) -> tuple[tuple[int, int, int], ...]:
    return build_median_network(windows.elements, padded=any(windows.padding))


def _constants(windows: PoolWindows, kinds: str) -> dict[str, int]:
    """Return KD, KH, KW and so on, for size (K), stride (S) and padding (P)."""
    values = dict(zip("KSP", windows.axes, strict=True))
    return {k + axis: n for k in kinds for axis, n in zip("DHW", values[k], strict=True)}


def _in_pairs(x: Tensor, windows: PoolWindows) -> bool:
    """Return whether one aligned load reads a row of a window: two elements."""
    row = (windows.size[2], windows.stride[2], windows.padding) == (2, 2, (0, 0, 0))
    return row and x.shape[-1] % 2 == 0 and x.data_ptr() % (2 * x.element_size()) == 0


def _view_pairs(x: Tensor) -> Tensor:
    """View two elements as one; a contiguous map of one channel may have any stride there."""
    return x.view(-1).view(PAIR_TYPES[x.dtype])
