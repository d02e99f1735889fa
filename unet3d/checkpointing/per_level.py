"""Choose for each level what fused blocks store for backward and what they recompute."""

import math
from collections.abc import Sequence

from torch import nn

from unet3d.checkpointing.mednext import fuse_mednext
from unet3d.checkpointing.recompute import is_recomputed
from unet3d.errors import UsageError
from unet3d.text import MIB
from unet3d.types import INNER_POLICIES, LAST_POLICIES, HasRetention, Retention


class PerLevelStrategy:
    """A policy for the inner outputs of each level, and one for its last output.

    Each row has full resolution first, and its last entry repeats. Encoder levels of residual
    blocks have rows of their own; the last output of a decoder level is always stored. `tile_mib`
    is the size of the tiles that blocks work on, or auto. `allow_plain` accepts networks without
    fused blocks and leaves them unchanged.
    """

    def __init__(
        self,
        encoder_inner: Sequence[str] = Retention.encoder_inner,
        encoder_last: Sequence[str] = Retention.encoder_last,
        residual_inner: Sequence[str] = Retention.residual_inner,
        residual_last: Sequence[str] = Retention.residual_last,
        decoder_inner: Sequence[str] = Retention.decoder_inner,
        tile_mib: float | str = "auto",
        allow_plain: bool = False,
    ):
        rows = {
            "encoder_inner": encoder_inner,
            "encoder_last": encoder_last,
            "residual_inner": residual_inner,
            "residual_last": residual_last,
            "decoder_inner": decoder_inner,
        }
        for name, row in rows.items():
            known = INNER_POLICIES if name.endswith("inner") else LAST_POLICIES
            if isinstance(row, str) or not row or not set(row) <= set(known):
                raise UsageError(
                    f"checkpointing.{name} must be a list of {', '.join(known)}, got {row!r}"
                )
        is_size = not isinstance(tile_mib, str | bool) and 0 < tile_mib < math.inf
        if tile_mib != "auto" and not is_size:
            raise UsageError(
                f"checkpointing.tile_mib must be auto or a number above 0, got {tile_mib!r}"
            )
        tile_bytes = None if isinstance(tile_mib, str) else int(tile_mib * MIB)
        tuples = {name: tuple(row) for name, row in rows.items()}
        self.retention = Retention(**tuples, tile_bytes=tile_bytes)
        self.allow_plain = allow_plain

    def apply(self, model: nn.Module) -> None:
        """Set the network's retention; parameters, buffers and their names do not change."""
        if isinstance(model, HasRetention):
            if is_recomputed(model):
                raise UsageError(
                    "RecomputeBlocks has been applied to this network, which takes one strategy: "
                    "build another"
                )
            model.retention = self.retention
        elif not fuse_mednext(model, self.retention) and not self.allow_plain:
            raise UsageError(
                f"{type(model).__name__} has no fused blocks: use checkpointing=blocks or none"
            )


class PlainModules:
    """Run a network as plain modules, without activation checkpointing."""

    def apply(self, model: nn.Module) -> None:
        """Switch fused blocks off; other networks stay as they are."""
        if isinstance(model, HasRetention):
            model.retention = None
