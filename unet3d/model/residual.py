"""Build levels of residual blocks, as in nnU-Net's residual encoder."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.model.blocks import ConvNormAct, Strided
from unet3d.types import Triple


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

    With a `stride`, the first convolution has it, and the input is pooled before it is added; with
    a change of channels, a 1 x 1 x 1 convolution projects it.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: Triple,
        strided: Strided | None,
        stochastic_depth: float,
        norm: str,
        activation: Callable[[], nn.Module],
    ):
        super().__init__()
        stride = (1, 1, 1) if strided is None else strided.kernel_size
        options: Any = {"kernel_size": kernel_size, "norm": norm}
        self.conv1 = ConvNormAct(
            in_channels, out_channels, stride=stride, activation=activation, **options
        )
        self.conv2 = ConvNormAct(out_channels, out_channels, activation=None, **options)
        scale = getattr(self.conv2.norm, "weight", None)
        if scale is not None:
            nn.init.zeros_(scale)  # the block begins as its skip
        self.drop_path = StochasticDepth(stochastic_depth)
        self.skip_pool = None if strided is None else strided.skip_pool
        self.projection = None
        if in_channels != out_channels:
            self.projection = ConvNormAct(
                *(in_channels, out_channels),
                kernel_size=(1, 1, 1),
                bias=False,
                norm=norm,
                activation=None,
            )
        self.act = activation()

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.skip_pool is None else self.skip_pool(x)
        if self.projection is not None:
            skip = self.projection(skip)
        return self.act(self.drop_path(self.conv2(self.conv1(x))) + skip)


class ResidualLevel(nn.Sequential):
    """A sequence of residual blocks; the finest level begins with a convolution, the stem."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        blocks: int,
        *,
        stem: bool,
        kernel_size: Triple,
        strided: Strided | None,
        stochastic_depth: float,
        norm: str,
        activation: Callable[[], nn.Module],
    ):
        options: Any = {"kernel_size": kernel_size, "norm": norm, "activation": activation}
        modules: list[nn.Module] = []
        if stem:
            modules.append(ConvNormAct(in_channels, channels, **options))
            in_channels = channels
        for n in range(blocks):
            modules.append(
                ResidualBlock(
                    in_channels if n == 0 else channels,
                    channels,
                    strided=strided if n == 0 else None,
                    stochastic_depth=stochastic_depth,
                    **options,
                )
            )
        super().__init__(*modules)
