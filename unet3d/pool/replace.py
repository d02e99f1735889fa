"""Replace the poolings of any network by those of this package."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from unet3d.errors import UsageError
from unet3d.pool.approx_median import ApproxMedianPool3d
from unet3d.pool.avg import AvgPool3d
from unet3d.pool.max import MaxPool3d
from unet3d.pool.median import MedianPool3d
from unet3d.types import PoolFactory

POOLINGS: Mapping[str, PoolFactory] = MappingProxyType(
    {
        "max": MaxPool3d,
        "avg": AvgPool3d,
        "median": MedianPool3d,
        "approx_median": ApproxMedianPool3d,
    }
)

PLAIN_ARGUMENTS: Mapping[type[nn.Module], Mapping[str, Any]] = MappingProxyType(
    {
        nn.MaxPool3d: {"dilation": (1, (1, 1, 1)), "return_indices": (False,)},
        nn.AvgPool3d: {"divisor_override": (None,)},
    }
)
"""Values of arguments that ours do not have, by layer of torch."""


def replace_pooling(model: nn.Module, pool: str | PoolFactory | None = None) -> nn.Module:
    """Replace every nn.MaxPool3d and nn.AvgPool3d of a network by a pooling that stores less.

    Args:
        model: any network in PyTorch. Its poolings are replaced in place.
        pool: ``"max"``, ``"avg"``, ``"median"`` or ``"approx_median"``, or a function of
            ``kernel_size``, ``stride`` and ``padding`` that makes a layer. By default each pooling
            is replaced by the same one, with equal outputs and gradients.

    Returns:
        The network, or its replacement if the network itself is a pooling.

    Example::

        >>> network = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.MaxPool3d(2))
        >>> replace_pooling(network, "median")[1]
        MedianPool3d(kernel_size=(2, 2, 2), stride=(2, 2, 2), padding=(0, 0, 0))
    """
    if isinstance(pool, str) and pool not in POOLINGS:
        raise UsageError(f"pool must be one of {', '.join(POOLINGS)}, got {pool!r}")
    if isinstance(model, nn.MaxPool3d | nn.AvgPool3d):
        return _make_replacement("the network", model, pool)
    for path, module in list(model.named_modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.MaxPool3d | nn.AvgPool3d):
                where = f"{path}.{name}".lstrip(".")
                setattr(module, name, _make_replacement(where, child, pool))
    return model


def _make_replacement(
    where: str, layer: nn.MaxPool3d | nn.AvgPool3d, pool: str | PoolFactory | None
) -> nn.Module:
    """Return the replacement of a layer; refuse one that pools in another way."""
    plain = {"ceil_mode": (False,)} | dict(PLAIN_ARGUMENTS[_get_kind(layer)])
    if isinstance(layer, nn.AvgPool3d) and any(_expand(layer.padding)):
        plain["count_include_pad"] = (True,)
    for name, accepted in plain.items():
        if (value := getattr(layer, name)) not in accepted:
            raise UsageError(f"{where}: a pooling with {name}={value} cannot be replaced")
    if pool is None:
        pool = "max" if isinstance(layer, nn.MaxPool3d) else "avg"
    make = POOLINGS[pool] if isinstance(pool, str) else pool
    return make(kernel_size=layer.kernel_size, stride=layer.stride, padding=layer.padding)


def _get_kind(layer: nn.Module) -> type[nn.Module]:
    return next(kind for kind in PLAIN_ARGUMENTS if isinstance(layer, kind))


def _expand(size: Any) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)
