"""Find what fused blocks would ignore: hooks, replaced or parametrized modules, other options.

Fused blocks read the parameters of their modules and do not call them. A network that was changed
in a way that they do not compute has to run as plain modules.

This is done in every forward, because hooks and modules may change at any time. It reads modules
from `_modules`: attributes of nn.Module are slow, and a deep network has hundreds.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from unet3d.model.blocks import (
    ConvBlock,
    ConvNormAct,
    Interpolate,
    ResidualBlock,
    ResidualLevel,
    StochasticDepth,
    Strided,
)
from unet3d.types import Triple

ONE = (1, 1, 1)

Check = tuple[nn.Module, bool]
"""A module, and whether fused blocks compute it."""


def find_unsupported(network: nn.Module) -> str | None:
    """Return what fused blocks would ignore of a UNet3D, or None."""
    if network._backward_hooks or network._backward_pre_hooks:
        return "the network has a backward hook"
    parts = network._modules
    for part in ("encoder", "decoder", "heads"):
        if (module := find_hook(parts[part])) is not None:
            return f"{_find_name(network, module)} has a hook or another forward"
    for module, is_supported in _check_network(parts):
        if not is_supported:
            return f"{_find_name(network, module)} is not a module that UNet3D builds"
    return None


def find_hook(module: Any) -> nn.Module | None:
    """Return the first of the module and its submodules that has a hook or another forward."""
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
        return module
    if own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return module
    for child in own["_modules"].values():
        if child is not None and (found := find_hook(child)) is not None:
            return found
    return None


def _find_name(network: nn.Module, module: nn.Module) -> str:
    name = next(name for name, m in network.named_modules() if m is module)
    return f"{name} ({type(module).__name__})"


def _check_network(parts: Any) -> Iterator[Check]:
    stride = ONE
    for level in parts["encoder"]:
        pool = level.pool
        yield from _check_convs(level._modules["convs"], stride)
        stride = level.pool_kernel if type(pool) is Strided else ONE
        if pool is not None:
            yield pool, _is_pooling(pool, level.pool_kernel)
    for level in parts["decoder"]:
        yield level.up, _is_upsampling(level.up)
        yield from _check_convs(level._modules["convs"], ONE)
    for head in parts["heads"]:
        yield head, _is_conv(head, ONE) and head.kernel_size == ONE


def _check_convs(convs: Any, stride: Triple) -> Iterator[Check]:
    yield convs, type(convs) in (ConvBlock, ResidualLevel)
    for module in convs._modules.values():
        if type(module) is ResidualBlock:
            parts = module._modules
            layers = [(parts["conv1"], stride), (parts["conv2"], ONE)]
            if (projection := parts.get("projection")) is not None:
                layers.append((projection, ONE))
            yield module, type(parts["drop_path"]) is StochasticDepth
            yield parts["act"], _is_activation(parts["act"])
            if (pool := parts.get("skip_pool")) is not None:
                yield pool, _is_pooling(pool, stride)
        else:
            layers = [(module, stride)]
        for layer, layer_stride in layers:
            yield from _check_layer(layer, layer_stride)
        stride = ONE


def _check_layer(layer: Any, stride: Triple) -> Iterator[Check]:
    parts = layer._modules
    has_parts = type(layer) is ConvNormAct and [*parts] == ["conv", "norm", "act"]
    yield layer, has_parts
    if has_parts:
        yield parts["conv"], _is_conv(parts["conv"], stride)
        yield parts["norm"], _is_norm(parts["norm"])
        yield parts["act"], _is_activation(parts["act"])


def _is_conv(module: Any, stride: Triple) -> bool:
    return (
        type(module) is nn.Conv3d
        and module.stride == stride
        and module.padding == tuple(k // 2 if k % 2 else None for k in module.kernel_size)
        and module.dilation == ONE
        and module.groups == 1
        and module.padding_mode == "zeros"
    )


def _is_norm(module: Any) -> bool:
    if type(module) is nn.InstanceNorm3d:
        return module._buffers.get("running_mean") is None
    return type(module) in (nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.Identity)


def _is_activation(module: Any) -> bool:
    if type(module) is nn.LeakyReLU:
        return module.negative_slope >= 0
    return type(module) in (nn.ReLU, nn.Identity)


def _is_upsampling(module: Any) -> bool:
    if type(module) is not nn.ConvTranspose3d:
        return type(module) is Interpolate
    is_tiling = module.kernel_size == module.stride and module.dilation == ONE
    return is_tiling and module.groups == 1 and module.padding == module.output_padding == (0, 0, 0)


def _is_pooling(module: Any, kernel_size: Triple) -> bool:
    """Return whether a pooling can run tile by tile: it has no parameters and no overlap.

    A pooling that is neither ours nor torch's has the windows that its factory was given.
    """
    if type(module) is Strided:
        return module.kernel_size == kernel_size
    axes = getattr(module.__dict__.get("windows"), "axes", None)  # ours
    if type(module) in (nn.MaxPool3d, nn.AvgPool3d):
        sizes = (module.kernel_size, module.stride, module.padding, getattr(module, "dilation", 1))
        *axes, dilation = [(n,) * 3 if isinstance(n, int) else tuple(n) for n in sizes]
        if dilation != ONE or module.ceil_mode or getattr(module, "return_indices", False):
            return False
    has_windows = axes is None or tuple(axes) == (kernel_size, kernel_size, (0, 0, 0))
    return has_windows and next(module.parameters(), None) is None
