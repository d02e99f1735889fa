"""No activation checkpointing."""

from torch import nn

from unet3d.types import HasRetention


class PlainModules:
    """Run a network as plain modules; autograd decides what is stored."""

    def apply(self, model: nn.Module) -> None:
        """Switch fused blocks off; other networks stay as they are."""
        if isinstance(model, HasRetention):
            model.retention = None
