"""A prepared volume -> what is decided of it, by a plan."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unet3d.inference.accumulate import Network, run_windows
from unet3d.inference.memory_plan import InferencePlan
from unet3d.inference.write_labels import LabelWriter, Output


def segment(
    image: Tensor,
    networks: Sequence[Network],
    plan: InferencePlan,
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
        decider = LabelWriter(outputs, walk=strip.walk, columns=strip.columns, device=keep)
        run_windows(
            image,
            strip.walk,
            networks,
            decider.write,
            mirrored=mirrored,
            device=device,
            keep=keep,
            told=told,
        )
