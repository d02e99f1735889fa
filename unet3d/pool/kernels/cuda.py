"""Launch the Triton kernels; Triton is imported on first use."""

from collections.abc import Sequence

import torch
from torch import Tensor

from unet3d.pool.argmax_codes import choose_code
from unet3d.pool.layout import (
    allocate_outputs,
    get_memory_format,
    is_channels_last,
    make_empty_like,
)
from unet3d.pool.reference import approx_median_gradient
from unet3d.pool.sorting_network import choose_median_network
from unet3d.pool.windows import PoolWindows
from unet3d.triton_kernels import get_address, has_triton, launch

HALVES = (torch.float16, torch.bfloat16)
PAIR_TYPES = {  # kernels tell bfloat16 and float16 apart by signed and unsigned integers
    torch.bfloat16: torch.int32,
    torch.float16: torch.uint32,
    torch.float32: torch.int64,
}


def supports(x: Tensor) -> bool:
    """Return whether the kernels take x."""
    return x.dtype in PAIR_TYPES and has_triton("pooling")


def forward(x: Tensor, pool: str, windows: PoolWindows, tau: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the output and its codes."""
    from unet3d.pool.kernels.forward_triton import forward_kernel

    y, codes = allocate_outputs(x, pool, windows)
    if y.numel():
        grid, arguments = forward_launch(x, y, codes, pool, windows, tau)
        launch(forward_kernel, x.device, grid, **arguments)
    return y, codes


def backward(
    grad: Tensor,
    pool: str,
    windows: PoolWindows,
    shape: Sequence[int],
    channels_last: bool,
    codes: Tensor | None = None,
    x: Tensor | None = None,
    tau: float = 0.0,
) -> Tensor:
    """Return the gradient of the input, from codes, from the input itself, or from neither."""
    from unet3d.pool.kernels.backward_triton import covering_kernel, tiled_kernel

    if pool == "approx_median" and x is not None and not _tiles(windows):
        # Rare enough for plain PyTorch, which takes several times the memory.
        result = approx_median_gradient(grad, x, windows, tau)
        return result.contiguous(memory_format=get_memory_format(channels_last))
    result = make_empty_like(shape, grad, channels_last)
    if not result.numel():
        return result
    source = grad if codes is None else codes  # average pooling has no codes and reads none
    if _tiles(windows):
        grid, arguments = tiled_launch(grad, source, x, result, pool, windows, tau)
        launch(tiled_kernel, grad.device, grid, **arguments)
    else:
        grid, arguments = covering_launch(grad, source, result, pool, windows)
        launch(covering_kernel, grad.device, grid, **arguments)
    return result


def forward_launch(
    x: Tensor, y: Tensor, codes: Tensor, pool: str, windows: PoolWindows, tau: float
) -> tuple[tuple[int, int], dict]:
    """Return the grid and arguments of forward_kernel."""
    last = is_channels_last(x)
    b, c, *space = x.shape
    d, h, w = windows.output_shape(x.shape)
    pairs = not last and _in_pairs(x, windows)
    planes, per_plane = (b * d * h, w * c) if last else (b * c * d, h * w)
    block = _block(per_plane, windows)
    return (planes, -(-per_plane // block)), {
        "x": _view_pairs(x) if pairs else x,
        "y": y,
        "code": codes,
        **dict(zip("DHW", (*space[:2], space[2] // 2 if pairs else space[2]), strict=True)),
        **{"DO": d, "HO": h, "OUTPUTS": per_plane, "TOTAL": y.numel(), "tau": tau},
        **{"POOL": pool, "CODE": int(choose_code(pool, windows))},
        "NETWORK": choose_median_network(windows.elements, padded=any(windows.padding)),
        **_constants(windows, "KSP"),
        **{"GROUP": c if last else w, "LAST": last, "PAIRS": pairs, "BLOCK": block},
        "HALF": x.dtype in HALVES,
    }


def tiled_launch(
    grad: Tensor,
    codes: Tensor,
    x: Tensor | None,
    result: Tensor,
    pool: str,
    windows: PoolWindows,
    tau: float,
) -> tuple[tuple[int, int], dict]:
    """Return the grid and arguments of tiled_kernel."""
    last = is_channels_last(result)
    b, c, *space = result.shape
    d, h, w = windows.output_shape(result.shape)
    depth, height, width = (-(-n // k) for n, k in zip(space, windows.size, strict=True))
    pairs = not last and _in_pairs(result, windows) and (x is None or _in_pairs(x, windows))
    planes, per_plane = (b * c * depth, height * width)
    if last:
        planes, per_plane = b * depth * height, width * c
    block = _block(per_plane, windows)
    source = result if x is None else x
    return (planes, -(-per_plane // block)), {
        "grad": grad,
        "code": codes,
        "x": _view_pairs(source) if pairs else source,
        "to": _view_pairs(result) if pairs else result,
        **dict(zip("DHW", (*space[:2], space[2] // 2 if pairs else space[2]), strict=True)),
        **{"DO": d, "HO": h, "WO": w, "DC": depth, "HC": height, "LANES": per_plane, "tau": tau},
        "POOL": pool,
        "NETWORK": choose_median_network(windows.elements, padded=any(windows.padding)),
        **_constants(windows, "K"),
        "CUT": (depth, height, width) != (d, h, w),
        **{"GROUP": c if last else width, "LAST": last, "PAIRS": pairs, "BLOCK": block},
        "HALF": result.dtype in HALVES,
    }


def covering_launch(
    grad: Tensor, codes: Tensor, result: Tensor, pool: str, windows: PoolWindows
) -> tuple[tuple[int, int], dict]:
    """Return the grid and arguments of covering_kernel."""
    last = is_channels_last(result)
    b, c, *space = result.shape
    d, h, w = windows.output_shape(result.shape)
    planes, per_plane = (b * space[0] * space[1], space[2] * c)
    if not last:
        planes, per_plane = b * c * space[0], space[1] * space[2]
    block = _block(per_plane, windows)
    return (planes, -(-per_plane // block)), {
        **{"grad": grad, "code": codes, "to": result, "D": space[0], "H": space[1]},
        **{"DO": d, "HO": h, "WO": w, "ELEMENTS": per_plane, "TOTAL": grad.numel()},
        **{"POOL": pool, "CODE": int(choose_code(pool, windows))},
        **_constants(windows, "KSP"),
        **{"W": space[2], "C": c if last else 1, "LAST": last, "BLOCK": block},
    }


def _constants(windows: PoolWindows, kinds: str) -> dict[str, int]:
    """Return KD, KH, KW and so on, for size (K), stride (S) and padding (P)."""
    values = dict(zip("KSP", windows.axes, strict=True))
    return {k + axis: n for k in kinds for axis, n in zip("DHW", values[k], strict=True)}


def _tiles(windows: PoolWindows) -> bool:
    """Return whether the windows tile the volume and their codes are masks."""
    return windows.size == windows.stride and not any(windows.padding) and windows.elements <= 8


def _in_pairs(x: Tensor, windows: PoolWindows) -> bool:
    """Return whether one aligned load reads a row of a window: two elements."""
    row = (windows.size[2], windows.stride[2], windows.padding) == (2, 2, (0, 0, 0))
    return row and x.shape[-1] % 2 == 0 and get_address(x) % (2 * x.element_size()) == 0


def _view_pairs(x: Tensor) -> Tensor:
    """View two elements as one; a contiguous map of one channel may have any stride there."""
    return x.view(-1).view(PAIR_TYPES[x.dtype])


def _block(per_plane: int, windows: PoolWindows) -> int:
    """Return the lanes of a program: 4 per thread of 4 warps, fewer where windows are large."""
    limit = 512 if windows.elements <= 8 else 128
    return min(limit, max(32, 1 << (per_plane - 1).bit_length()))
