"""Run the windows of a volume through networks and accumulate their logits tile by tile."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from unet3d.inference.window_order import (
    OutputTile,
    Span,
    Triple,
    WindowSchedule,
    make_gaussian_importance,
)

Network = Callable[[Tensor], Tensor]
"""(B, C, D, H, W) -> logits (B, K, D, H, W)."""

BACKGROUND_PERCENTILES = 0.5, 99.5
"""The darkest and the brightest voxels of a channel."""

MAX_SAMPLED_VOXELS = 2**18
"""Size of the sample from which the percentiles are computed."""

MIN_BACKGROUND_LEVEL = 1e-5
"""Interpolation between equal voxels rounds."""

BACKGROUND_LOGIT = 10.0
"""Margin of the background where no window is computed: a probability of 0.9999."""


class BackgroundTest:
    """A window is background if no voxel of any channel is above the channel's threshold.

    `level` is between the darkest voxels of the preprocessed image (C, D, H, W), 0, and the
    brightest, 1. The `outputs` are classes of which the first is the background or, if
    `overlapping`, regions. `logits` are those of the voxels that no computed window covers.
    """

    def __init__(self, image: Tensor, level: float, *, outputs: int, overlapping: bool):
        step = max(1, round((image[0].numel() / MAX_SAMPLED_VOXELS) ** (1 / 3)))
        sample = image[:, ::step, ::step, ::step].flatten(1).cpu().numpy()
        level = max(level, MIN_BACKGROUND_LEVEL)
        percentiles = np.percentile(sample, BACKGROUND_PERCENTILES, axis=1).T
        self.thresholds = [float(low + level * (high - low)) for low, high in percentiles]
        self.logits = [BACKGROUND_LOGIT, *[0.0] * (outputs - 1)]
        if overlapping:
            self.logits = [-BACKGROUND_LOGIT] * outputs

    def is_background(self, window: Tensor) -> bool:
        """Return whether a window (C, D, H, W), without its padding, is background."""
        return all(
            bool(channel.max() <= threshold)
            for channel, threshold in zip(window, self.thresholds, strict=True)
        )


def list_flips(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all combinations of flips along these axes, no flip included.

    >>> list_flips([0, 2])
    [(), (2,), (0,), (0, 2)]
    """
    choices = product(*((False, True) for _ in axes))
    return [tuple(a for a, flip in zip(axes, choice, strict=True) if flip) for choice in choices]


class Accumulator:
    """Weighted sums of logits for the active tiles.

    The last channel of a tile's sum is the sum of the weights.
    """

    def __init__(
        self,
        schedule: WindowSchedule,
        device: torch.device,
        background: BackgroundTest | None = None,
    ):
        self.schedule, self.background = schedule, background
        self.weights = torch.from_numpy(make_gaussian_importance(schedule.patch)).to(device)
        self.active: dict[tuple[Span, Span], Tensor] = {}

    def add(self, window: Triple, logits: Tensor, flips: Sequence[int]) -> None:
        """Add the logits (K, D, H, W) of a window that was flipped along some axes."""
        flip_dims = [axis + 1 for axis in flips]
        for rows, columns in self.schedule.find_tiles_under(window):
            sums = self.active.get((rows, columns))
            if sums is None:
                sums = self.active[rows, columns] = self._make_sums(rows, columns, len(logits))
            begin, stop = self.schedule.get_lengthwise_span(window)
            inside, source = [], []  # slices of the weights, and of the flipped logits
            spans = self.schedule.to_volume_order(rows, columns, (begin, stop))
            for axis, (start, end) in enumerate(spans):
                first, last = start - window[axis], end - window[axis]
                inside.append(slice(first, last))
                side = self.schedule.patch[axis]
                source.append(slice(side - last, side - first) if axis in flips else inside[-1])
            values = logits[(slice(None), *source)].float()
            weights = self.weights[tuple(inside)]
            part = sums.narrow(self.schedule.order[2] + 1, begin, stop - begin)
            part[:-1].addcmul_(values.flip(flip_dims) if flip_dims else values, weights)
            part[-1] += weights

    def finalize(self, tile: OutputTile) -> Tensor:
        """Return the mean logits (K, D, H, W) of a completed tile and release its sums."""
        sums = self.active.pop((tile.rows, tile.columns), None)
        if sums is None:  # all of its windows are background
            assert self.background is not None
            sums = self._make_sums(tile.rows, tile.columns, len(self.background.logits))
        logits, weights = sums[:-1], sums[-1]
        logits /= weights
        if self.background is not None and torch.any(uncovered := weights == 0):
            for output, value in zip(logits, self.background.logits, strict=True):
                output.masked_fill_(uncovered, value)
        return logits

    def _make_sums(self, rows: Span, columns: Span, classes: int) -> Tensor:
        shape = [stop - start for start, stop in self.schedule.get_tile_box(rows, columns)]
        # In float32 also where pure half precision has made half the default dtype.
        return torch.zeros(classes + 1, *shape, dtype=torch.float32, device=self.weights.device)


def run_windows(
    image: Tensor,
    schedule: WindowSchedule,
    networks: Sequence[Network],
    on_tile: Callable[[OutputTile, Tensor], None],
    *,
    flips: Sequence[Sequence[int]] = ((),),
    device: torch.device,
    sum_device: torch.device,
    on_windows: Callable[[int], None] = lambda count: None,
    background: BackgroundTest | None = None,
) -> int:
    """Call `on_tile` with each tile and its mean logits (K, D, H, W) over networks and flips.

    `image` is (C, D, H, W). Windows are computed on `device` and summed on `sum_device`.
    `on_windows` is called with the size of each completed batch. Windows that `background` finds
    are not computed, and their number is returned: a voxel has the mean of the others.
    """
    sums = Accumulator(schedule, sum_device, background)
    tiles, num_skipped = deque(schedule.tiles), 0
    for begin in range(0, len(schedule.windows), schedule.batch_size):
        scheduled = schedule.windows[begin : begin + schedule.batch_size]
        windows = [
            window
            for window in scheduled
            if background is None
            or not background.is_background(crop_window(image, window, schedule.patch))
        ]
        num_skipped += len(scheduled) - len(windows)
        if windows:
            parts = [extract_window(image, window, schedule.patch) for window in windows]
            batch = torch.stack(parts).to(device)
            del parts
            for network, axes in product(networks, flips):
                logits = network(batch.flip([axis + 2 for axis in axes])).to(sum_device)
                for index, window in enumerate(windows):
                    sums.add(window, logits[index], axes)
                del logits  # before the network computes the next ones
        on_windows(len(scheduled))
        while tiles and tiles[0].last < begin + len(scheduled):
            tile = tiles.popleft()
            on_tile(tile, sums.finalize(tile))
    return num_skipped


def crop_window(image: Tensor, start: Triple, patch: Triple) -> Tensor:
    """Return the part of a window of (C, D, H, W) that is inside the image."""
    spans = zip(image.shape[1:], start, patch, strict=True)
    inside = [slice(max(first, 0), min(first + side, n)) for n, first, side in spans]
    return image[(slice(None), *inside)]


def extract_window(image: Tensor, start: Triple, patch: Triple) -> Tensor:
    """Return a window of (C, D, H, W), padded with 0 outside the image."""
    padding: list[int] = []
    for n, first, side in zip(image.shape[:0:-1], start[::-1], patch[::-1], strict=True):
        padding += [max(-first, 0), max(first + side - n, 0)]
    window = crop_window(image, start, patch)
    return pad(window, padding) if any(padding) else window
