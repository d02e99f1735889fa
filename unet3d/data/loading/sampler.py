"""Sample the patches of an epoch in an order that can be reproduced."""

from collections.abc import Iterator
from math import floor

import numpy as np
from torch.utils.data import Sampler

PatchIndex = tuple[int, int, bool]
"""(epoch, sample index, whether the patch is centered on foreground)."""


class EpochSampler(Sampler[PatchIndex]):
    """Sample full batches of patches in an order that depends only on (seed, epoch).

    A global batch has `batch_size` patches per rank, and each rank gets its own part. Foreground
    patches are spread evenly over the order, so that every batch has `foreground_fraction` of them
    up to rounding, and the run has it exactly.
    """

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        foreground_fraction: float,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        self.foreground_fraction = foreground_fraction
        self.rank, self.world_size = rank, world_size
        self.length = -(-samples // (batch_size * world_size)) * batch_size
        self.epoch = self.first_batch = 0

    def start_at(self, epoch: int, batch: int = 0) -> None:
        """Let the next iteration begin with this batch of this epoch."""
        self.epoch, self.first_batch = epoch, batch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[PatchIndex]:
        epoch, fraction = self.epoch, self.foreground_fraction
        total = self.length * self.world_size
        order = np.random.default_rng((self.seed, epoch)).permutation(self.samples)
        for batch in range(self.first_batch, self.length // self.batch_size):
            start = (batch * self.world_size + self.rank) * self.batch_size
            for position in range(start, start + self.batch_size):
                n = epoch * total + position
                is_foreground = floor((n + 1) * fraction) > floor(n * fraction)
                # The last batch is filled with extra indices, which are patches of their own.
                index = int(order[position]) if position < self.samples else position
                yield epoch, index, is_foreground
