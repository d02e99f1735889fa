"""Types and protocols that packages share; importing them does not import torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict, TypeGuard, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn


IGNORE_LABEL = 255
"""Label of voxels that losses and metrics skip, whatever value the files use for it."""

LIGHTNING_PRECISIONS = {
    "32": "32-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "16-true": "16-true",
    "bf16-true": "bf16-true",
}
"""Lightning's name for each value of `precision=`."""

PRECISIONS = tuple(LIGHTNING_PRECISIONS)
"""Values of `precision=`: full, mixed (16, bf16) and pure half precision."""


def find_precision(value: object) -> str | None:
    """Return the precision that a name of ours or of Lightning's, or a number, stands for.

    >>> find_precision(16), find_precision("bf16-mixed"), find_precision("64")
    ('16', 'bf16', None)
    """
    names = LIGHTNING_PRECISIONS.items()
    return next((own for own, lightning in names if str(value) in (own, lightning)), None)


DEVICE = re.compile("auto|cpu|cuda(:[0-9]{1,3})?|mps")
DEVICE_NAMES = "auto, cpu, cuda, cuda:N or mps"
"""Values of `device=` and, with Lightning's gpu for cuda, of `trainer.accelerator=`."""

Triple = tuple[int, int, int]
"""One int per axis: D, H, W."""

Size = int | Sequence[int]
"""An int for all axes, or one int per axis (D, H, W)."""


class PoolFactory(Protocol):
    """Build a pooling layer, with the arguments of nn.MaxPool3d."""

    def __call__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size = 0
    ) -> nn.Module: ...


class HasBlocks(Protocol):
    """A network that lists its blocks, for checkpointing and for memory by level."""

    def blocks(self) -> Iterable[tuple[int, nn.Module]]:
        """Yield (level, module) for each block in forward order; level 0 is full resolution."""
        ...


def has_blocks(model: object) -> TypeGuard[HasBlocks]:
    """Return whether a network lists its blocks; `blocks` of others is often an nn.ModuleList."""
    method = getattr(model, "blocks", None)
    return inspect.ismethod(method) and not inspect.signature(method).parameters


@runtime_checkable
class HasHeads(Protocol):
    """A network that lists its heads."""

    def list_heads(self) -> Sequence[nn.Module]:
        """Return the heads, its last convolutions; each has a bias."""
        ...


ENCODER_MODES = (
    *("store_all", "store_later", "store_last"),
    *("recompute", "recompute_tiled", "stream"),
)
DECODER_MODES = ("store_all", "store_last", "stream")


WHOLE_MAPS_MIB = 2048
"""Size of tiles from which maps are whole, and launches and copies are saved, not memory."""


@dataclass(frozen=True)
class Retention:
    """Which convolution outputs a fused block stores for backward: one mode per level.

    docs/explanation/fused-blocks.md says what each mode stores. In levels of residual blocks,
    recompute, recompute_tiled and stream drop or stream what the last block stores.
    """

    encoders: tuple[str, ...]  # level 0 (full resolution) first; the last mode repeats
    decoders: tuple[str, ...]
    tile_bytes: int | None = None  # of a tile's input and output for one volume; None: by device
    residual_encoders: tuple[str, ...] = ()  # of levels of residual blocks; (): as `encoders`

    def encoder_mode(self, level: int, *, residual: bool) -> str:
        """Return the mode of a level of the encoder."""
        modes = (self.residual_encoders if residual else ()) or self.encoders
        return modes[min(level, len(modes) - 1)]

    def decoder_mode(self, level: int) -> str:
        """Return the mode of the decoder block of a level."""
        return self.decoders[min(level, len(self.decoders) - 1)]


@runtime_checkable
class HasRetention(Protocol):
    """A network of fused blocks; `retention=None` runs them as plain modules."""

    retention: Retention | None


class Sample(TypedDict):
    """One item of a dataset and, collated, one batch of a step."""

    image: Tensor  # (C, D, H, W), floating point
    label: Tensor  # (D, H, W), uint8: the class of each voxel
    case: str
