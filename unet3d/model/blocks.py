"""The parts of a U-Net: convolution blocks, and the ways back up to a finer level."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.types import Triple

T = TypeVar("T")

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm3d,
    "instance": partial(nn.InstanceNorm3d, affine=True),
    "group": lambda channels: nn.GroupNorm(_groups(channels), channels),
    "none": lambda channels: nn.Identity(),
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": partial(nn.ReLU, inplace=True),
    "leaky_relu": partial(nn.LeakyReLU, 0.01, inplace=True),
}


def lookup(options: dict[str, T], name: str, what: str) -> T:
    """Look an option up by the name that a user wrote."""
    if name not in options:
        raise UsageError(f"{what} must be one of {', '.join(options)}, got {name!r}")
    return options[name]


def _groups(channels: int) -> int:
    """At most 8 groups, and a divisor of the channels."""
    return next(g for g in range(min(8, channels), 0, -1) if channels % g == 0)


class ConvNormAct(nn.Sequential):
    """A convolution that keeps the size, a norm and an activation."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: Triple,
        norm: str,
        activation: str,
    ):
        super().__init__()
        if any(k % 2 == 0 for k in kernel_size):
            raise UsageError(f"model.kernel_size must be odd, got {kernel_size}")
        d, h, w = kernel_size
        self.conv = nn.Conv3d(
            in_channels, out_channels, kernel_size, padding=(d // 2, h // 2, w // 2)
        )
        self.norm = lookup(NORMS, norm, "model.norm")(out_channels)
        self.act = lookup(ACTIVATIONS, activation, "model.activation")()


class ConvBlock(nn.Sequential):
    """Convolutions in a row, each with norm and activation; `channels` are in, between and out."""

    def __init__(self, channels: Sequence[int], *, kernel_size: Triple, norm: str, activation: str):
        super().__init__(
            *(
                ConvNormAct(i, o, kernel_size=kernel_size, norm=norm, activation=activation)
                for i, o in pairwise(channels)
            )
        )


class Interpolate(nn.Module):
    """Upsampling without parameters, in the dtype of its input."""

    def __init__(self, window: Triple, mode: str):
        super().__init__()
        self.window, self.mode = window, mode

    def forward(self, x: Tensor) -> Tensor:
        # CUDA's autocast would run this in float32, and the concatenation would then promote the
        # skip as well: +45 % on a bf16 U-Net (pytorch#121324). Where it is off a graph that is
        # exported needs no part that turns it off.
        kind = x.device.type
        with (
            torch.autocast(kind, enabled=False)
            if torch.is_autocast_enabled(kind)
            else nullcontext()
        ):
            corners = True if self.mode == "trilinear" else None
            scale = [float(w) for w in self.window]
            return F.interpolate(x, scale_factor=scale, mode=self.mode, align_corners=corners)

    def extra_repr(self) -> str:
        return f"window={self.window}, mode={self.mode}"


def upsampling(
    name: str, window: Triple, channels: int, skip_channels: int
) -> tuple[nn.Module, int]:
    """The module that goes up one level, and how many channels leave it.

    `transposed` gives the skip's channels and has a bias (nnU-Net); `transposed_wide` keeps its
    channels and has none (Cicek et al. 2016).
    """
    if name in ("trilinear", "nearest"):
        return Interpolate(window, name), channels
    out, bias = lookup(
        {"transposed": (skip_channels, True), "transposed_wide": (channels, False)},
        name,
        "model.upsampling (trilinear and nearest aside)",
    )
    return nn.ConvTranspose3d(channels, out, window, stride=window, bias=bias), out


def pad_to(x: Tensor, like: Tensor) -> Tensor:
    """Pad `x` with zeros on both sides to the size of `like`, whose odd rows pooling drops."""
    missing = [n - m for n, m in zip(like.shape[2:], x.shape[2:], strict=True)]
    if not any(missing):
        return x
    return F.pad(x, [side for m in reversed(missing) for side in (m // 2, m - m // 2)])
