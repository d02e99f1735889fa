"""Build the network, the optimizer and the whole of a step from its settings."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from unet3d.config.instantiate import Factory
from unet3d.data.dataset import build_layout, get_network_sizes, resolve_dataset
from unet3d.errors import UsageError
from unet3d.machine import Precision
from unet3d.model.depthwise import use_fast_depthwise
from unet3d.model.weights import freeze_parts
from unet3d.step.config import StepConfig
from unet3d.types import HasHeads

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
"""Parameters, or groups of these."""

OptimizerFactory = Callable[[Parameters], torch.optim.Optimizer]

MIN_HALF_EPSILON = 1e-4
"""The smallest epsilon of an optimizer in pure fp16, where Adam's 1e-8 would be 0."""


def complete_step(step: StepConfig) -> StepConfig:
    """Complete the settings by what the dataset says of channels and classes.

    Settings that say both stay as they are: their dataset need not exist, unless they name classes
    that cases annotate.
    """
    data = step.data
    needs_classes = data.annotated is not None and not data.unannotated_classes
    if data.num_classes is None or data.in_channels is None or needs_classes:
        return step.with_dataset(resolve_dataset(data, build_layout(data)))
    return step


def build_network(step: StepConfig) -> nn.Module:
    """Build the configured network; its dataset is read where the settings do not say its sizes."""
    in_channels, num_outputs = get_network_sizes(complete_step(step).data)
    bound = step.network.bind(in_channels=in_channels, num_outputs=num_outputs)
    sizes = {"in_channels": in_channels, "num_classes": num_outputs, "out_channels": num_outputs}
    for name, size in sizes.items():
        given = bound.model.arguments.get(name, size)
        if given != size:
            raise UsageError(f"model.{name} must be {size}, as data says, got {given!r}")
    network = bound.build()
    use_fast_depthwise(network)
    freeze_parts(network, step.freeze)
    return network


def make_optimizer_factory(optimizer: Factory, precision: Precision) -> OptimizerFactory:
    """Return parameters -> optimizer, with an epsilon that the weights' precision can hold."""
    arguments = optimizer.arguments
    if precision.used == "16-true" and isinstance(arguments.get("eps"), float):
        optimizer = optimizer.bind(eps=max(arguments["eps"], MIN_HALF_EPSILON))

    def build(parameters: Parameters) -> torch.optim.Optimizer:
        given = list(parameters)
        built = optimizer(params=given)
        factors = {p: g.get("lr_factor", 1.0) for g in built.param_groups for p in g["params"]}
        for group in (group for group in given if isinstance(group, dict)):
            factor = group["lr_factor"]
            if any(factors.get(parameter, factor) != factor for parameter in group["params"]):
                raise UsageError(
                    f"lr_factors: {type(built).__name__} makes groups of parameters of its own"
                )
        return built

    build([nn.Parameter(torch.zeros(1))])  # refuse bad arguments before the dataset is read
    return build


def group_parameters(
    network: nn.Module, head_warmup: float, lr_factors: Mapping[str, float]
) -> Parameters:
    """Return the parameters, in groups by `lr_factor` if parts learn at rates of their own.

    Heads that learn before the rest are groups, too: torch's fused SGD cannot step if some
    parameters of a group have a momentum and others do not yet.
    """
    if head_warmup == 0 and not lr_factors:
        return network.parameters()
    heads = list_head_parameters(network) if head_warmup else set()
    unknown = lr_factors.keys() - {name for name, _ in network.named_modules() if name}
    if unknown:
        parts = ", ".join(name for name, _ in network.named_children())
        raise UsageError(f"lr_factors: the network has no part {min(unknown)!r}; it has {parts}")
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in network.named_parameters():
        is_early, factor = parameter in heads, find_lr_factor(name, lr_factors)
        groups.setdefault((not is_early, factor), []).append(parameter)
    return [
        {"params": parameters, "lr_factor": factor}
        for (_, factor), parameters in sorted(groups.items(), key=lambda group: group[0])
    ]


def list_head_parameters(network: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of the heads, the last convolutions."""
    if not isinstance(network, HasHeads):
        raise UsageError(
            f"head_warmup: {type(network).__name__} does not list its heads (list_heads)"
        )
    heads = {parameter for head in network.list_heads() for parameter in head.parameters()}
    if not any(parameter.requires_grad for parameter in heads):
        raise UsageError("head_warmup: freeze= includes the heads, so nothing would learn")
    return heads


def find_lr_factor(name: str, lr_factors: Mapping[str, float]) -> float:
    """Return the factor of the smallest part that contains a parameter; 1 outside of all parts.

    >>> find_lr_factor("encoder.0.conv.weight", {"encoder": 0.5, "encoder.0": 0.1})
    0.1
    """
    parts = [part for part in lr_factors if name.startswith(f"{part}.")]
    return lr_factors[max(parts, key=len)] if parts else 1.0
