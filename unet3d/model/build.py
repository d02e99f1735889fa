"""Build the network with its pooling."""

import inspect
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

from torch import nn

from unet3d.errors import UsageError
from unet3d.model.config import NetworkConfig, read_saved_network


def build_bound_network(network: NetworkConfig) -> nn.Module:
    """Build a network whose sizes are known; refuse a pool= that it would ignore."""
    if "pool" in inspect.signature(network.model.target).parameters:
        return network.model(pool=network.pool())
    if network.pool_is_chosen:
        raise UsageError(f"model={network.name} does not use pool=: remove it")
    return network.model()


def build_saved_network(
    metadata: Mapping[str, Any], allow_targets: Sequence[str] | None
) -> nn.Module:
    """Build the network that a checkpoint's metadata describes, without its weights."""
    return build_bound_network(read_saved_network(metadata["config"], allow_targets))


def freeze_parts(network: nn.Module, names: Sequence[str]) -> None:
    """Stop the weights of submodules from learning, and the statistics of their batch norms."""
    modules = dict(network.named_modules())
    for name in names:
        if name not in modules or not name:
            parts = ", ".join(part for part in modules if part.count(".") < 1 and part)
            raise UsageError(f"freeze: the network has no part {name!r}; it has {parts}")
        modules[name].requires_grad_(False)
        for module in modules[name].modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
                module.train = MethodType(_stay_in_eval_mode, module)
    if not any(p.requires_grad for p in network.parameters()):
        raise UsageError("freeze: nothing is left to train")


def _stay_in_eval_mode(self: nn.Module, mode: bool = True) -> nn.Module:
    """Replace nn.Module.train."""
    return nn.Module.train(self, False)


def count_parameters(network: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)
