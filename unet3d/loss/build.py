"""Build the loss; losses of other projects are adapted."""

from collections.abc import Mapping, Sequence

from torch import nn

from unet3d.config.instantiate import Factory
from unet3d.errors import UsageError
from unet3d.loss.adapter import AdaptedLoss, choose_arguments
from unet3d.loss.partial_labels import PartialLabels

OWN = "unet3d.loss."


def build_loss(
    factory: Factory,
    *,
    regions: Mapping[str, Sequence[int]] | None = None,
    unknown_classes: Mapping[int, Sequence[int]] | None = None,
) -> nn.Module:
    """Build the configured loss.

    `unknown_classes` are those that cases of a label do not annotate; None: all annotate all.
    """
    if factory.target.__module__.startswith(OWN):
        loss = factory()
    else:
        chosen = choose_arguments(
            factory.target, factory.arguments, has_regions=regions is not None
        )
        loss = AdaptedLoss(factory(**chosen), regions)
    if unknown_classes is None:
        return loss
    if factory.arguments.get("label_smoothing"):
        raise UsageError(
            "loss.label_smoothing gives every class a part of each label, which data.annotated "
            "cannot know: set it to 0"
        )
    return PartialLabels(loss, unknown_classes)
