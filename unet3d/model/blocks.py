"""Build the parts of a U-Net: blocks of convolutions, residual blocks, upsampling modules."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.types import PoolFactory, Triple

T = TypeVar("T")

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm3d,
    "instance": partial(nn.InstanceNorm3d, affine=True),
    "group": lambda channels: nn.GroupNorm(_count_groups(channels), channels),
    "none": lambda channels: nn.Identity(),
}
ACTIVATIONS: dict[str, Callable[[float], nn.Module]] = {
    "relu": lambda _: nn.ReLU(inplace=True),
    "leaky_relu": lambda slope: nn.LeakyReLU(slope, inplace=True),
}


def lookup(options: dict[str, T], name: str, key: str) -> T:
    """Return the option that `key` names."""
    if name not in options:
        raise UsageError(f"{key} must be one of {', '.join(options)}, got {name!r}")
    return options[name]


def _count_groups(channels: int) -> int:
    """Return the largest divisor of the channels that is at most 8."""
    return next(g for g in range(min(8, channels), 0, -1) if channels % g == 0)


MakeLayer = Callable[..., "ConvNormAct"]
"""Build a layer from its channels and, by name, its stride and what other layers do not have."""


class ConvNormAct(nn.Sequential):
    """A convolution, a norm and an activation; with stride 1 it preserves the size.

    Like a pooling, a strided convolution drops rows beyond a multiple of its stride.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: Triple,
        stride: Triple = (1, 1, 1),
        bias: bool = True,
        norm: str,
        activation: Callable[[], nn.Module] | None,
    ):
        super().__init__()
        if any(k % 2 == 0 for k in kernel_size):
            raise UsageError(f"kernel_size must be odd, got {kernel_size}")
        d, h, w = kernel_size
        padding = (d // 2, h // 2, w // 2)
        self.stride = stride
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size, stride, padding, bias=bias)
        self.norm = lookup(NORMS, norm, "norm")(out_channels)
        self.act = nn.Identity() if activation is None else activation()

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(crop_to_multiple(input, self.stride))


class ConvBlock(nn.Sequential):
    """A sequence of layers; `channels` lists those of the input and of every output.

    The first convolution may have a stride.
    """

    def __init__(
        self, channels: Sequence[int], *, stride: Triple = (1, 1, 1), make_layer: MakeLayer
    ):
        first, *others = pairwise(channels)
        super().__init__(make_layer(*first, stride=stride), *(make_layer(*io) for io in others))


class Strided(nn.Module):
    """Identity in place of a pooling: the level below it downsamples by its first convolution.

    If that level has residual blocks, `skip_pool` pools what the first one adds to its output.
    """

    def __init__(self, kernel_size: Triple, skip_pool: PoolFactory):
        super().__init__()
        self.kernel_size, self.skip_pool = kernel_size, skip_pool(kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        return x


class StochasticDepth(nn.Module):
    """Drop a volume's features with probability `p` in training, and scale those that are kept."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        factors = self.draw(x.shape[0], x.device)  # len(x) would fix the batch of an export
        return x if factors is None else x * factors[:, None, None, None, None].to(x.dtype)

    def draw(self, volumes: int, device: torch.device) -> Tensor | None:
        """Return a factor per volume, or None if all are 1."""
        if not self.training or self.p == 0:
            return None
        keep = 1 - self.p
        return torch.empty(volumes, device=device).bernoulli_(keep) / keep

    def extra_repr(self) -> str:
        return f"p={self.p}"


class ResidualBlock(nn.Module):
    """Add the output of two convolutions to the input, then activate (ResNet-D's basic block).

    With `strided`, the first convolution has its stride, and the input is pooled before it is
    added; with a change of channels, a 1 x 1 x 1 convolution projects it.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        strided: Strided | None,
        stochastic_depth: float,
        make_layer: MakeLayer,
        activation: Callable[[], nn.Module],
    ):
        super().__init__()
        stride = (1, 1, 1) if strided is None else strided.kernel_size
        self.conv1 = make_layer(in_channels, out_channels, stride=stride)
        self.conv2 = make_layer(out_channels, out_channels, activation=None)
        scale = getattr(self.conv2.norm, "weight", None)
        if scale is not None:
            nn.init.zeros_(scale)  # the block begins as its skip
        self.drop_path = StochasticDepth(stochastic_depth)
        self.skip_pool = None if strided is None else strided.skip_pool
        self.projection = None
        if in_channels != out_channels:
            options: Any = {"kernel_size": (1, 1, 1), "bias": False, "activation": None}
            self.projection = make_layer(in_channels, out_channels, **options)
        self.act = activation()

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.skip_pool is None else self.skip_pool(x)
        if self.projection is not None:
            skip = self.projection(skip)
        return self.act(self.drop_path(self.conv2(self.conv1(x))) + skip)


class ResidualLevel(nn.Sequential):
    """A sequence of residual blocks; the finest level begins with a convolution, the stem.

    `strided` is what precedes the first block; `options` are those of all blocks.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        blocks: int,
        *,
        stem: bool,
        strided: Strided | None,
        make_layer: MakeLayer,
        **options: Any,
    ):
        super().__init__()
        if stem:
            self.append(make_layer(in_channels, channels))
            in_channels = channels
        options["make_layer"] = make_layer
        self.append(ResidualBlock(in_channels, channels, strided=strided, **options))
        for _ in range(blocks - 1):
            self.append(ResidualBlock(channels, channels, strided=None, **options))


class Interpolate(nn.Module):
    """Parameter-free upsampling in the dtype of its input."""

    def __init__(self, scale_factor: Triple, mode: str):
        super().__init__()
        self.scale_factor, self.mode = scale_factor, mode

    def forward(self, x: Tensor) -> Tensor:
        # CUDA autocast would run this in float32, and the concatenation would then promote the skip
        # too: +45% time on a bf16 U-Net (pytorch#121324). Without autocast there is nothing to
        # turn off, and exported graphs stay free of it.
        device = x.device.type
        with (
            torch.autocast(device, enabled=False)
            if device != "meta" and torch.is_autocast_enabled(device)
            else nullcontext()
        ):
            corners = True if self.mode == "trilinear" else None
            scale = [float(factor) for factor in self.scale_factor]
            return F.interpolate(x, scale_factor=scale, mode=self.mode, align_corners=corners)

    def extra_repr(self) -> str:
        return f"scale_factor={self.scale_factor}, mode={self.mode}"


def build_upsampling(
    name: str, scale_factor: Triple, channels: int, skip_channels: int
) -> tuple[nn.Module, int]:
    """Build the module that goes up one level; return it with its number of output channels.

    `transposed` outputs the skip's channels and has a bias (nnU-Net); `transposed_wide` outputs its
    input's channels and has none (Cicek et al. 2016).
    """
    if name in ("trilinear", "nearest"):
        return Interpolate(scale_factor, name), channels
    out, bias = lookup(
        {"transposed": (skip_channels, True), "transposed_wide": (channels, False)},
        name,
        "upsampling (trilinear and nearest aside)",
    )
    return nn.ConvTranspose3d(channels, out, scale_factor, stride=scale_factor, bias=bias), out


def crop_to_multiple(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return `x` (B, C, D, H, W) without the last rows that do not fill a multiple of `sizes`."""
    for axis, size in enumerate(sizes, start=2):
        if x.shape[axis] % size:
            x = x.narrow(axis, 0, x.shape[axis] // size * size)
    return x


def pad_to(x: Tensor, like: Tensor) -> Tensor:
    """Zero-pad `x` on both sides to the size of `like`: pooling drops the last odd row."""
    missing = [n - m for n, m in zip(like.shape[2:], x.shape[2:], strict=True)]
    if not any(missing):
        return x
    return F.pad(x, [side for m in reversed(missing) for side in (m // 2, m - m // 2)])
