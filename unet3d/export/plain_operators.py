"""Turn a network into plain modules and operators, which other runtimes can express."""

from copy import deepcopy

from torch import nn

from unet3d.pool.export_modules import replace_with_plain
from unet3d.types import HasRetention


def to_plain_operators(network: nn.Module) -> nn.Module:
    """Return the network in plain modules and operators; its weights are shared, not copied."""
    weights = [*network.parameters(), *network.buffers()]
    copy = deepcopy(network, {id(weight): weight for weight in weights})
    replace_with_plain(copy)
    if isinstance(copy, HasRetention):
        copy.retention = None
    return copy
