"""Build the network of a step; its dataset is read where the settings do not say its sizes."""

from torch import nn

from unet3d.data.dataset import build_layout, get_network_sizes, resolve_dataset
from unet3d.errors import UsageError
from unet3d.memory.step.config import StepConfig
from unet3d.memory.trace import ShortRanges
from unet3d.model.build import build_bound_network, freeze_parts


def complete_step(step: StepConfig) -> StepConfig:
    """Complete the settings by what the dataset says of channels and classes.

    Settings that say both stay as they are: their dataset need not exist, unless they name classes
    that cases annotate.
    """
    data = step.data
    needs_classes = data.annotated is not None and not data.unknown_classes
    if data.num_classes is None or data.in_channels is None or needs_classes:
        return step.with_dataset(resolve_dataset(data, build_layout(data).describe()))
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
    with ShortRanges():
        network = build_bound_network(bound)
    freeze_parts(network, step.freeze)
    return network
