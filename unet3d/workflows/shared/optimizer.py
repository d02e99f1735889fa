"""Build the optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from unet3d.config.settings.training import TrainingSettings
from unet3d.errors import UsageError
from unet3d.machine.device import Precision
from unet3d.types import HasHeads

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
"""Parameters, or groups of these."""

OptimizerFactory = Callable[[Parameters], torch.optim.Optimizer]

MIN_HALF_EPSILON = 1e-4
"""The smallest epsilon of an optimizer in pure fp16, where Adam's 1e-8 would be 0."""


def make_optimizer_factory(settings: TrainingSettings, precision: Precision) -> OptimizerFactory:
    """Return parameters -> optimizer, with an epsilon that the weights' precision can hold.

    The optimizer is fused where possible: one kernel, which makes no second copy of the parameters.
    """
    optimizer, arguments = settings.optimizer, settings.optimizer.arguments
    if "fused" in arguments and arguments["fused"] is None:
        optimizer = optimizer.bind(fused=True)
    if precision.used == "16-true" and arguments.get("eps") is not None:
        optimizer = optimizer.bind(eps=max(arguments["eps"], MIN_HALF_EPSILON))

    def build(parameters: Parameters) -> torch.optim.Optimizer:
        return optimizer(params=list(parameters))

    build([nn.Parameter(torch.zeros(1))])  # refuse bad arguments before the dataset is read
    return build


def group_parameters(network: nn.Module, head_warmup: float) -> Parameters:
    """Return the parameters, in two groups if only the heads learn at first.

    `starts_at` is the fraction of the run at which a group begins to learn.
    """
    if head_warmup == 0:
        return network.parameters()
    if not isinstance(network, HasHeads):
        raise UsageError(
            f"head_warmup: {type(network).__name__} does not list its heads (list_heads)"
        )
    heads = {id(p): p for head in network.list_heads() for p in head.parameters()}
    if not any(p.requires_grad for p in heads.values()):
        raise UsageError("head_warmup: freeze= includes the heads, so nothing would learn")
    others = [p for p in network.parameters() if id(p) not in heads]
    return [{"params": [*heads.values()]}, {"params": others, "starts_at": head_warmup}]
