"""Find what fused blocks do not compute: hooks, replaced modules, other options, transforms.

Fused blocks read the parameters of their modules and do not call them. A network that was changed
in a way that they do not compute has to run as plain modules.

This is done in every forward, because hooks and modules may change at any time. It reads modules
from `_modules`: attributes of nn.Module are slow, and a deep network has hundreds.
"""

from typing import Any

import torch
from torch import nn

from unet3d.custom_ops import is_transformed
from unet3d.model.blocks import (
    ConvBlock,
    ConvNormAct,
    Interpolate,
    ResidualBlock,
    ResidualLevel,
    StochasticDepth,
    Strided,
)
from unet3d.module_hooks import find_hook, has_global_hook
from unet3d.pool.operators import Pool3d
from unet3d.types import Triple

ONE = (1, 1, 1)

NORMS = (nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm3d, nn.GroupNorm)

LAYER_NORMS = frozenset((*NORMS, nn.Identity))

SUPPORTED = (
    *(nn.ModuleList, ConvBlock, ResidualLevel, ResidualBlock, StochasticDepth, Interpolate),
    *(*NORMS, nn.Identity, nn.ReLU),
)


ACTIVATIONS = frozenset((nn.ReLU, nn.LeakyReLU, nn.Identity))

FORWARDS = {kind: kind.forward for kind in (*SUPPORTED, nn.Conv3d, nn.ConvTranspose3d)}
"""What some replace for all modules of a kind."""

CONV_FORWARD = nn.Conv3d._conv_forward


def find_unsupported(network: nn.Module) -> str | None:
    """Return what fused blocks would ignore of a UNet3D, or None."""
    if is_transformed():
        name = "torch.jit.trace" if torch.jit.is_tracing() else "torch.func"
        return f"{name} cannot transform fused blocks"
    if network._backward_hooks or network._backward_pre_hooks:
        return "the network has a backward hook"
    if has_global_hook():
        return "torch has a hook on every module"
    parts: Any = network._modules
    for part in ("encoder", "decoder", "heads"):
        if (module := find_hook(parts[part])) is not None:
            return f"{_find_name(network, module)} has a hook or another forward"
        if (module := _find_unknown(parts[part])) is not None:
            name, wanted = _find_name(network, module), "a module that UNet3D builds"
            if "pool (" in name:
                wanted = "a pooling of windows side by side with by_window = True and no weights"
            return f"{name} is not {wanted}"
    for head in parts["heads"]:
        if type(head) is not nn.Conv3d or head.kernel_size != ONE or head.stride != ONE:
            return f"{_find_name(network, head)} is not a module that UNet3D builds"
    return None


def _find_name(network: nn.Module, module: nn.Module) -> str:
    name = next(name for name, m in network.named_modules() if m is module)
    return f"{name} ({type(module).__name__})"


def _find_unknown(module: Any) -> nn.Module | None:
    """Return the first of the module and its submodules that fused blocks do not compute."""
    if not (_is_supported(module) and _is_in_place(module)):
        return module
    for name, child in module._modules.items():
        if name in ("pool", "skip_pool") and child is not None:
            size = module.pool_kernel if name == "pool" else module._modules["conv1"].stride
            found = None if _is_pooling(child, size) else child
        else:
            found = None if child is None else _find_unknown(child)
        if found is not None:
            return found
    return None


def _is_in_place(module: Any) -> bool:
    """Return whether the children of a module are of the kinds that fused blocks take there."""
    kind, children = type(module), module._modules
    if kind is ConvNormAct:
        conv, norm, act = map(type, children.values())
        is_known = conv is nn.Conv3d and norm in LAYER_NORMS and act in ACTIVATIONS
        return is_known and children["conv"].stride == module.stride
    if kind is ResidualBlock:
        conv, last, added = children["conv1"], children["conv2"], children.get("projection")
        if not type(conv) is type(last) is ConvNormAct:
            return False
        if type(children["drop_path"]) is not StochasticDepth:
            return False
        if type(children["act"]) not in ACTIVATIONS:
            return False
        linear = (last,) if added is None else (last, added)
        return all(type(layer._modules.get("act")) is nn.Identity for layer in linear)
    if kind is ConvBlock:
        return all(type(child) is ConvNormAct for child in children.values())
    if kind is ResidualLevel:
        blocks = [c for n, c in children.items() if n != "0" or type(c) is not ConvNormAct]
        others = (child._modules for child in blocks[1:])
        return all(type(child) is ResidualBlock for child in blocks) and not any(
            child.get("projection") or child.get("skip_pool") for child in others
        )
    if "pool_kernel" in module.__dict__:
        return type(children["convs"]) is (ResidualLevel if module.is_residual else ConvBlock)
    if "skip_first" in module.__dict__:
        is_known = type(children["up"]) in (Interpolate, nn.ConvTranspose3d)
        return is_known and type(children["convs"]) is ConvBlock
    return True


def _is_supported(module: Any) -> bool:
    kind = type(module)
    if FORWARDS.get(kind, kind.forward) is not kind.forward:
        return False
    if kind is nn.Conv3d:
        has_padding = module.padding == tuple(k // 2 if k % 2 else None for k in module.kernel_size)
        is_plain = module.dilation == ONE and module.groups == 1 and module.padding_mode == "zeros"
        own = "_conv_forward" in module.__dict__ or kind._conv_forward is not CONV_FORWARD
        return has_padding and is_plain and not own
    if kind is nn.ConvTranspose3d:
        is_tiling = module.kernel_size == module.stride and module.dilation == ONE
        no_padding = module.padding == module.output_padding == (0, 0, 0)
        return is_tiling and module.groups == 1 and no_padding
    if kind in NORMS:
        has_both = (module.weight is None) == (module.bias is None)
        has_statistics = module._buffers.get("running_mean") is not None
        return has_both and not (kind is nn.InstanceNorm3d and has_statistics)
    if kind is nn.LeakyReLU:
        return module.negative_slope >= 0
    if kind is ConvNormAct:
        return [*module._modules] == ["conv", "norm", "act"]
    return kind in SUPPORTED or hasattr(module, "pool_kernel") or hasattr(module, "skip_first")


def _is_pooling(module: Any, kernel_size: Triple) -> bool:
    """Return whether a pooling can run tile by tile, and again in backward.

    One that is neither ours nor torch's has to say so: it may draw random numbers, depend on the
    whole map, or count its calls. It has the windows that its factory was given.
    """
    if type(module) is Strided:
        return module.kernel_size == kernel_size
    axes = getattr(module.__dict__.get("windows"), "axes", None)  # ours
    if type(module) in (nn.MaxPool3d, nn.AvgPool3d):
        sizes = (module.kernel_size, module.stride, module.padding, getattr(module, "dilation", 1))
        *axes, dilation = [(n,) * 3 if isinstance(n, int) else tuple(n) for n in sizes]
        if dilation != ONE or module.ceil_mode or getattr(module, "return_indices", False):
            return False
    elif type(module).forward is not Pool3d.forward and not getattr(module, "by_window", False):
        return False
    has_windows = axes is None or tuple(axes) == (kernel_size, kernel_size, (0, 0, 0))
    return has_windows and next(module.parameters(), None) is None
