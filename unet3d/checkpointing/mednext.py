"""Blocks of MONAI's MedNeXt that store only their input, as the fused blocks of a UNet3D do.

A block is a depthwise convolution, a norm by channel, and two convolutions of single voxels around
a GELU. The first is a small part of the work, so backward repeats it. The hidden map, two to eight
times as wide as the input, exists in tiles only, in forward and in backward.
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.checkpointing.recompute import checkpoint_block
from unet3d.custom_ops import get_device_type, is_transformed, keep_metadata
from unet3d.errors import UsageError
from unet3d.module_hooks import find_hook, get_forward, has_global_hook
from unet3d.types import Retention

BLOCKS = ("MedNeXtBlock", "MedNeXtDownBlock", "MedNeXtUpBlock")
"""Classes of MONAI 1.6.1; forward reads their attributes."""
SPACE = (2, 3, 4)
TILE_BYTES = {"cpu": 4 * 2**20, "cuda": 32 * 2**20}
"""Size of a tile of the hidden map for one volume, which makes memory affine in the batch size.

Small ones stay in a CPU's cache, large ones save launches.
"""


def fuse_mednext(model: Any, retention: Retention) -> bool:
    """Replace the forward of all MedNeXt blocks, if there are any; names of parameters stay.

    Where the last output of the first encoder level is not stored, both stages of full resolution
    store their input only.
    """
    blocks: list[Any] = [module for module in model.modules() if is_mednext_block(module)]
    for block in blocks:
        block.forward = partial(run_block, get_forward(block), block, retention.tile_bytes)
    recomputes = retention.get_level("encoder", 0).last != "store"
    if recomputes and blocks and hasattr(model, "enc_stages"):
        for stage in (model.enc_stages[0], model.dec_stages[-1]):
            stage.forward = partial(checkpoint_block, get_forward(stage), stage)
    return bool(blocks)


def is_mednext_block(module: Any) -> bool:
    """Return whether a module is a block in 3D with a norm by channel, as published."""
    return (
        type(module).__module__.startswith("monai.")
        and type(module).__name__ in BLOCKS
        and isinstance(module.norm, nn.GroupNorm)
        and module.norm.num_groups == module.norm.num_channels
        and module.dim == "3d"
        and not module.global_resp_norm
    )


def find_changed_part(block: Any) -> str | None:
    """Return a part that is not as MONAI builds it, and that `StoreInput` would not compute."""
    if get_forward(block) is not type(block).forward:
        return "another forward"
    if has_global_hook():
        return "a hook on every module"
    for name in ("conv1", "norm", "conv2", "act", "conv3"):
        part = getattr(block, name)
        if not _is_as_built(name, part) or find_hook(part):
            return f"another {name} ({type(part).__name__}), or a hook on it"
    return None


def _is_as_built(name: str, part: Any) -> bool:
    if name == "act":
        return type(part) is nn.GELU and part.approximate == "none"
    if [*part._parameters] != ["weight", "bias"] or part.bias is None:
        return False
    if name == "norm":
        return type(part) is nn.GroupNorm and part.num_groups == part.num_channels
    if name == "conv1":  # called as a module
        is_ours = type(part).__module__.startswith(("torch.nn.modules.", "unet3d."))
        return is_ours and isinstance(part, nn.Conv3d | nn.ConvTranspose3d)
    is_plain = type(part) is nn.Conv3d and part.kernel_size == part.stride == (1, 1, 1)
    return is_plain and part.groups == 1 and part.padding == (0, 0, 0)


def run_block(forward: Any, block: Any, tile_bytes: int | None, x: Tensor) -> Tensor:
    """Run a block of any of the three kinds; `forward` is MONAI's, for compilers and transforms."""
    if torch.compiler.is_compiling() or is_transformed():
        return forward(block, x)
    if (changed := find_changed_part(block)) is not None:
        warnings.warn(
            f"{type(block).__name__} has {changed}: it runs as MONAI's module, which stores more "
            "for backward; checkpointing=none does so without this warning",
            stacklevel=2,
        )
        return forward(block, x)
    parts = block.conv1, block.norm, block.conv2, block.conv3
    weights = (weight for part in parts for weight in (part.weight, part.bias))
    tile_bytes = tile_bytes or TILE_BYTES.get(get_device_type(x), TILE_BYTES["cuda"])
    y = keep_metadata(lambda x: StoreInput.apply(x, block, tile_bytes, *weights), x)
    if block.do_res:
        return x + y
    if getattr(block, "resample_do_res", False):
        y = y + block.res_conv(x)
    return F.pad(y, (1, 0) * 3) if isinstance(block.conv1, nn.ConvTranspose3d) else y


class StoreInput(torch.autograd.Function):
    """A block without its residual connection."""

    @staticmethod
    def forward(ctx, x, block, tile_bytes, *parameters):
        kind = x.device.type
        ctx.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        y = block.conv1(x).contiguous(memory_format=torch.channels_last_3d)
        if y[:1, 0].numel() == 1:
            raise UsageError(
                "the patch is too small: MedNeXt's coarsest maps have one voxel, of which its norm "
                "leaves nothing: set 32 or more voxels along each axis"
            )
        with torch.autocast(kind, enabled=False):
            tiles = list(split(y, block, tile_bytes))
            mean, rstd = compute_statistics(y, block.norm.eps, tiles)
            w1, b1, w2, b2 = cast_tail(parameters[4:], y.dtype)
            shape = len(y), len(w2), *y.shape[2:]
            out = torch.empty(
                shape, dtype=y.dtype, device=y.device, memory_format=torch.channels_last_3d
            )
            for tile in tiles:
                normalized = normalize(y[:, :, tile], mean, rstd, *parameters[2:4])
                part = F.linear(F.gelu(F.linear(normalized, w1, b1)), w2, b2)
                out[:, :, tile] = part.movedim(-1, 1)
        ctx.save_for_backward(x, mean, rstd, *parameters)
        ctx.block, ctx.tile_bytes = block, tile_bytes
        return out

    @staticmethod
    def backward(ctx, g):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fused blocks have no second derivative: remove create_graph=True, or set "
                "checkpointing=none"
            )
        with torch.autocast(g.device.type, enabled=False):  # as torch, in the types of forward
            return StoreInput._backward(ctx, g)

    @staticmethod
    def _backward(ctx, g):
        x, mean, rstd, *parameters = ctx.saved_tensors
        gamma, beta, *tail = parameters[2:]
        enabled = ctx.autocast is not None
        if x.shape[2] < ctx.block.conv1.kernel_size[0]:
            x = x.contiguous()  # torch's gradients of short maps are wrong in channels-last memory
        with torch.enable_grad(), torch.autocast(x.device.type, ctx.autocast, enabled=enabled):
            x = x.detach().requires_grad_(ctx.needs_input_grad[0])
            # These weights: torch.func.functional_call has put the module's own ones back. Hooks on
            # them are called by the engine alone.
            own = [p.detach().requires_grad_(p.requires_grad) for p in parameters[:2]]
            conv1 = copy.copy(ctx.block.conv1)
            vars(conv1)["_parameters"] = dict(zip(("weight", "bias"), own, strict=True))
            convolved = conv1.forward(x)  # hooks that observe modules are not called in backward
        y = convolved.detach().contiguous(memory_format=torch.channels_last_3d)
        w1, b1, w2, _ = cast_tail(tail, y.dtype)
        sums = [torch.zeros_like(p, dtype=mean.dtype) for p in tail]
        grad = torch.empty_like(y)  # of the norm's output, then of its input
        to_beta, to_gamma = torch.zeros_like(mean), torch.zeros_like(mean)
        tiles = list(split(y, ctx.block, ctx.tile_bytes // 3))
        for tile in tiles:
            normalized = normalize(y[:, :, tile], mean, rstd, gamma, beta)
            hidden = F.linear(normalized, w1, b1)
            upper = g[:, :, tile].movedim(1, -1).to(y.dtype)
            sums[2] += multiply(upper, F.gelu(hidden)).view_as(sums[2])
            sums[3] += upper.sum((0, 1, 2, 3), dtype=mean.dtype)
            hidden = torch.ops.aten.gelu_backward(upper @ w2, hidden)
            sums[0] += multiply(hidden, normalized).view_as(sums[0])
            sums[1] += hidden.sum((0, 1, 2, 3), dtype=mean.dtype)
            del normalized
            part = (hidden @ w1).movedim(-1, 1)
            del hidden
            grad[:, :, tile] = part
            to_beta += part.sum(SPACE, keepdim=True, dtype=mean.dtype)
            to_gamma += (part * (y[:, :, tile] - mean)).mul_(rstd).sum(SPACE, keepdim=True)
        scale, count = rstd * gamma.view(-1, 1, 1, 1), y[0, 0].numel()
        for tile in tiles:
            centered = (y[:, :, tile] - mean) * (rstd * to_gamma / count)
            grad[:, :, tile] = (grad[:, :, tile] - to_beta / count - centered) * scale
        del y
        inputs = [t for t in (x, *own) if t.requires_grad]
        found = torch.autograd.grad(convolved, inputs, grad) if inputs else ()
        gradients = dict(zip(inputs, found, strict=True))
        to_norm = (total.sum(0).flatten() for total in (to_gamma, to_beta))
        sums = [*to_norm, *sums]
        rest = [total.to(p.dtype) for total, p in zip(sums, parameters[2:], strict=True)]
        return gradients.get(x), None, None, *map(gradients.get, own), *rest


def split(y: Tensor, block: Any, tile_bytes: int) -> Iterator[slice]:
    """Yield the rows of each tile, whose hidden map has this size."""
    rows = tile_bytes // (y[0, 0, 0].numel() * block.conv2.out_channels * y.itemsize)
    for start in range(0, y.shape[2], max(1, rows)):
        yield slice(start, min(start + max(1, rows), y.shape[2]))


def compute_statistics(y: Tensor, eps: float, tiles: list[slice]) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / deviation (B, C, 1, 1, 1) of each channel, in at least float32."""
    dtype, count = torch.promote_types(y.dtype, torch.float32), y[0, 0].numel()
    mean = y.sum(SPACE, keepdim=True, dtype=dtype) / count
    squares = torch.zeros_like(mean)
    for tile in tiles:
        squares += (y[:, :, tile] - mean).square_().sum(SPACE, keepdim=True)
    return mean, (squares / count + eps).rsqrt()


def normalize(y: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Return the norm's output (B, D, H, W, C), of the dtype of y."""
    scale = rstd * gamma.view(-1, 1, 1, 1)
    shift = beta.view(-1, 1, 1, 1) - mean * scale
    return (y * scale).add_(shift).to(y.dtype).movedim(1, -1)


def cast_tail(parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return weights as matrices, and biases, of both convolutions of single voxels."""
    return [p.to(dtype).flatten(1) if p.dim() > 1 else p.to(dtype) for p in parameters]


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum over all voxels of the products of channels."""
    return a.flatten(0, -2).T @ b.flatten(0, -2)
