"""Write a UNet3D's weights with the names and axes of nnU-Net's networks.

Names were read in dynamic-network-architectures 0.4.4; model.pretrained reads them.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.model.blocks import ResidualLevel, Strided
from unet3d.model.unet import UNet3D

NORMS = {"instance": "instancenorm.InstanceNorm3d", "batch": "batchnorm.BatchNorm3d"}


def describe_architecture(network: nn.Module) -> dict[str, Any]:
    """Return the architecture as nnU-Net's plans have it; refuse what nnU-Net does not build."""
    problem = _find_difference(network)
    if problem:
        raise UsageError(f"nnU-Net has no such network: {problem}")
    assert isinstance(network, UNet3D)
    levels: list[Any] = list(network.encoder)
    decoders: list[Any] = list(network.decoder)
    convs = [_get_conv(level.convs[-1]) for level in levels]
    activation = decoders[0].convs[0].act
    slope = getattr(activation, "negative_slope", None)
    options = {
        "n_stages": len(levels),
        "features_per_stage": [conv.out_channels for conv in convs],
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": [list(conv.kernel_size[::-1]) for conv in convs],
        "strides": [[1, 1, 1], *(list(kernel[::-1]) for kernel in network.pool_kernels)],
        "n_conv_per_stage_decoder": [len(decoder.convs) for decoder in decoders],
        "conv_bias": True,
        "norm_op": f"torch.nn.modules.{NORMS[network.norm]}",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.ReLU" if slope is None else "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True} | ({} if slope is None else {"negative_slope": slope}),
    }
    if levels[0].is_residual:
        name, counts = "ResidualEncoderUNet", [len(level.convs) for level in levels]
        options["n_blocks_per_stage"] = [counts[0] - 1, *counts[1:]]  # without the stem
    else:
        name = "PlainConvUNet"
        options["n_conv_per_stage"] = [len(level.convs) for level in levels]
    return {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{name}",
        "arch_kwargs": options,
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def _find_difference(network: nn.Module) -> str | None:
    if not isinstance(network, UNet3D):
        return f"{type(network).__name__} (use model=unet_nnunet or unet_resenc)"
    levels: Any = network.encoder
    decoders: list[Any] = list(network.decoder)
    if not all(isinstance(level.pool, Strided) for level in levels[:-1]):
        return "it pools (use pool=strided)"
    if not all(isinstance(level.up, nn.ConvTranspose3d) for level in decoders):
        return "it interpolates (use model.upsampling=transposed)"
    if network.norm not in NORMS:
        return f"model.norm={network.norm} (use instance or batch)"
    widths = [_get_conv(level.convs[-1]).out_channels for level in levels]
    finer = list(reversed(widths[:-1]))
    if any(level.up.bias is None for level in decoders):
        return "its upsampling keeps the channels (use model.upsampling=transposed)"
    if any(
        _get_conv(layer).out_channels != width
        for width, level in zip([*widths, *finer], [*levels, *decoders], strict=True)
        for layer in level.convs
    ):
        return "the convolutions of a level have different widths"
    return None


def _get_conv(layer: Any) -> nn.Conv3d:
    """Return the convolution of a layer, or the last one of a residual block."""
    return layer.conv if hasattr(layer, "conv") else layer.conv2.conv


def to_nnunet_weights(network: UNet3D) -> dict[str, Tensor]:
    """Return the weights as nnU-Net's network of `describe_architecture` loads them.

    Its decoder has a head at each level: those that this network does not have are zero.
    """
    state, depth = network.state_dict(), len(network.encoder)
    weights: dict[str, Tensor] = {}
    for name, value in state.items():
        weight = value.detach().cpu()
        if re.fullmatch(r"decoder\.\d+\.convs\.0\.conv\.weight", name):
            skip = weight.shape[1] - state[f"{name.split('convs')[0]}up.weight"].shape[1]
            weight = torch.cat([weight[:, skip:], weight[:, :skip]], dim=1)
        if weight.dim() == 5:
            weight = permute_axes(weight)
        weight = weight.float() if weight.is_floating_point() else weight
        theirs = _rename(name, network)
        weights[theirs] = weight.contiguous()
        for part, index in (("conv", 0), ("norm", 1)):
            alias = re.sub(rf"\.{part}\.(\w+)$", rf".all_modules.{index}.\1", theirs)
            weights[alias] = weights[theirs]
    for level in range(len(network.heads), depth - 1):
        prefix = f"decoder.seg_layers.{depth - 2 - level}"
        head: Any = network.heads[0]
        width = network.decoder[depth - 2 - level].convs[-1].conv.out_channels  # ty: ignore
        weights[f"{prefix}.weight"] = torch.zeros(head.out_channels, width, 1, 1, 1)
        weights[f"{prefix}.bias"] = torch.zeros(head.out_channels)
    copies = {f"decoder.{name}": w for name, w in weights.items() if name.startswith("encoder.")}
    return weights | copies


def _rename(name: str, network: UNet3D) -> str:
    part, number, *rest = name.split(".")
    index = int(number)
    if part == "heads":
        return f"decoder.seg_layers.{len(network.encoder) - 2 - index}.{rest[0]}"
    if part == "decoder":
        kind = "transpconvs" if rest[0] == "up" else "stages"
        return ".".join(["decoder", kind, number, *(rest[1:] if rest[0] == "up" else rest)])
    block, inner = int(rest[1]), rest[2:]
    level: Any = network.encoder[index]
    if not isinstance(level.convs, ResidualLevel):
        return ".".join(["encoder.stages", number, "0.convs", rest[1], *inner])
    if index == 0 and block == 0:
        return ".".join(["encoder.stem.convs.0", *inner])
    if inner[0] == "projection":  # after an average pooling, where there is one
        inner = ["skip", str(int(level.convs[block].skip_pool is not None)), *inner[1:]]
    return ".".join(["encoder.stages", number, "blocks", str(block - (index == 0)), *inner])


def permute_axes(x: Tensor) -> Tensor:
    """Reverse D, H and W, as nnU-Net has them.

    >>> permute_axes(torch.zeros(1, 2, 3, 4, 5)).shape
    torch.Size([1, 2, 5, 4, 3])
    """
    return x.permute(0, 1, 4, 3, 2)
