"""Store only the inputs of a network's blocks and recompute each block in backward."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unet3d.checkpointing.offload import check_version
from unet3d.errors import UsageError
from unet3d.module_hooks import get_forward
from unet3d.types import HasRetention, has_blocks

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


class RecomputeBlocks:
    """Checkpoint every block of the given levels (0 is full resolution), or of all levels."""

    def __init__(self, levels: str | Sequence[int] = "all"):
        self.levels = levels

    def apply(self, model: nn.Module) -> None:
        """Wrap the forward of these blocks; parameters, buffers and their names do not change."""
        blocks = find_blocks(model)
        if not blocks:
            raise UsageError(
                f"{type(model).__name__} does not list its blocks, which checkpointing=blocks "
                "recomputes: give it a method blocks() that yields (level, module), or use "
                "checkpointing=none"
            )
        if isinstance(model, HasRetention):
            model.retention = None
        known = {level for level, _ in blocks}
        levels: Any = known if self.levels == "all" else self.levels
        is_list = not isinstance(levels, str | int) and all(type(n) is int for n in levels)
        if not is_list or not levels or not known.issuperset(levels):
            raise UsageError(
                f"checkpointing.levels must be all, or within 0..{max(known)}, got {self.levels!r}"
            )
        for level, module in blocks:
            if level in levels:
                module.forward = partial(checkpoint_block, get_forward(module), module)


def is_recomputed(model: nn.Module) -> bool:
    """Return whether the strategy has been applied to a network."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return any(getattr(forward, "func", None) is checkpoint_block for forward in forwards)


def checkpoint_block(forward: Any, module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Run `forward` and store only its inputs; backward runs it again."""
    if torch.compiler.is_compiling():  # to what changes no weights and no buffers
        return checkpoint(forward, module, *inputs, use_reentrant=False, **options)
    return checkpoint(
        forward,
        module,
        *inputs,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), WeightsOfForward(module)),
        **options,
    )


class WeightsOfForward:
    """Run the body on the weights of forward, and on copies of the buffers.

    torch.func.functional_call has put a network's own weights back by then. The recomputation would
    update BatchNorm's running statistics a second time (pytorch#96136). Weights that have been
    changed in place are refused; torch does so with inputs.
    """

    def __init__(self, module: nn.Module):
        self.weights = [(m, dict(m._parameters)) for m in module.modules()]
        self.versions = [(p, p._version) for p in module.parameters()]

    def __enter__(self) -> None:
        for weight, version in self.versions:
            check_version(weight, version)
        self.originals = [(m, dict(m._parameters), dict(m._buffers)) for m, _ in self.weights]
        for m, parameters in self.weights:
            m._parameters.update(parameters)
            m._buffers.update({k: None if b is None else b.clone() for k, b in m._buffers.items()})

    def __exit__(self, *error: object) -> None:
        for m, parameters, buffers in self.originals:
            m._parameters.update(parameters)
            m._buffers.update(buffers)


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
