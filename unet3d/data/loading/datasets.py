"""Prepared volumes -> samples: random patches to train on, whole volumes to validate on.

A patch depends on (seed, epoch, number) alone, so the same patch comes back whatever worker makes
it and wherever a run was resumed.
"""

from collections.abc import Iterator, Sequence
from math import floor
from time import perf_counter
from typing import NotRequired

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading.worker_errors import InFlightCases
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.errors import UsageError
from unet3d.types import Sample

Place = tuple[int, int, bool]
"""(epoch, number, whether it is centred on foreground) of a patch."""


class PatchSample(Sample):
    """A patch; or, with a key, the larger source from which its augmentation will make it."""

    key: NotRequired[int]
    seconds: dict[str, float]  # that each part of making it took


class TrainingPatches(Dataset[PatchSample]):
    """Patches of `patch_size`, augmented here or, `later`, by whoever has moved them to a GPU."""

    def __init__(
        self,
        volumes: Sequence[CachedVolume],
        *,
        patch_size: Sequence[int],
        augment: Augment,
        seed: int,
        later: bool = False,
    ):
        if len(patch_size) != 3 or min(patch_size) < 1:
            raise UsageError(f"data.patch_size must be three ints >= 1, got {list(patch_size)}")
        self.volumes = list(volumes)
        self.making = InFlightCases(self.volumes)
        self.patch_size = tuple(patch_size)
        self.augment = augment
        self.seed = seed
        self.later = later
        self.edges: dict[str, np.ndarray] = {}  # where each class begins among a volume's places

    def __len__(self) -> int:
        return len(self.volumes)

    def __getitem__(self, index: Place) -> PatchSample:
        """The patch of (epoch, number)."""
        with self.making(index[1] % len(self.volumes)):
            return self._patch(index)

    def _patch(self, index: Place) -> PatchSample:
        begun = perf_counter()
        volume, key, start = self._drawn(index)
        size = self._source_size(volume, key)
        start = [s - (n - p) // 2 for s, n, p in zip(start, size, self.patch_size, strict=True)]
        image = torch.from_numpy(crop_padded(volume.image, start, size))
        label = torch.from_numpy(crop_padded(volume.label, start, size))
        read = perf_counter()
        seconds = {"reading": read - begun}
        if self.later:
            return PatchSample(image=image, label=label, case=volume.name, key=key, seconds=seconds)
        images, labels = self.augment([image], [label], [key], self.patch_size)
        seconds["augmenting"] = perf_counter() - read
        return PatchSample(image=images[0], label=labels[0], case=volume.name, seconds=seconds)

    def label(self, index: Place) -> np.ndarray:
        """Return the labels (D, H, W) of a patch as they are before augmentation."""
        with self.making(index[1] % len(self.volumes)):
            volume, _, start = self._drawn(index)
            return crop_padded(volume.label, start, self.patch_size)

    def _drawn(self, index: Place) -> tuple[CachedVolume, int, list[int]]:
        """Draw the volume, the key of the augmentation, and where the patch begins."""
        epoch, number, foreground = index
        volume = self.volumes[number % len(self.volumes)]
        rng = np.random.default_rng((self.seed, epoch, number))
        key = int(rng.integers(2**63))
        return volume, key, self._start(volume, foreground, rng)

    def _source_size(self, volume: CachedVolume, key: int) -> list[int]:
        """What the patch is read from, but for what lies outside of the volume wherever it is."""
        wanted = self.augment.sample_transform(key, self.patch_size).source_size(self.patch_size)
        sides = zip(wanted, volume.shape, self.patch_size, strict=True)
        return [min(w, max(p, 2 * n - p)) for w, n, p in sides]

    def _start(self, volume: CachedVolume, foreground: bool, rng: np.random.Generator) -> list[int]:
        """Where the patch begins; below 0 where the volume is smaller than the patch."""
        room = [n - p for n, p in zip(volume.shape, self.patch_size, strict=True)]
        places = volume.foreground_points if foreground else ()
        if len(places):
            edges = self.edges.get(volume.name)
            if edges is None:
                edges = np.flatnonzero(np.diff(places[:, 0], prepend=-1, append=-1))
                self.edges[volume.name] = edges
            # A class is drawn first, so that small ones are not rare.
            chosen = rng.integers(len(edges) - 1)
            centre = places[rng.integers(edges[chosen], edges[chosen + 1]), 1:].tolist()
            wanted = [c - p // 2 for c, p in zip(centre, self.patch_size, strict=True)]
            return [
                min(max(w, 0), r) if r > 0 else r // 2 for w, r in zip(wanted, room, strict=True)
            ]
        return [int(rng.integers(r + 1)) if r > 0 else r // 2 for r in room]


def crop_padded(array: np.ndarray, start: Sequence[int], size: Sequence[int]) -> np.ndarray:
    """A patch of the last three axes; what lies outside the array is 0."""
    patch = np.zeros((*array.shape[:-3], *size), array.dtype)
    source, target = [], []
    for n, s, p in zip(array.shape[-3:], start, size, strict=True):
        source.append(slice(max(s, 0), min(s + p, n)))
        target.append(slice(max(-s, 0), max(-s, 0) + min(s + p, n) - max(s, 0)))
    patch[(..., *target)] = array[(..., *source)]
    return patch


class ValidationVolumes(Dataset[Sample]):
    """Every volume as it is, each on one of the ranks.

    All ranks have as many: an empty sample without a name stands in where there is none left.
    """

    def __init__(self, volumes: Sequence[CachedVolume], *, rank: int = 0, ranks: int = 1):
        self.volumes = list(volumes)[rank::ranks]
        self.length = -(-len(volumes) // ranks)
        self.making = InFlightCases(self.volumes)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if index == len(self.volumes):
            nothing = torch.empty(0)
            return Sample(image=nothing, label=nothing.to(torch.uint8), case="")
        volume = self.volumes[index]
        with self.making(index):
            return Sample(
                image=torch.from_numpy(np.array(volume.image)),
                label=torch.from_numpy(np.array(volume.label)),
                case=volume.name,
            )


def get_classes(volumes: Sequence[CachedVolume]) -> list[set[int]]:
    """The foreground classes that each volume has."""
    making, found = InFlightCases(volumes), []
    for number, volume in enumerate(volumes):
        with making(number):
            found.append(volume.classes)
    return found


class EpochSampler(Sampler[Place]):
    """Patches in an order that depends on (seed, epoch) alone; whole batches only.

    A batch of the run has `batch_size` patches for each of its ranks, and each rank gets its own.
    The share that is centred on foreground is spread evenly over the places of the order, so that
    every batch has it, but for less than one patch, and the run as a whole has it.
    Lightning calls `set_epoch` before each epoch.
    """

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        foreground_fraction: float,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
    ):
        if not 0 <= foreground_fraction <= 1:
            raise UsageError(
                f"data.foreground_fraction must be within 0..1, got {foreground_fraction}"
            )
        self.samples, self.batch_size, self.seed, self.epoch = samples, batch_size, seed, 0
        self.foreground_fraction = foreground_fraction
        self.rank, self.ranks = rank, ranks
        self.length = -(-samples // (batch_size * ranks)) * batch_size
        self.skipped = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch

    def skip(self, batches: int) -> None:
        """Leave out the first so many of the next iteration."""
        self.skipped = batches

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Place]:
        epoch, share = self.epoch, self.foreground_fraction
        whole = self.length * self.ranks
        order = np.random.default_rng((self.seed, epoch)).permutation(self.samples)
        # Samples that fill up the last batch get a number, and so a patch, of their own.
        numbers = [*order.tolist(), *range(self.samples, whole)]
        first, self.skipped = self.skipped, 0
        for batch in range(first, self.length // self.batch_size):
            start = (batch * self.ranks + self.rank) * self.batch_size
            for place in range(start, start + self.batch_size):
                at = epoch * whole + place
                yield epoch, numbers[place], floor((at + 1) * share) > floor(at * share)
