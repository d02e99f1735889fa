"""Segment whole volumes with a sliding window, as validation does.

MONAI's SlidingWindowInferer keeps the logits of all classes for the whole volume.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations

import torch
from torch import Tensor

from unet3d.inference.accumulate import Network, run_windows
from unet3d.inference.window_order import OutputTile, Span, WindowSchedule
from unet3d.inference.write_labels import Decision, argmax_labels

Observer = Callable[[Sequence[Span], Tensor], None]
"""(D, H, W) spans of a part, and its logits (K, D, H, W)."""


class SlidingWindow:
    """Overlapping windows of `patch_size`, blended with Gaussian weights, labeled tile by tile."""

    def __init__(
        self,
        patch_size: Sequence[int],
        *,
        overlap: float = 0.5,
        batch_size: int = 1,
        decide: Decision = argmax_labels,
    ):
        d, h, w = patch_size
        self.patch_size = d, h, w
        self.overlap = overlap
        self.batch_size = batch_size
        self.decide = decide

    def __call__(self, image: Tensor, network: Network, observe: Observer | None = None) -> Tensor:
        """(B, C, D, H, W) -> labels (B, D, H, W), uint8.

        `observe` is called with each part of a volume and its logits (K, ...).
        """
        return torch.stack([self._segment(volume, network, observe) for volume in image])

    def _segment(self, image: Tensor, network: Network, observe: Observer | None) -> Tensor:
        _, d, h, w = image.shape
        base = WindowSchedule(
            size=(d, h, w),
            patch=self.patch_size,
            overlap=self.overlap,
            batch_size=self.batch_size,
        )
        schedules = [replace(base, order=(a, b, c)) for a, b, c in permutations(range(3))]
        schedule = min(schedules, key=lambda s: s.max_active_voxels)
        labels = torch.empty((d, h, w), dtype=torch.uint8, device=image.device)

        def write_tile(tile: OutputTile, logits: Tensor) -> None:
            box = schedule.get_tile_box(tile.rows, tile.columns)
            labels[tuple(slice(*span) for span in box)] = self.decide(logits)
            if observe is not None:
                observe(box, logits)

        run_windows(
            image, schedule, [network], write_tile, device=image.device, sum_device=image.device
        )
        return labels
