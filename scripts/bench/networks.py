"""Networks of other projects that a config can name."""

from collections.abc import Sequence
from typing import Any

from dynamic_network_architectures.architectures.unet import PlainConvUNet
from torch import nn


class NnUNet(PlainConvUNet):
    """nnU-Net's network with nnU-Net's weight initialization and the arguments of MONAI's DynUNet.

    It has two convolutions per level, instance norm, leaky ReLU, strided and transposed
    convolutions, and no deep supervision.
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
        levels = len(filters)
        super().__init__(
            input_channels=in_channels,
            n_stages=levels,
            features_per_stage=list(filters),
            conv_op=nn.Conv3d,
            kernel_sizes=list(kernel_size),
            strides=list(strides),
            n_conv_per_stage=2,
            num_classes=out_channels,
            n_conv_per_stage_decoder=2,
            conv_bias=True,
            norm_op=nn.InstanceNorm3d,
            norm_op_kwargs={"eps": 1e-5, "affine": True},
            nonlin=nn.LeakyReLU,
            nonlin_kwargs={"inplace": True},
        )
        self.apply(self.initialize)
