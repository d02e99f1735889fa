"""A prepared volume -> what is decided of it, by a plan."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unet3d.infer.decide import Decider, Output
from unet3d.infer.plan import Plan
from unet3d.infer.windows import Network, walked


def segment(
    image: Tensor,
    networks: Sequence[Network],
    plan: Plan,
    outputs: Sequence[Output],
    *,
    mirrored: Sequence[Sequence[int]] = ((),),
    device: torch.device,
    told: Callable[[int], None] = lambda windows: None,
) -> None:
    """Fill the targets of all outputs, at whatever resolution they have; `image` is (C, D, H, W).

    `told` hears of windows as they are done.
    """
    keep = torch.device("cpu") if plan.sums_in_ram else device
    for strip in plan.strips:
        decider = Decider(outputs, walk=strip.walk, columns=strip.columns, device=keep)
        walked(
            image,
            strip.walk,
            networks,
            decider.take,
            mirrored=mirrored,
            device=device,
            keep=keep,
            told=told,
        )
