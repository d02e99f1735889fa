"""Channels, blocks and kernel sizes of each level, from the options of a UNet3D."""

from collections.abc import Sequence
from typing import Any

from unet3d.errors import UsageError
from unet3d.types import Size, Triple

PerLevel = Size | Sequence[Size]
"""One size for all levels (an int or three ints), or a list of one size per level."""


def get_residual_blocks(blocks: int | Sequence[int], level: int) -> int:
    """Return the residual blocks of a level; the last entry repeats.

    >>> [get_residual_blocks([1, 3, 4], level) for level in range(4)]
    [1, 3, 4, 4]
    """
    entries = [blocks] if isinstance(blocks, int) else list(blocks)
    if not entries or not all(isinstance(n, int) and n >= 1 for n in entries):
        raise UsageError(
            f"residual_blocks must be null, an int >= 1, or a list of these, got {blocks!r}"
        )
    return entries[min(level, len(entries) - 1)]


def resolve_encoder_channels(
    channels: Sequence[int] | None, depth: int, width: int, max_width: int
) -> list[int]:
    """Return the encoder channels of each level, level 0 first.

    >>> resolve_encoder_channels(None, 4, 64, 256)
    [64, 128, 256, 256]
    """
    if depth < 2:
        raise UsageError(f"depth must be at least 2, got {depth}")
    if channels is None and width > max_width:
        raise UsageError(f"width={width} is above max_width={max_width}: raise that, too")
    widths = [min(width * 2**i, max_width) for i in range(depth)] if channels is None else channels
    if len(widths) < 2 or min(widths) < 1:
        raise UsageError(f"channels must be two or more ints >= 1, got {list(widths)}")
    return list(widths)


def resolve_decoder_channels(
    decoder_channels: str | Sequence[int], encoder: list[int]
) -> list[int]:
    """Return the decoder channels of each level, level 0 first.

    >>> resolve_decoder_channels("finer", [64, 128, 256, 512, 512])
    [64, 64, 128, 256]
    """
    if decoder_channels == "same":
        return encoder[:-1]
    if decoder_channels == "finer":
        return [encoder[0], *encoder[:-2]]
    if isinstance(decoder_channels, str) or len(decoder_channels) != len(encoder) - 1:
        raise UsageError(
            f"decoder_channels must be same, finer or {len(encoder) - 1} ints (one per level "
            f"except the coarsest), got {decoder_channels!r}"
        )
    return list(decoder_channels)


def expand_per_level(value: PerLevel, levels: int, key: str) -> list[Triple]:
    """Return one (D, H, W) size per level.

    >>> expand_per_level([[1, 2, 2], 2], 2, "pool_kernel")
    [(1, 2, 2), (2, 2, 2)]
    >>> expand_per_level([1, 2, 2], 2, "pool_kernel")
    [(1, 2, 2), (1, 2, 2)]
    >>> expand_per_level([1, 2], 2, "pool_kernel")
    [(1, 1, 1), (2, 2, 2)]
    """
    is_one = isinstance(value, int) or (
        len(value) == 3 and all(isinstance(entry, int) for entry in value)
    )
    entries = [value] * levels if is_one else list(value)
    sizes: list[Any] = [(e, e, e) if isinstance(e, int) else tuple(e) for e in entries]
    if len(sizes) != levels or any(len(s) != 3 or min(s) < 1 for s in sizes):
        raise UsageError(
            f"{key} must be an int, three ints, or a list of {levels} of these, got {value!r}"
        )
    return sizes
