"""Build the optimizer."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from unet3d.config.settings.training import TrainingSettings
from unet3d.machine.device import Precision

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

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

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return optimizer(params=list(parameters))

    build([nn.Parameter(torch.zeros(1))])  # refuse bad arguments before the dataset is read
    return build
