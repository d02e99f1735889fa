"""Build the loss; losses of other projects are adapted."""

from torch import nn

from unet3d.config.settings.training import TrainingSettings
from unet3d.loss.adapter import AdaptedLoss, choose_arguments

OWN = "unet3d.loss."


def build_loss(settings: TrainingSettings) -> nn.Module:
    """Build the configured loss."""
    factory, regions = settings.loss, settings.data.regions
    if factory.target.__module__.startswith(OWN):
        return factory()
    chosen = choose_arguments(factory.target, factory.arguments, has_regions=regions is not None)
    return AdaptedLoss(factory(**chosen), regions)
