"""A volume through networks, window by window, with their logits summed in open bars."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from unet3d.inference.window_order import Span, Tile, WindowSchedule, compute_span_length
from unet3d.types import Triple

Network = Callable[[Tensor], Tensor]
"""(B, C, D, H, W) -> logits (B, K, D, H, W)."""

FAINT = 1e-3
"""The least weight of a window's voxel against its middle one, as in MONAI."""


def make_gaussian_importance(patch: Triple) -> Tensor:
    """The weight of each voxel of a window: a gaussian of an eighth of its sides, never faint."""
    weights = torch.ones(())
    for side in patch:
        at = torch.arange(side, dtype=torch.float32) - (side - 1) / 2
        weights = weights[..., None] * torch.exp(-(at**2) / (2 * (side / 8) ** 2))
    return weights.clamp(min=FAINT)


def list_flips(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """All combinations of flips along some axes of a volume, no flip among them.

    >>> list_flips([0, 2])
    [(), (2,), (0,), (0, 2)]
    """
    choices = product(*((False, True) for _ in axes))
    return [tuple(a for a, flip in zip(axes, choice, strict=True) if flip) for choice in choices]


class Accumulator:
    """Weighted sums of logits in the open bars; the sum of the weights is their last channel."""

    def __init__(self, walk: WindowSchedule, device: torch.device):
        self.walk = walk
        self.weights = make_gaussian_importance(walk.patch).to(device)
        self.open: dict[tuple[Span, Span], Tensor] = {}

    def add(self, window: Triple, logits: Tensor, flipped: Sequence[int]) -> None:
        """Take in the logits (K, D, H, W) of a window, which was flipped along some axes."""
        turned = [axis + 1 for axis in flipped]
        for rows, columns in self.walk.under(window):
            block = self.open.get((rows, columns))
            if block is None:
                block = self.open[rows, columns] = self._opened(rows, columns, len(logits))
            begin, stop = self.walk.along(window)
            inside, read = [], []
            for axis, (start, end) in enumerate(self.walk.placed(rows, columns, (begin, stop))):
                first, last = start - window[axis], end - window[axis]
                inside.append(slice(first, last))
                side = self.walk.patch[axis]
                read.append(slice(side - last, side - first) if axis in flipped else inside[-1])
            piece = logits[(slice(None), *read)].float()
            weights = self.weights[tuple(inside)]
            part = block.narrow(self.walk.order[2] + 1, begin, stop - begin)
            part[:-1].addcmul_(piece.flip(turned) if turned else piece, weights)
            part[-1] += weights

    def finalize(self, bar: Tile) -> Tensor:
        """The mean logits (K, D, H, W) of a finished bar, no longer held here."""
        block = self.open.pop((bar.rows, bar.columns))
        block[:-1] /= block[-1]
        return block[:-1]

    def _opened(self, rows: Span, columns: Span, classes: int) -> Tensor:
        whole = (0, self.walk.size[self.walk.order[2]])
        shape = map(compute_span_length, self.walk.placed(rows, columns, whole))
        return torch.zeros(classes + 1, *shape, device=self.weights.device)


def run_windows(
    image: Tensor,
    walk: WindowSchedule,
    networks: Sequence[Network],
    take: Callable[[Tile, Tensor], None],
    *,
    mirrored: Sequence[Sequence[int]] = ((),),
    device: torch.device,
    keep: torch.device,
    told: Callable[[int], None] = lambda windows: None,
) -> None:
    """Give `take` each bar with its mean logits (K, D, H, W), over networks and mirrorings.

    `image` is (C, D, H, W); windows are computed on `device` and summed on `keep`; `told` hears how
    many are done.
    """
    sums = Accumulator(walk, keep)
    bars = deque(walk.bars)
    for begin in range(0, len(walk.windows), walk.batch_size):
        windows = walk.windows[begin : begin + walk.batch_size]
        batch = torch.stack([extract_window(image, at, walk.patch) for at in windows]).to(device)
        for network, flipped in product(networks, mirrored):
            logits = network(batch.flip([axis + 2 for axis in flipped])).to(keep)
            for number, window in enumerate(windows):
                sums.add(window, logits[number], flipped)
            del logits  # before the next ones are made
        told(len(windows))
        while bars and bars[0].last < begin + len(windows):
            bar = bars.popleft()
            take(bar, sums.finalize(bar))


def extract_window(image: Tensor, at: Triple, patch: Triple) -> Tensor:
    """A window of (C, D, H, W); what lies outside is 0."""
    inside, missing = [], []
    for n, start, side in zip(image.shape[1:], at, patch, strict=True):
        inside.append(slice(max(start, 0), min(start + side, n)))
        missing.append((max(-start, 0), max(start + side - n, 0)))
    piece = image[(slice(None), *inside)]
    around = [n for sides in reversed(missing) for n in sides]
    return pad(piece, around) if any(around) else piece
