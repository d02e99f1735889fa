"""Find the blocks of a network: those that it lists, or those of MONAI's networks."""

from collections.abc import Iterator

from torch import nn

from unet3d.types import has_blocks

MONAI_BLOCKS = (
    *("ResBlock", "SegResBlock"),  # SegResNet, SegResNetDS
    *("ConvBlock", "UpConv", "AttentionBlock"),  # AttentionUnet
    *("TransformerBlock", "SwinTransformerBlock"),  # UNETR, SwinUNETR
    *("UnetrBasicBlock", "UnetrPrUpBlock", "UnetrUpBlock"),
    *("UnetBasicBlock", "UnetResBlock", "UnetUpBlock", "UnetOutBlock"),  # DynUNet
    *("TwoConv", "Down", "UpCat"),  # BasicUNet
    *("MedNeXtBlock", "MedNeXtDownBlock", "MedNeXtUpBlock"),
)
"""Classes of MONAI 1.6.1 that compute a block of convolutions or attention."""


def find_blocks(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """Return (level, block) in forward order; MONAI's networks have one level, others none."""
    if has_blocks(model):
        return list(model.blocks())
    return [(0, block) for block in dict.fromkeys(_iter_blocks(model))]  # DynUNet names some twice


def _iter_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost blocks of MONAI's in a module."""
    for child in module.children():
        is_monai = type(child).__module__.startswith("monai.networks.")
        if is_monai and type(child).__name__ in MONAI_BLOCKS:
            yield child
        else:
            yield from _iter_blocks(child)
