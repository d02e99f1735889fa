"""A 3D U-Net for every shape: the forum's, the paper's, nnU-Net's and yours."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.model import blocks
from unet3d.model.blocks import ConvBlock, pad_to
from unet3d.model.lean.autograd_blocks import make_input_map, run_decoder_block, run_encoder_block
from unet3d.types import PoolFactory, RetentionPolicy, Size, Triple

PerLevel = Size | Sequence[Size]
"""One size for all levels (an int or three ints), or a list with one size per level."""


FUSED = RetentionPolicy(encoders=("store_last",), decoders=("store_all",))
"""What a network keeps that has not been told."""


MOST_LEVELS = 16
"""At the last of them a volume of 65,536 voxels a side has two."""


class UNet3D(nn.Module):
    """A U-Net of `depth` levels; level 0 is full resolution.

    `channels` says the channels of each level exactly; without it level i has width * 2**i, at
    most `max_width`. `decoder_channels` is "same" (as the encoder at that level), "above" (as the
    encoder one level up) or a list from level 0 down. With `narrow_first` the encoder's first
    convolution of a level gives half of the level's channels. `kernel_size` and `pool_kernel` (pooling from
    level i to i + 1) are one size for all levels or one per level.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        num_classes: int,
        channels: Sequence[int] | None = None,
        depth: int = 4,
        width: int = 32,
        max_width: int = 320,
        decoder_channels: str | Sequence[int] = "same",
        convs_per_level: int | Sequence[int] = 2,
        narrow_first: bool = False,
        kernel_size: PerLevel = 3,
        pool_kernel: PerLevel = 2,
        norm: str = "batch",
        activation: str = "relu",
        upsampling: str = "trilinear",
        deep_supervision: bool = False,
        pool: PoolFactory,
    ):
        super().__init__()
        enc = encoder_widths(channels, depth, width, max_width)
        depth = len(enc)
        dec = decoder_widths(decoder_channels, enc)
        convs = (
            [convs_per_level] * depth if isinstance(convs_per_level, int) else list(convs_per_level)
        )
        if len(convs) != depth or min(convs) < 1:
            raise UsageError(
                f"model.convs_per_level must be one number >= 1 per level, got {convs}"
            )
        kernels = per_level(kernel_size, depth, "model.kernel_size")
        self.windows = per_level(pool_kernel, depth - 1, "model.pool_kernel")
        self.keep: RetentionPolicy | None = FUSED
        self.norm = norm

        def block(level: int, first: int, middle: int, last: int) -> ConvBlock:
            widths = [first, *[middle] * (convs[level] - 1), last]
            return ConvBlock(widths, kernel_size=kernels[level], norm=norm, activation=activation)

        self.encoder = nn.ModuleList()
        before = in_channels
        for level, width_here in enumerate(enc):
            middle = max(1, width_here // 2) if narrow_first else width_here
            convolved = block(level, before, middle, width_here)
            below = self.windows[level] if level + 1 < depth else None
            self.encoder.append(
                EncoderLevel(convolved, None if below is None else pool(below), below)
            )
            before = width_here

        self.decoder = nn.ModuleList()  # from the coarsest level to level 0
        for level in reversed(range(depth - 1)):
            up, up_channels = blocks.upsampling(upsampling, self.windows[level], before, enc[level])
            self.decoder.append(
                DecoderLevel(up, block(level, enc[level] + up_channels, dec[level], dec[level]))
            )
            before = dec[level]

        supervised = range(max(1, depth - 2)) if deep_supervision else range(1)
        self.heads = nn.ModuleList(nn.Conv3d(dec[level], num_classes, 1) for level in supervised)

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """(B, C, D, H, W) -> (B, K, D, H, W); in training with deep supervision, finest first."""
        self._check_size(x)
        if self.keep is None or torch.compiler.is_compiling():
            outputs = self._plain(x)
        else:
            outputs = self._lean(x, self.keep)
        return outputs if self.training and len(self.heads) > 1 else outputs[0]

    def _plain(self, x: Tensor) -> list[Tensor]:
        skips, outputs = [], []
        for level in self.encoder:
            skips.append(level(x))
            pool: Any = level.pool
            x = skips[-1] if pool is None else pool(skips[-1])
        skips.pop()
        while skips:
            level = len(skips) - 1
            x = self.decoder[-1 - level](x, skips.pop())
            if self._supervised(level):
                outputs.insert(0, self.heads[level](x))
        return outputs

    def _lean(self, image: Tensor, keep: RetentionPolicy) -> list[Tensor]:
        if any(m._backward_hooks or m._backward_pre_hooks for m in self.modules()):
            raise UsageError(
                "lean blocks write over the gradients that a backward hook would see: use "
                "checkpointing=blocks, whose modules are plain"
            )
        skips, outputs = [], []
        x = make_input_map(image, next(self.parameters()).dtype)
        for level, module in enumerate(self.encoder):
            x, skip = module(x, keep.encoder(level))
            skips.append(skip)
        skips.pop()
        while skips:
            level = len(skips) - 1
            head = self.heads[level] if self._supervised(level) else None
            x, logits = self.decoder[-1 - level](x, skips.pop(), keep.decoder(level), head, level)
            if logits is not None:
                outputs.insert(0, logits)
        return outputs

    def _supervised(self, level: int) -> bool:
        return level < len(self.heads) and (self.training or level == 0)

    def blocks(self) -> Iterator[tuple[int, nn.Module]]:
        """Every encoder and decoder level, with its level."""
        yield from enumerate(self.encoder)
        for n, module in enumerate(self.decoder):
            yield len(self.decoder) - 1 - n, module

    def output_convolutions(self) -> list[nn.Module]:
        """Return the heads, finest first."""
        return list(self.heads)

    def _check_size(self, x: Tensor) -> None:
        size = list(x.shape[2:])
        for window in self.windows:
            size = [n // w for n, w in zip(size, window, strict=True)]
        averaged = {"batch": len(x) if self.training else 2, "instance": 1}.get(self.norm, 2)
        if min(size) < 1 or averaged * prod(size) == 1:  # no norm of a single value
            raise UsageError(
                f"{len(self.windows) + 1} levels leave {size} voxels of a {list(x.shape[2:])} "
                f"patch for the {self.norm} norm: use a larger data.patch_size, fewer levels "
                "(model.depth) or smaller pooling windows (model.pool_kernel)"
            )


class EncoderLevel(nn.Module):
    """Convolve; a lean block pools as well, for the next level (but at the coarsest)."""

    def __init__(self, convs: ConvBlock, pool: nn.Module | None, window: Triple | None):
        super().__init__()
        self.convs = convs
        self.pool = pool
        self.window = window or (1, 1, 1)

    def forward(self, x: Any, keep: str | None = None) -> Any:
        """Tensor -> tensor; or, told what to `keep`, map -> the map that goes down, and skip."""
        if keep is None:
            return self.convs(x)
        return run_encoder_block(x, list(self.convs), self.pool, self.window, keep)


class DecoderLevel(nn.Module):
    """Go up, concatenate the skip, convolve; a lean block has its head as well."""

    def __init__(self, up: nn.Module, convs: ConvBlock):
        super().__init__()
        self.up = up
        self.convs = convs

    def forward(
        self,
        x: Any,
        skip: Any,
        keep: str | None = None,
        head: nn.Conv3d | None = None,
        level: int = 0,
    ) -> Any:
        """Tensors -> tensor; or, told what to `keep`, maps -> the map that goes up, and logits."""
        if keep is not None:
            return run_decoder_block(
                x, skip, self.up, list(self.convs), head, last=level == 0, keep=keep
            )
        x = torch.cat([skip, pad_to(self.up(x), skip)], dim=1)
        del skip
        return self.convs(x)


def encoder_widths(
    channels: Sequence[int] | None, depth: int, width: int, max_width: int
) -> list[int]:
    """The channels of each level.

    >>> encoder_widths(None, 4, 64, 256)
    [64, 128, 256, 256]
    """
    if not 2 <= depth <= MOST_LEVELS or width < 1:
        raise UsageError(
            f"a U-Net needs model.depth in 2..{MOST_LEVELS} and model.width >= 1, "
            f"got {depth} and {width}"
        )
    widths = [min(width * 2**i, max_width) for i in range(depth)] if channels is None else channels
    if not 2 <= len(widths) <= MOST_LEVELS or min(widths) < 1:
        given = str(list(widths))[:200]
        raise UsageError(f"model.channels needs 2..{MOST_LEVELS} levels, each >= 1, got {given}")
    return list(widths)


def decoder_widths(decoder_channels: str | Sequence[int], encoder: list[int]) -> list[int]:
    """The channels of each decoder level, level 0 first.

    >>> decoder_widths("above", [64, 128, 256, 512, 512])
    [64, 64, 128, 256]
    """
    if decoder_channels == "same":
        return encoder[:-1]
    if decoder_channels == "above":
        return [encoder[0], *encoder[:-2]]
    if isinstance(decoder_channels, str) or len(decoder_channels) != len(encoder) - 1:
        raise UsageError(
            f"model.decoder_channels must be same, above or {len(encoder) - 1} ints (one per level "
            f"but the last), got {decoder_channels!r}"
        )
    return list(decoder_channels)


def per_level(value: PerLevel, levels: int, name: str) -> list[Triple]:
    """One (D, H, W) size per level.

    >>> per_level([[1, 2, 2], 2], 2, "window")
    [(1, 2, 2), (2, 2, 2)]
    >>> per_level([1, 2, 2], 2, "window")
    [(1, 2, 2), (1, 2, 2)]
    """
    entries = [value] if isinstance(value, int) else list(value)
    if all(isinstance(entry, int) for entry in entries):
        entries = [value] * levels
    sizes: list[Any] = [(e, e, e) if isinstance(e, int) else tuple(e) for e in entries]
    if len(sizes) != levels or any(len(s) != 3 or min(s) < 1 for s in sizes):
        raise UsageError(
            f"{name} must be an int, three ints, or a list of {levels} of these, got {value!r}"
        )
    return sizes
