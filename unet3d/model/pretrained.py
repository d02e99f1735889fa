"""Rename the weights of nnU-Net's and MONAI's U-Nets as those of UNet3D, and adapt their sizes.

Names were read in dynamic-network-architectures 0.4.4 (PlainConvUNet, ResidualEncoderUNet) and
MONAI 1.6.1 (DynUNet, BasicUNet).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unet3d.types import Triple

Groups = tuple[str, ...]


class Project(NamedTuple):
    """How one network names its weights; a rule gets the groups of its pattern and the depth."""

    name: str
    key: str  # a weight that no other network has
    has_own_axes: bool  # whether its axes have another order than ours, which is nibabel's
    upsampled_first: bool  # decoders concatenate the upsampled map and the skip in this order
    ignored: str  # pattern of names that repeat others
    rules: dict[str, Callable[[Groups, int], str]]


def _name_dynunet(prefix: str, groups: Groups) -> str:
    """Name a weight of a block of DynUNet: conv1.conv.weight or norm1.weight."""
    kind, number, rest = groups
    return f"{prefix}.convs.{int(number) - 1}.{kind}.{rest.removeprefix('conv.')}"


def _name_basic_unet(prefix: str, groups: Groups) -> str:
    """Name a weight of a block of BasicUNet: conv_0.conv.weight or conv_0.adn.N.weight."""
    number, rest = groups
    return f"{prefix}.convs.{number}.{rest.replace('adn.N', 'norm')}"


NNUNET_RULES: dict[str, Callable[[Groups, int], str]] = {
    r"encoder\.stem\.convs\.0\.(.+)": lambda g, _: f"encoder.0.convs.0.{g[0]}",
    r"encoder\.stages\.(\d+)\.blocks\.(\d+)\.(conv[12]\..+)": lambda g, _: (
        f"encoder.{g[0]}.convs.{int(g[1]) + (g[0] == '0')}.{g[2]}"
    ),
    r"encoder\.stages\.(\d+)\.blocks\.(\d+)\.skip\.\d\.(.+)": lambda g, _: (
        f"encoder.{g[0]}.convs.{int(g[1]) + (g[0] == '0')}.projection.{g[2]}"
    ),
    r"encoder\.stages\.(\d+)\.\d\.convs\.(\d+)\.(.+)": lambda g, _: (
        f"encoder.{g[0]}.convs.{g[1]}.{g[2]}"
    ),
    r"decoder\.stages\.(\d+)\.convs\.(\d+)\.(.+)": lambda g, _: (
        f"decoder.{g[0]}.convs.{g[1]}.{g[2]}"
    ),
    r"decoder\.transpconvs\.(\d+)\.(.+)": lambda g, _: f"decoder.{g[0]}.up.{g[1]}",
    r"decoder\.seg_layers\.(\d+)\.(.+)": lambda g, depth: f"heads.{depth - 2 - int(g[0])}.{g[1]}",
}

PROJECTS = (
    *(
        Project(
            name=f"nnU-Net's {network}",
            key=key,
            has_own_axes=True,
            upsampled_first=True,
            ignored=r".*\.all_modules\..*|decoder\.encoder\..*",
            rules=NNUNET_RULES,
        )
        for network, key in (
            ("ResidualEncoderUNet", "encoder.stem.convs.0.conv.weight"),
            ("PlainConvUNet", "encoder.stages.0.0.convs.0.conv.weight"),
        )
    ),
    Project(
        name="MONAI's DynUNet",
        key="input_block.conv1.conv.weight",
        has_own_axes=False,
        upsampled_first=True,
        ignored=r"skip_layers\..*",
        rules={
            r"input_block\.(conv|norm)(\d)\.(.+)": lambda g, _: _name_dynunet("encoder.0", g),
            r"downsamples\.(\d+)\.(conv|norm)(\d)\.(.+)": lambda g, _: _name_dynunet(
                f"encoder.{int(g[0]) + 1}", g[1:]
            ),
            r"bottleneck\.(conv|norm)(\d)\.(.+)": lambda g, depth: _name_dynunet(
                f"encoder.{depth - 1}", g
            ),
            r"upsamples\.(\d+)\.conv_block\.(conv|norm)(\d)\.(.+)": lambda g, _: _name_dynunet(
                f"decoder.{g[0]}", g[1:]
            ),
            r"upsamples\.(\d+)\.transp_conv\.conv\.(.+)": lambda g, _: f"decoder.{g[0]}.up.{g[1]}",
            r"output_block\.conv\.conv\.(.+)": lambda g, _: f"heads.0.{g[0]}",
            r"(?:deep_supervision_)?heads\.(\d+)\.conv\.conv\.(.+)": lambda g, _: (
                f"heads.{int(g[0]) + 1}.{g[1]}"
            ),
        },
    ),
    Project(
        name="MONAI's BasicUNet",
        key="conv_0.conv_0.conv.weight",
        has_own_axes=False,
        upsampled_first=False,
        ignored="",
        rules={
            r"conv_0\.conv_(\d)\.(.+)": lambda g, _: _name_basic_unet("encoder.0", g),
            r"down_(\d)\.convs\.conv_(\d)\.(.+)": lambda g, _: _name_basic_unet(
                f"encoder.{g[0]}", g[1:]
            ),
            r"upcat_(\d)\.convs\.conv_(\d)\.(.+)": lambda g, _: _name_basic_unet(
                f"decoder.{4 - int(g[0])}", g[1:]
            ),
            r"upcat_(\d)\.upsample\.deconv\.(.+)": lambda g, _: (
                f"decoder.{4 - int(g[0])}.up.{g[1]}"
            ),
            r"final_conv\.(.+)": lambda g, _: f"heads.0.{g[0]}",
        },
    ),
)


class Renamed(NamedTuple):
    """Weights with the names of UNet3D, and whose they were."""

    weights: dict[str, Tensor]
    project: str | None  # None: they had these names


def rename_weights(
    weights: Mapping[str, Tensor], own: Mapping[str, Tensor], axes: Triple = (2, 1, 0)
) -> Renamed:
    """Return another network's weights with the names that `own`, the state of a UNet3D, has.

    A missing bias is zero, and inputs of decoders are reordered. `axes` are those of nnU-Net's
    network that are our D, H and W; kernels are transposed. Weights that have the names of
    `own`, or unknown ones, are returned as they are.
    """
    project = next((p for p in PROJECTS if p.key in weights and p.key not in own), None)
    if project is None:
        return Renamed(dict(weights), None)
    depth = 1 + max(
        (int(name.split(".")[1]) for name in own if name.startswith("encoder.")), default=0
    )
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if project.ignored and re.fullmatch(project.ignored, name):
            continue
        if project.has_own_axes and weight.dim() == 5:
            weight = weight.permute(0, 1, *(2 + axis for axis in axes)).contiguous()
        renamed[_rename(name, project, depth)] = weight
    for name in own:
        conv = f"{name.removesuffix('bias')}weight"
        if name.endswith("bias") and name not in renamed and conv in renamed:
            renamed[name] = torch.zeros_like(own[name])
        if project.upsampled_first and re.fullmatch(r"decoder\.\d+\.convs\.0\.conv\.weight", name):
            _move_skip_first(renamed, name)
    return Renamed(renamed, project.name)


def get_axes_of_nnunet(plans: Mapping[str, Any]) -> Triple:
    """Return the axes of nnU-Net's network that are our D, H and W.

    SimpleITK reads axes in the reverse of nibabel's order, and nnU-Net's plans transpose them.

    >>> get_axes_of_nnunet({"transpose_forward": [1, 0, 2]})
    (2, 0, 1)
    """
    forward = list(plans.get("transpose_forward", (0, 1, 2)))
    d, h, w = (forward.index(axis) for axis in (2, 1, 0))
    return d, h, w


def _rename(name: str, project: Project, depth: int) -> str:
    for pattern, rule in project.rules.items():
        match = re.fullmatch(pattern, name)
        if match:
            return rule(match.groups(), depth)
    return name


def _move_skip_first(weights: dict[str, Tensor], name: str) -> None:
    """Move the skip before the upsampled map in the inputs of a decoder's first convolution."""
    up = weights.get(f"{name.removesuffix('convs.0.conv.weight')}up.weight")
    if up is not None and name in weights:
        weight, channels = weights[name], up.shape[1]
        weights[name] = torch.cat([weight[:, channels:], weight[:, :channels]], dim=1)


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
