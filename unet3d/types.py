"""Types and protocols that packages share; importing them does not import torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict, TypeGuard, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn


IGNORE_LABEL = 255
"""Label of voxels that losses and metrics skip, whatever value the files use for it.

A loss of at most that many classes skips it in labels of any integer type.
"""

MAX_CLASSES = 2**15 - 1
"""Most classes: labels of more than IGNORE_LABEL classes are int16."""


def get_label_dtype(num_classes: int) -> str:
    """Return the name of the integers that labels are.

    >>> get_label_dtype(255), get_label_dtype(256)
    ('uint8', 'int16')
    """
    return "uint8" if num_classes <= IGNORE_LABEL else "int16"


def get_ignore_label(labels: Any) -> int:
    """Return the label of voxels to skip in an array or a tensor: IGNORE_LABEL, or int16's last."""
    return MAX_CLASSES if str(labels.dtype).split(".")[-1] == "int16" else IGNORE_LABEL


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

FloatTriple = tuple[float, float, float]

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


LAST_POLICIES = ("store", "recompute", "recompute_tiled", "stream")
INNER_POLICIES = (*LAST_POLICIES, "store_later")


WHOLE_MAPS_MIB = 2048
"""Size of tiles from which maps are whole, and launches and copies are saved, not memory."""


class LevelPolicy(NamedTuple):
    """How a level keeps convolution outputs for backward: the last one, and those before it."""

    inner: str
    last: str


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The policies of a network's levels, full resolution first; the last of a row repeats.

    docs/explanation/fused-blocks.md defines the policies. The defaults are checkpointing=fused.
    """

    encoder_inner: tuple[str, ...] = ("recompute",)
    encoder_last: tuple[str, ...] = ("store",)
    residual_inner: tuple[str, ...] = ("store_later", "store_later", "store")
    residual_last: tuple[str, ...] = ("store",)
    decoder_inner: tuple[str, ...] = ("store",)
    tile_bytes: int | None = None  # of a tile's input and output for one volume; None: by device

    def get_level(self, part: str, level: int) -> LevelPolicy:
        """Return the policy of a level of the `encoder`, `residual` encoder or `decoder`."""
        rows = (getattr(self, f"{part}_{name}", ("store",)) for name in LevelPolicy._fields)
        return LevelPolicy(*(row[min(level, len(row) - 1)] for row in rows))


@runtime_checkable
class HasRetention(Protocol):
    """A network of fused blocks; `retention=None` runs them as plain modules."""

    retention: Retention | None


class Sample(TypedDict):
    """One item of a dataset and, collated, one batch of a step."""

    image: Tensor  # (C, D, H, W), floating point
    label: Tensor  # (D, H, W), uint8: the class of each voxel
    case: str
