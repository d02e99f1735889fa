"""Run the windows of a volume through networks, and write labels at its file's resolution.

Logits are accumulated tile by tile, and tiles are interpolated row by row: MONAI's
SlidingWindowInferer keeps the logits of all classes for the whole volume.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import compress, permutations, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from unet3d.inference.heads import Network, SummedHead, iter_logits, split_heads
from unet3d.inference.label_writer import (
    LabelFunction,
    LabelWriter,
    Output,
    argmax_labels,
)
from unet3d.inference.memory_plan import InferencePlan
from unet3d.inference.window_grid import (
    OutputTile,
    Span,
    Triple,
    WindowGrid,
    make_gaussian_importance,
)

Observer = Callable[[Sequence[Span], Tensor], None]
"""(D, H, W) spans of a part, and its logits (K, D, H, W)."""

BACKGROUND_PERCENTILES = 0.5, 99.5
"""The darkest and the brightest voxels of a channel."""

MAX_SAMPLED_VOXELS = 2**18
"""Size of the sample from which the percentiles are computed."""

MIN_BACKGROUND_LEVEL = 1e-5
"""Interpolation between equal voxels rounds."""

BACKGROUND_LOGIT = 10.0
"""Margin of the background where no window is computed: a probability of 0.9999."""


@dataclass(frozen=True)
class SlidingWindow:
    """Segment whole volumes, as validation does: windows with Gaussian weights, tile by tile."""

    patch_size: Sequence[int]
    _: KW_ONLY
    overlap: float = 0.5
    batch_size: int = 1
    decide: LabelFunction = argmax_labels

    def __call__(self, image: Tensor, network: Network, observe: Observer | None = None) -> Tensor:
        """(B, C, D, H, W) -> labels (B, D, H, W); `observe` gets each part's logits."""
        return torch.stack([self._segment(volume, network, observe) for volume in image])

    def _segment(self, image: Tensor, network: Network, observe: Observer | None) -> Tensor:
        _, d, h, w = image.shape
        windows = WindowGrid(
            size=(d, h, w), patch=self.patch_size, overlap=self.overlap, batch_size=self.batch_size
        )
        schedules = [replace(windows, order=(a, b, c)) for a, b, c in permutations(range(3))]
        window_grid = min(schedules, key=lambda s: s.max_active_voxels)
        networks, heads = split_heads([network])
        runner = WindowRunner(networks=networks, device=image.device, heads=heads)
        head = runner.make_head(image.device)
        labels = torch.empty((d, h, w), dtype=torch.uint8, device=image.device)

        def write_tile(tile: OutputTile, values: Tensor) -> None:
            nonlocal labels
            for part, logits in iter_logits(values, head):
                pairs = zip(tile.box, part, strict=True)
                box = [(first + s.start, first + s.stop) for (first, _), s in pairs]
                decided = self.decide(logits)
                if labels.dtype != decided.dtype:  # of more classes than a byte holds
                    labels = decided.new_empty((d, h, w))
                labels[tuple(slice(*span) for span in box)] = decided
                if observe is not None:
                    observe(box, logits)

        runner.run(image, window_grid, write_tile, image.device)
        return labels


def list_flips(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all combinations of flips along these axes, no flip included.

    >>> list_flips([0, 2])
    [(), (2,), (0,), (0, 2)]
    """
    choices = product((False, True), repeat=len(axes))
    return [tuple(compress(axes, choice)) for choice in choices]


class BackgroundDetector:
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
        pairs = zip(window, self.thresholds, strict=True)
        return all(bool(channel.max() <= threshold) for channel, threshold in pairs)


class Accumulator:
    """Weighted sums of logits for the active tiles; the last channel is the sum of the weights.

    With a `head`, features are in the place of logits.
    """

    def __init__(
        self,
        window_grid: WindowGrid,
        device: torch.device,
        background: BackgroundDetector | None,
        head: SummedHead | None,
    ):
        self.window_grid, self.background, self.head = window_grid, background, head
        self.weights = torch.from_numpy(make_gaussian_importance(window_grid.patch)).to(device)
        self.active: dict[OutputTile, Tensor] = {}

    def add(self, window: Triple, logits: Tensor, flips: Sequence[int], member: int) -> None:
        """Add a member's logits (K, D, H, W) of a window that was flipped along some axes."""
        flip_dims = [axis + 1 for axis in flips]
        for tile in self.window_grid.find_tiles_under(window):
            sums = self.active.get(tile)
            if sums is None:
                sums = self.active[tile] = self._make_sums(tile, len(logits))
            target, inside, source = [], [], []  # parts of sums, weights and flipped logits
            for axis, (start, stop) in enumerate(tile.box):
                first, side = window[axis], self.window_grid.patch[axis]
                begin, end = max(start, first), min(stop, first + side)
                target.append(slice(begin - start, end - start))
                inside.append(slice(begin - first, end - first))
                mirrored = slice(side - (end - first), side - (begin - first))
                source.append(mirrored if axis in flips else inside[-1])
            values = logits[(slice(None), *source)].float()
            weights = self.weights[tuple(inside)]
            part = sums[(slice(None), *target)]
            sums = part[:-1] if self.head is None else part[self.head.channels[member]]
            sums.addcmul_(values.flip(flip_dims) if flip_dims else values, weights)
            part[-1] += weights

    def finalize(self, tile: OutputTile) -> Tensor:
        """Return the mean logits (K, D, H, W) of a completed tile and release its sums."""
        sums = self.active.pop(tile, None)
        if sums is None:  # all of its windows are background
            assert self.background is not None
            sums = self._make_sums(tile, len(self.background.logits))
        logits, weights = sums[:-1], sums[-1]
        logits /= weights
        if self.background is None:
            return logits
        uncovered = weights == 0
        if self.head is not None:
            logits.masked_fill_(uncovered, 0)
            weights.copy_(uncovered)  # what the head takes as a channel
            return sums
        for output, value in zip(logits, self.background.logits, strict=True):
            output.masked_fill_(uncovered, value)
        return logits

    def _make_sums(self, tile: OutputTile, outputs: int) -> Tensor:
        shape = [stop - start for start, stop in tile.box]
        outputs = outputs if self.head is None else self.head.inputs
        # In float32 also where pure half precision has made half the default dtype.
        return torch.zeros(outputs + 1, *shape, dtype=torch.float32, device=self.weights.device)


@dataclass(frozen=True, kw_only=True)
class WindowRunner:
    """Runs windows through networks, but for those of background.

    `on_windows` gets the size of each completed batch.
    """

    networks: Sequence[Network]
    device: torch.device
    flips: Sequence[Sequence[int]] = ((),)
    background: BackgroundDetector | None = None
    on_windows: Callable[[int], None] = lambda count: None
    heads: Sequence[nn.Conv3d] = ()  # of networks that return features

    def make_head(self, device: torch.device) -> SummedHead | None:
        """Return what makes logits of the tiles' features; None: they are logits."""
        background = None if self.background is None else self.background.logits
        return SummedHead(self.heads, device, background) if self.heads else None

    def run(
        self,
        image: Any,
        window_grid: WindowGrid,
        on_tile: Callable[[OutputTile, Tensor], None],
        sum_device: torch.device,
    ) -> int:
        """Call `on_tile` with each tile and its mean logits (K, D, H, W) over networks and flips.

        With heads, it gets what `make_head` makes logits of.

        `image` is (C, D, H, W): a tensor, or what windows are read from. Return the number of
        windows that are not computed: a voxel has the mean of the others.
        """
        background = self.background
        sums = Accumulator(window_grid, sum_device, background, self.make_head(sum_device))
        tiles, num_skipped = deque(window_grid.tiles), 0
        for begin in range(0, len(window_grid.windows), window_grid.batch_size):
            scheduled = window_grid.windows[begin : begin + window_grid.batch_size]
            windows, parts = [], []
            for window in scheduled:
                inside, missing = window_grid.locate_window(window)
                part = image[(slice(None), *inside)]
                if background is None or not background.is_background(part):
                    padding = [voxels for pair in reversed(missing) for voxels in pair]
                    windows.append(window)
                    parts.append(pad(part, padding) if any(padding) else part)
            num_skipped += len(scheduled) - len(windows)
            if windows:
                batch = torch.stack(parts).to(self.device)
                del parts
                for (member, network), axes in product(enumerate(self.networks), self.flips):
                    logits = network(batch.flip([axis + 2 for axis in axes])).to(sum_device)
                    for index, window in enumerate(windows):
                        sums.add(window, logits[index], axes, member)
                    del logits  # before the network computes the next ones
            self.on_windows(len(scheduled))
            while tiles and tiles[0].last < begin + len(scheduled):
                tile = tiles.popleft()
                on_tile(tile, sums.finalize(tile))
        return num_skipped


def segment(
    image: Tensor, runner: WindowRunner, plan: InferencePlan, outputs: Sequence[Output]
) -> int:
    """Fill all outputs from `image` (C, D, H, W); return the number of windows not computed."""
    num_skipped = 0
    sum_device = torch.device("cpu") if plan.sums_in_ram else runner.device
    for slab in plan.slabs:
        head, box = runner.make_head(sum_device), outputs[0].target.shape[-3:]
        writer = LabelWriter(outputs, slab, sum_device, head, box=box)
        num_skipped += runner.run(image, slab.window_grid, writer.write, sum_device)
    return num_skipped
