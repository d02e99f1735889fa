"""Names for what crosses a border between rooms; torch is not imported for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn


IGNORE_LABEL = 255
"""The label of voxels that count in neither loss nor metric, whatever the files call it."""

Triple = tuple[int, int, int]
"""One int per axis: D, H, W."""

Size = int | Sequence[int]
"""An int for every axis, or one int per axis (D, H, W)."""


class PoolFactory(Protocol):
    """Makes a pooling layer; called as nn.MaxPool3d is."""

    def __call__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size = 0
    ) -> nn.Module: ...


@runtime_checkable
class HasBlocks(Protocol):
    """A network that tells where its memory lies."""

    def blocks(self) -> Iterable[tuple[int, nn.Module]]:
        """Yield (level, module) for each heavy part, as forward runs them; level 0 is full size."""
        ...


@runtime_checkable
class HasOutputConvolutions(Protocol):
    """A network that names the convolutions that give its outputs."""

    def output_convolutions(self) -> Sequence[nn.Module]:
        """Return them; each has a bias."""
        ...


ENCODER_WORDS = ("store_all", "store_last", "offload", "recompute", "recompute_tiled", "stream")
DECODER_WORDS = ("store_all", "store_last", "stream")


@dataclass(frozen=True)
class RetentionPolicy:
    """What lean blocks keep of their convolutions' outputs, a word for each level's block.

    - store_all: every output
    - store_last: the last; those before are redone in backward
    - offload (encoders): the last, in the host's memory from the pooling on; its rows come when read
    - recompute (encoders): nothing once the decoder has read it; all is redone for its backward
    - recompute_tiled (encoders): likewise, but the decoder's backward reads it redone a slab at a time
    - stream: outputs before the last are never whole, but redone in slabs wherever they are read; of
      an encoder the last one, too, once it is pooled
    """

    encoders: tuple[str, ...]  # level 0, full size, first; the last word is for the other levels
    decoders: tuple[str, ...]

    def encoder(self, level: int) -> str:
        """The word of a level."""
        return self.encoders[min(level, len(self.encoders) - 1)]

    def decoder(self, level: int) -> str:
        """The word of a level."""
        return self.decoders[min(level, len(self.decoders) - 1)]


@runtime_checkable
class HasRetentionPolicy(Protocol):
    """A network of lean blocks; None stands for plain modules, which keep what torch keeps."""

    keep: RetentionPolicy | None


@dataclass(frozen=True, kw_only=True)
class FileGrid:
    """Where a prepared volume lies in the grid of its file.

    The file's volume is transposed and flipped to one orientation, cropped to a box, and resampled
    to a shape whose outer edges are the box's: voxel i covers [i, i + 1] of n, so that linear
    interpolation reads at (i + 0.5) * n_from / n_to - 0.5, clipped to the volume.
    """

    file_shape: Triple
    axes: Triple  # the file's axis that becomes axis 0, 1, 2
    flips: tuple[bool, bool, bool]  # of the transposed axes
    box: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # start, stop, after the flips
    shape: Triple  # of the prepared volume


class Sample(TypedDict):
    """What a data set yields, and, collated, what a step receives."""

    image: Tensor  # (C, D, H, W), floating point
    label: Tensor  # (D, H, W), uint8: the class of each voxel
    case: str
