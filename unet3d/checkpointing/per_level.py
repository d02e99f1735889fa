"""Choose for each level what fused blocks store for backward and what they recompute."""

from collections.abc import Sequence

from torch import nn

from unet3d.errors import UsageError
from unet3d.types import DECODER_MODES, ENCODER_MODES, HasRetention, Retention


class PerLevelStrategy:
    """One mode for each level's encoder and decoder, from full resolution down; the last repeats.

    `allow_plain` accepts networks without fused blocks and leaves them unchanged.
    """

    def __init__(self, encoders: Sequence[str], decoders: Sequence[str], allow_plain: bool = False):
        for name, modes, known in (
            ("encoders", encoders, ENCODER_MODES),
            ("decoders", decoders, DECODER_MODES),
        ):
            if isinstance(modes, str) or not modes or not set(modes) <= set(known):
                raise UsageError(
                    f"checkpointing.{name} must be a list of {', '.join(known)}, got {modes!r}"
                )
        self.retention = Retention(tuple(encoders), tuple(decoders))
        self.allow_plain = allow_plain

    def apply(self, model: nn.Module) -> None:
        """Set the network's retention; parameters, buffers and their names do not change."""
        if isinstance(model, HasRetention):
            model.retention = self.retention
        elif not self.allow_plain:
            raise UsageError(
                f"{type(model).__name__} has no fused blocks: use checkpointing=blocks or none"
            )
