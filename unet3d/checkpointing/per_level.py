"""Choose for each level what fused blocks store for backward and what they recompute."""

from collections.abc import Sequence

from torch import nn

from unet3d.errors import UsageError
from unet3d.text import MIB
from unet3d.types import DECODER_MODES, ENCODER_MODES, HasRetention, Retention


class PerLevelStrategy:
    """One mode for each level's encoder and decoder, from full resolution down; the last repeats.

    Encoder levels of residual blocks have modes of their own, unless `residual_encoders` is None.
    `tile_mib` is the size of the tiles that blocks work on, or auto. `allow_plain` accepts networks
    without fused blocks and leaves them unchanged.
    """

    def __init__(
        self,
        encoders: Sequence[str],
        decoders: Sequence[str],
        tile_mib: float | str = "auto",
        allow_plain: bool = False,
        residual_encoders: Sequence[str] | None = None,
    ):
        residual = encoders if residual_encoders is None else residual_encoders
        for name, modes, known in (
            ("encoders", encoders, ENCODER_MODES),
            ("residual_encoders", residual, ENCODER_MODES),
            ("decoders", decoders, DECODER_MODES),
        ):
            if isinstance(modes, str) or not modes or not set(modes) <= set(known):
                raise UsageError(
                    f"checkpointing.{name} must be a list of {', '.join(known)}, got {modes!r}"
                )
        if tile_mib != "auto" and (not isinstance(tile_mib, int | float) or tile_mib <= 0):
            raise UsageError(
                f"checkpointing.tile_mib must be auto or a number above 0, got {tile_mib!r}"
            )
        tile_bytes = None if isinstance(tile_mib, str) else int(tile_mib * MIB)
        self.retention = Retention(tuple(encoders), tuple(decoders), tile_bytes, tuple(residual))
        self.allow_plain = allow_plain

    def apply(self, model: nn.Module) -> None:
        """Set the network's retention; parameters, buffers and their names do not change."""
        if isinstance(model, HasRetention):
            model.retention = self.retention
        elif not self.allow_plain:
            raise UsageError(
                f"{type(model).__name__} has no fused blocks: use checkpointing=blocks or none"
            )


class PlainModules:
    """Run a network as plain modules, without activation checkpointing."""

    def apply(self, model: nn.Module) -> None:
        """Switch fused blocks off; other networks stay as they are."""
        if isinstance(model, HasRetention):
            model.retention = None
