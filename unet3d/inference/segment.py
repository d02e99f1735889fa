"""Segment a preprocessed volume according to a memory plan."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unet3d.inference.accumulate import Network, run_windows
from unet3d.inference.background import BackgroundTest
from unet3d.inference.memory_plan import InferencePlan
from unet3d.inference.write_labels import LabelWriter, Output


def segment(
    image: Tensor,
    networks: Sequence[Network],
    plan: InferencePlan,
    outputs: Sequence[Output],
    *,
    flips: Sequence[Sequence[int]] = ((),),
    device: torch.device,
    on_windows: Callable[[int], None] = lambda windows: None,
    background: BackgroundTest | None = None,
) -> int:
    """Fill the targets of all outputs, at their own resolution, from `image` (C, D, H, W).

    `flips` are the flips to average over; `on_windows` is called with the size of each completed
    batch of windows. Windows that `background` finds are not computed; return their number.
    """
    num_skipped = 0
    sum_device = torch.device("cpu") if plan.sums_in_ram else device
    for slab in plan.slabs:
        writer = LabelWriter(
            outputs, schedule=slab.schedule, columns=slab.columns, device=sum_device
        )
        num_skipped += run_windows(
            image,
            slab.schedule,
            networks,
            writer.write,
            flips=flips,
            device=device,
            sum_device=sum_device,
            on_windows=on_windows,
            background=background,
        )
    return num_skipped
