"""Choose a pooling by its name, and replace the poolings of any network."""

import warnings
from typing import Any

import torch
from torch import nn

from unet3d.errors import UsageError
from unet3d.pool.approx_median import ApproxMedianPool3d
from unet3d.pool.avg import AvgPool3d
from unet3d.pool.max import MaxPool3d
from unet3d.pool.median import MedianPool3d
from unet3d.pool.operators import Pool3d
from unet3d.types import PoolFactory

POOLINGS = {p.pool: p for p in (MaxPool3d, AvgPool3d, MedianPool3d, ApproxMedianPool3d)}
TORCH_POOLINGS = (nn.MaxPool3d, nn.AvgPool3d)


def get_pooling(pool: str | PoolFactory) -> PoolFactory:
    """Return the pooling that a name stands for; factories are returned as they are."""
    if isinstance(pool, nn.Module):
        raise UsageError(
            "pool must be a name or a function that makes a layer from a kernel size, got the "
            f"layer {pool}: use {type(pool).__name__}"
        )
    if not isinstance(pool, str):
        return pool
    if pool not in POOLINGS:
        raise UsageError(f"pool must be one of {', '.join(POOLINGS)}, got {pool!r}")
    return POOLINGS[pool]


def replace_pooling(model: nn.Module, pool: str | PoolFactory | None = None) -> int:
    """Replace every 3D max, average and median pooling of a network by one that stores less.

    Args:
        model: any network in PyTorch. Its poolings, torch's and ours, are replaced in place.
        pool: ``"max"``, ``"avg"``, ``"median"`` or ``"approx_median"``, or a function of
            ``kernel_size``, ``stride`` and ``padding`` that makes a layer. By default each pooling
            of torch is replaced by the same one of ours, with equal outputs and gradients.

    Returns:
        The number of poolings that were replaced. A warning says so if there were none.

    Example::

        >>> network = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.MaxPool3d(2))
        >>> replace_pooling(network, "median")
        1
        >>> network[1]
        MedianPool3d(kernel_size=(2, 2, 2), stride=(2, 2, 2), padding=(0, 0, 0))
    """
    factory = None if pool is None else get_pooling(pool)
    if isinstance(model, (*TORCH_POOLINGS, Pool3d)):
        raise UsageError(
            f"{type(model).__name__} is itself a pooling, which cannot be replaced in place: build "
            "the other one, for example unet3d.MedianPool3d(2)"
        )
    replacements: dict[nn.Module, nn.Module] = {}  # a layer may be used in several places
    places: list[tuple[nn.Module, str, nn.Module]] = []
    for path, module in list(model.named_modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, TORCH_POOLINGS) or (factory and isinstance(child, Pool3d)):
                places.append((module, name, child))
                if child not in replacements:
                    where = f"{path}.{name}".lstrip(".")
                    replacements[child] = _make_replacement(where, child, factory)
    for module, name, child in places:  # once none is refused
        setattr(module, name, replacements[child].train(child.training))
    if not replacements:
        warnings.warn(f"{type(model).__name__} has no 3D pooling to replace", stacklevel=2)
    return len(replacements)


def _make_replacement(where: str, layer: Any, factory: PoolFactory | None) -> nn.Module:
    """Return the replacement of a layer; refuse one that pools in another way."""
    kinds = [kind for kind in (*TORCH_POOLINGS, Pool3d) if isinstance(layer, kind)]
    is_changed = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    if type(layer).forward is not kinds[0].forward or is_changed:
        raise UsageError(f"{where}: a pooling with a hook or its own forward cannot be replaced")
    if isinstance(layer, Pool3d):
        assert factory is not None
        return factory(*layer.windows.axes)
    plain: dict[str, Any] = {
        **{"ceil_mode": (False,), "dilation": (1, (1, 1, 1)), "return_indices": (False,)},
        "divisor_override": (None,),
    }
    if torch.tensor(layer.padding).any():
        plain["count_include_pad"] = (True,)
    for name, accepted in plain.items():
        if (value := getattr(layer, name, accepted[0])) not in accepted:
            raise UsageError(f"{where}: a pooling with {name}={value} cannot be replaced")
    make = factory or (MaxPool3d if isinstance(layer, nn.MaxPool3d) else AvgPool3d)
    return make(kernel_size=layer.kernel_size, stride=layer.stride, padding=layer.padding)
