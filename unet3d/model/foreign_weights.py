"""Exchange weights with other projects: read those of nnU-Net, nnssl and MONAI, write nnU-Net's.

Names were read in dynamic-network-architectures 0.4.4 (PlainConvUNet, ResidualEncoderUNet) and
MONAI 1.6.1 (DynUNet, BasicUNet).
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.model.blocks import Strided
from unet3d.model.unet import UNet3D
from unet3d.types import Triple

NORMS = {"instance": "instancenorm.InstanceNorm3d", "batch": "batchnorm.BatchNorm3d"}
FIRST_OF_DECODER = r"decoder\.\d+\.convs\.0\.conv\.weight"


def _name_in_nnunet(name: str, depth: int, *, residual: bool) -> str:
    part, number, *rest = name.split(".")
    if part == "heads":
        return f"decoder.seg_layers.{depth - 2 - int(number)}.{rest[0]}"
    if part == "decoder" and rest[0] == "up":
        return f"decoder.transpconvs.{number}.{rest[1]}"
    if part == "decoder":
        return ".".join(["decoder.stages", number, *rest])
    block, *inner = rest[1:]
    if not residual:
        return ".".join(["encoder.stages", number, "0.convs", block, *inner])
    if number == block == "0":
        return ".".join(["encoder.stem.convs.0", *inner])
    if inner[0] == "projection":
        inner = ["skip.1", *inner[1:]]  # after an average pooling
    index = int(block) - (number == "0")
    return ".".join(["encoder.stages", number, "blocks", str(index), *inner])


def _name_in_dynunet(name: str, depth: int) -> str:
    part, number, *rest = name.split(".")
    if part == "heads":
        head = "output_block" if number == "0" else f"heads.{int(number) - 1}"
        return f"{head}.conv.conv.{rest[0]}"
    if part == "decoder" and rest[0] == "up":
        return f"upsamples.{number}.transp_conv.conv.{rest[1]}"
    block = f"upsamples.{number}.conv_block"
    if part == "encoder":
        block = {0: "input_block", depth - 1: "bottleneck"}.get(
            int(number), f"downsamples.{int(number) - 1}"
        )
    _, index, kind, parameter = rest
    inner = "conv." if kind == "conv" else ""
    return f"{block}.{kind}{int(index) + 1}.{inner}{parameter}"


def _name_in_basic_unet(name: str, depth: int) -> str:
    part, number, *rest = name.split(".")
    if part == "heads":
        return f"final_conv.{rest[0]}"
    upcat = f"upcat_{4 - int(number)}"
    if part == "decoder" and rest[0] == "up":
        return f"{upcat}.upsample.deconv.{rest[1]}"
    block = f"{upcat}.convs"
    if part == "encoder":
        block = "conv_0" if number == "0" else f"down_{number}.convs"
    _, index, kind, parameter = rest
    return f"{block}.conv_{index}.{'adn.N' if kind == 'norm' else kind}.{parameter}"


class Project(NamedTuple):
    """How one network names its weights."""

    name: str
    key: str  # a weight that no other network has
    get_name: Callable[[str, int], str]  # from our name and the depth
    has_own_axes: bool = False  # whether its axes have another order than ours, which is nibabel's
    upsampled_first: bool = True  # decoders concatenate the upsampled map and the skip


PROJECTS = (
    Project(
        name="nnU-Net's ResidualEncoderUNet",
        key="encoder.stem.convs.0.conv.weight",
        get_name=partial(_name_in_nnunet, residual=True),
        has_own_axes=True,
    ),
    Project(
        name="nnU-Net's PlainConvUNet",
        key="encoder.stages.0.0.convs.0.conv.weight",
        get_name=partial(_name_in_nnunet, residual=False),
        has_own_axes=True,
    ),
    Project("MONAI's DynUNet", "input_block.conv1.conv.weight", _name_in_dynunet),
    Project(
        name="MONAI's BasicUNet",
        key="conv_0.conv_0.conv.weight",
        get_name=_name_in_basic_unet,
        upsampled_first=False,
    ),
)


def rename_weights(
    weights: Mapping[str, Tensor], own: Mapping[str, Tensor], axes: Triple = (2, 1, 0)
) -> tuple[dict[str, Tensor], str | None]:
    """Return another network's weights with the names that `own`, the state of a UNet3D, has.

    Also return whose they were; None: they had these names. A missing bias is zero, and inputs of
    decoders are reordered. `axes` are those of nnU-Net's network that are our D, H and W; kernels
    are transposed. Weights of networks that are not known keep their names.
    """
    project = next((p for p in PROJECTS if p.key in weights and p.key not in own), None)
    if project is None:
        return dict(weights), None
    # The number before a projection says whether there is a pooling; versions name heads otherwise.
    theirs = {
        re.sub(r"\.skip\.\d\.", ".skip.1.", name.removeprefix("deep_supervision_")): weight
        for name, weight in weights.items()
    }
    depth = len({name.split(".")[1] for name in own if name.startswith("encoder.")})
    renamed: dict[str, Tensor] = {}
    for name in own:
        weight = theirs.get(project.get_name(name, depth))
        if weight is not None:
            if project.has_own_axes and weight.dim() == 5:
                weight = weight.permute(0, 1, *(2 + axis for axis in axes)).contiguous()
            renamed[name] = weight
    for name in own:
        if name.endswith("bias") and f"{name.removesuffix('bias')}weight" in renamed:
            renamed.setdefault(name, torch.zeros_like(own[name]))
        if project.upsampled_first and re.fullmatch(FIRST_OF_DECODER, name) and name in renamed:
            up = renamed.get(f"{name.removesuffix('convs.0.conv.weight')}up.weight")
            if up is not None:
                renamed[name] = _swap_inputs(renamed[name], up.shape[1])
    return renamed, project.name


def rename_nnssl_encoder(
    weights: Mapping[str, Tensor], plan: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return a network that nnssl has pretrained with the names that nnU-Net's encoder has.

    Its adaptation plan says where the encoder is, which depends on the method of pretraining.

    >>> plan = {"key_to_encoder": "online.stages", "key_to_stem": "online.stem"}
    >>> list(rename_nnssl_encoder({"online.stem.convs.0.conv.bias": torch.zeros(1)}, plan))
    ['encoder.stem.convs.0.conv.bias']
    """
    renamed = dict(weights)
    for key, own in (("key_to_encoder", "encoder.stages"), ("key_to_stem", "encoder.stem")):
        prefix = plan.get(key, own)
        for name in [name for name in weights if name.startswith(f"{prefix}.")]:
            renamed[own + name.removeprefix(prefix)] = renamed.pop(name)
    return renamed


def _swap_inputs(weight: Tensor, first: int) -> Tensor:
    """Move the first input channels, of an upsampled map or a skip, behind the others."""
    return torch.cat([weight[:, first:], weight[:, :first]], dim=1)


def get_nnunet_axes(plans: Mapping[str, Any]) -> Triple:
    """Return the axes of nnU-Net's network that are our D, H and W.

    SimpleITK reads axes in the reverse of nibabel's order, and nnU-Net's plans transpose them.

    >>> get_nnunet_axes({"transpose_forward": [1, 0, 2]})
    (2, 0, 1)
    """
    forward = list(plans.get("transpose_forward", (0, 1, 2)))
    d, h, w = (forward.index(axis) for axis in (2, 1, 0))
    return d, h, w


def is_first_convolution(own: Tensor, given: Tensor) -> bool:
    """Return whether two weights differ in nothing but the number of input channels."""
    same = own.shape[:1] + own.shape[2:] == given.shape[:1] + given.shape[2:] and given.numel() > 0
    return own.dim() == 5 and given.dim() == 5 and same and own.shape != given.shape


def adapt_input_channels(weight: Tensor, channels: int) -> Tensor:
    """Return the first convolution's weight for another number of input channels.

    The weights are the mean over the given channels, scaled so that inputs of the same size give
    outputs of the same size.
    """
    mean = weight.mean(1, keepdim=True).expand(-1, channels, -1, -1, -1)
    return mean * (weight.shape[1] / channels)


def describe_architecture(network: nn.Module) -> dict[str, Any]:
    """Return the architecture as nnU-Net's plans have it; refuse what nnU-Net does not build."""
    problem = _find_difference(network)
    if problem:
        raise UsageError(f"nnU-Net has no such network: {problem}")
    assert isinstance(network, UNet3D)
    levels: list[Any] = list(network.encoder)
    decoders: list[Any] = list(network.decoder)
    convs = [_get_conv(level.convs[-1]) for level in levels]
    slope = getattr(decoders[0].convs[0].act, "negative_slope", None)
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
    levels: list[Any] = list(network.encoder)
    decoders: list[Any] = list(network.decoder)
    if not all(isinstance(level.pool, Strided) for level in levels[:-1]):
        return "it pools (use pool=strided)"
    if not all(isinstance(level.up, nn.ConvTranspose3d) for level in decoders):
        return "it interpolates (use model.upsampling=transposed)"
    if network.norm not in NORMS:
        return f"model.norm={network.norm} (use instance or batch)"
    if any(level.up.bias is None for level in decoders):
        return "its upsampling keeps the channels (use model.upsampling=transposed)"
    widths = [_get_conv(level.convs[-1]).out_channels for level in levels]
    for width, level in zip([*widths, *widths[-2::-1]], [*levels, *decoders], strict=True):
        if any(_get_conv(layer).out_channels != width for layer in level.convs):
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
    first_level: Any = network.encoder[0]
    weights: dict[str, Tensor] = {}
    for name, value in state.items():
        weight = value.detach().cpu()
        if re.fullmatch(FIRST_OF_DECODER, name):
            up = state[f"{name.removesuffix('convs.0.conv.weight')}up.weight"]
            weight = _swap_inputs(weight, weight.shape[1] - up.shape[1])
        if weight.dim() == 5:
            weight = permute_axes(weight)
        weight = weight.float() if weight.is_floating_point() else weight
        theirs = _name_in_nnunet(name, depth, residual=first_level.is_residual)
        weights[theirs] = weight.contiguous()
        for part, index in (("conv", 0), ("norm", 1)):
            alias = re.sub(rf"\.{part}\.(\w+)$", rf".all_modules.{index}.\1", theirs)
            weights[alias] = weights[theirs]
    head: Any = network.heads[0]
    for level in range(len(network.heads), depth - 1):
        decoder: Any = network.decoder[depth - 2 - level]
        prefix, width = f"decoder.seg_layers.{depth - 2 - level}", decoder.up.out_channels
        weights[f"{prefix}.weight"] = torch.zeros(head.out_channels, width, 1, 1, 1)
        weights[f"{prefix}.bias"] = torch.zeros(head.out_channels)
    copies = {f"decoder.{name}": w for name, w in weights.items() if name.startswith("encoder.")}
    return weights | copies


def permute_axes(x: Tensor) -> Tensor:
    """Reverse D, H and W, as nnU-Net has them.

    >>> permute_axes(torch.zeros(1, 2, 3, 4, 5)).shape
    torch.Size([1, 2, 5, 4, 3])
    """
    return x.permute(0, 1, 4, 3, 2)
