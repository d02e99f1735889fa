"""Networks of nnU-Net's package, and ours like them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet
from torch import nn

from scripts.bench.step import PLAIN, build_ours
from unet3d.memory.fit import FUSED_STRATEGIES
from unet3d.model.blocks import Strided
from unet3d.pool.avg import AvgPool3d

RESIDUAL_CHANNELS, BLOCKS = [32, 64, 128, 256, 320, 320], [1, 3, 4, 6, 6, 6]
"""Channels and residual blocks of the levels of ResEnc L."""

LAYERS: dict[str, Any] = {
    **{"conv_bias": True, "norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"affine": True}},
    **{"nonlin": nn.LeakyReLU, "nonlin_kwargs": {"inplace": True}},
}
"""Layers as nnU-Net plans them."""

RESIDUAL, PLAIN_CONV = "nnU-Net ResidualEncoderUNet", "nnU-Net PlainConvUNet"


class NnUNet(PlainConvUNet):
    """nnU-Net's network with nnU-Net's weight initialization and the arguments of MONAI's DynUNet.

    A config can name it. It has two convolutions per level, instance norm, leaky ReLU, strided and
    transposed convolutions, and no deep supervision.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        out_channels: int,
        kernel_size: Sequence[Any],  # an int or [D, H, W] for each level; so are strides
        strides: Sequence[Any],
        filters: Sequence[int],
    ):
        sizes = len(filters), list(filters), nn.Conv3d, list(kernel_size), list(strides)
        super().__init__(in_channels, *sizes, 2, out_channels, 2, **LAYERS)
        self.apply(self.initialize)


def list_residual_networks(
    channels: list[int] = RESIDUAL_CHANNELS,
) -> dict[str, Callable[[], nn.Module]]:
    """Return nnU-Net's residual encoder and its plain network, and ours like the first."""
    return {
        RESIDUAL: partial(build_theirs, ResidualEncoderUNet, channels, BLOCKS, 1),
        PLAIN_CONV: partial(build_theirs, PlainConvUNet, channels, 2, 2),
        **list_ours(channels, residual_blocks=BLOCKS, convs_per_level=1),
    }


def list_ours(channels: list[int], **options: Any) -> dict[str, Callable[[], nn.Module]]:
    """Return our networks with every strategy, built like those of nnU-Net."""
    options = {"num_classes": 4} | options
    options |= {"norm": "instance", "activation": "leaky_relu", "upsampling": "transposed"}
    options |= {"pool": partial(Strided, skip_pool=AvgPool3d)}
    names = (PLAIN, *FUSED_STRATEGIES)
    return {name: partial(build_ours, channels, name, **options) for name in names}


def build_theirs(
    kind: type[nn.Module],
    channels: list[int],
    blocks: Any,
    decoder: int,
    classes: int = 4,
    **options: Any,
) -> nn.Module:
    """Build a network of nnU-Net's package."""
    levels = len(channels)
    return kind(
        *(1, levels, channels, nn.Conv3d, 3, [1] + [2] * (levels - 1), blocks, classes),
        [decoder] * (levels - 1),
        **LAYERS,
        **options,
    )
