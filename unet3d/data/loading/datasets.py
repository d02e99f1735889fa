"""Make samples from cached volumes: random training patches and whole validation volumes.

A patch depends only on (seed, epoch, sample index), so that every worker and every resumed run
makes the same patch.
"""

from collections.abc import Iterator, Sequence
from math import floor, prod
from typing import NotRequired

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading.worker_errors import WorkerCaseTracker
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.types import Sample

TARGET_VOXELS = 2**26  # voxels to count, which takes a fifth of a second
MIN_PATCHES = 32

PatchIndex = tuple[int, int, int]
"""(epoch, sample index, 1, 2, ... for the run's patches centered on foreground, or 0)."""


class PatchSample(Sample):
    """A patch; or, with a seed, the larger context from which augmentation will cut it."""

    augmentation_seed: NotRequired[int]


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
        self.epoch = self.first_batch = 0  # where the next iteration begins

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
                before, number = floor(n * fraction), floor((n + 1) * fraction)
                # The last batch is filled with extra indices, which are patches of their own.
                index = int(order[position]) if position < self.samples else position
                yield epoch, index, number if number > before else 0


class TrainingPatches(Dataset[PatchSample]):
    """Patches of `patch_size`, augmented here or, with `defer_augmentation`, later on the GPU.

    Foreground patches are centered on a class of their case. With `balance_classes`, they are
    centered on one class after the other, in one case that has it after the other.
    """

    def __init__(
        self,
        volumes: Sequence[CachedVolume],
        *,
        patch_size: Sequence[int],
        augment: Augment,
        seed: int,
        balance_classes: bool = False,
        defer_augmentation: bool = False,
    ):
        self.volumes = list(volumes)
        self.in_flight = WorkerCaseTracker(self.volumes)
        classes = {c for volume in self.volumes for c in volume.classes} if balance_classes else ()
        self.classes = [
            (c, [n for n, volume in enumerate(self.volumes) if c in volume.classes])
            for c in sorted(classes)
        ]
        self.patch_size, self.augment, self.seed = tuple(patch_size), augment, seed
        self.defer_augmentation = defer_augmentation

    def __len__(self) -> int:
        return len(self.volumes)

    def __getitem__(self, index: PatchIndex) -> PatchSample:
        number, classes = self._choose(index)
        with self.in_flight(number):
            volume = self.volumes[number]
            augmentation_seed, start = self._draw(index, volume, classes)
            transform = self.augment.sample_transform(augmentation_seed, self.patch_size)
            needed = transform.compute_context_size(self.patch_size)
            # Without what is outside the volume at any patch position.
            sides = zip(needed, volume.shape, self.patch_size, strict=True)
            size = [min(s, max(p, 2 * n - p)) for s, n, p in sides]
            start = [s - (n - p) // 2 for s, n, p in zip(start, size, self.patch_size, strict=True)]
            image = torch.from_numpy(crop_padded(volume.image, start, size))
            label = crop_padded(volume.label, start, size)
            label = torch.from_numpy(mark_background(label, volume))
            sample = PatchSample(image=image, label=label, case=volume.name)
            if self.defer_augmentation:
                sample["augmentation_seed"] = augmentation_seed
                return sample
            images, labels = self.make_patches([image], [label], [augmentation_seed])
            sample["image"], sample["label"] = images[0], labels[0]
            return sample

    def make_patches(
        self, images: Sequence[Tensor], labels: Sequence[Tensor], augmentation_seeds: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Augment contexts; MONAI's transforms return tensors of a class of their own."""
        patches, targets = self.augment(images, labels, augmentation_seeds, self.patch_size)
        return patches.as_subclass(Tensor), targets.as_subclass(Tensor)

    def read_label(self, index: PatchIndex) -> np.ndarray:
        """Return the labels (D, H, W) of a patch before augmentation."""
        number, classes = self._choose(index)
        with self.in_flight(number):
            _, start = self._draw(index, self.volumes[number], classes)
            return crop_padded(self.volumes[number].label, start, self.patch_size)

    def _choose(self, index: PatchIndex) -> tuple[int, list[int]]:
        """Return the number of a patch's volume, and the classes of which one is at its center."""
        _, sample_index, foreground = index
        if foreground and self.classes:
            turn, number = divmod(foreground, len(self.classes))
            c, volumes = self.classes[number]
            return volumes[turn % len(volumes)], [c]
        n = sample_index % len(self.volumes)
        return n, sorted(self.volumes[n].classes) if foreground else []

    def _draw(
        self, index: PatchIndex, volume: CachedVolume, classes: Sequence[int]
    ) -> tuple[int, list[int]]:
        """Draw the augmentation's seed, and the patch's start, negative in a smaller volume."""
        epoch, sample_index, _ = index
        rng = np.random.default_rng((self.seed, epoch, sample_index))
        augmentation_seed = int(rng.integers(2**63))
        slack = [n - p for n, p in zip(volume.shape, self.patch_size, strict=True)]
        if not classes and not volume.has_ignored:
            start = [int(rng.integers(s + 1)) if s > 0 else s // 2 for s in slack]
            return augmentation_seed, start
        # The class is drawn first, so that small classes are not rare. A patch around any labeled
        # voxel is not ignored as a whole.
        points, c = volume.foreground_points, 0
        if classes:
            c = classes[int(rng.integers(len(classes)))]
        rows = np.searchsorted(points[:, 0], np.array([c, c + 1], points.dtype))
        center = points[rng.integers(*rows), 1:].tolist()
        first = [x - p // 2 for x, p in zip(center, self.patch_size, strict=True)]
        pairs = zip(first, slack, strict=True)
        start = [min(max(f, 0), s) if s > 0 else s // 2 for f, s in pairs]
        return augmentation_seed, start


def crop_padded(array: np.ndarray, start: Sequence[int], size: Sequence[int]) -> np.ndarray:
    """Crop the last three axes; voxels outside the array are 0."""
    patch = np.zeros((*array.shape[:-3], *size), array.dtype)
    sides = list(zip(array.shape[-3:], start, size, strict=True))
    source = [slice(max(s, 0), min(s + p, n)) for n, s, p in sides]
    target = [slice(max(-s, 0), min(p, n - s)) for n, s, p in sides]
    patch[(..., *target)] = array[(..., *source)]
    return patch


def mark_background(label: np.ndarray, volume: CachedVolume) -> np.ndarray:
    """Replace 0 by the volume's label of the background, in place."""
    if volume.background_label:
        label[label == 0] = volume.background_label
    return label


class ValidationVolumes(Dataset[Sample]):
    """Whole volumes, distributed over the ranks.

    All ranks have the same length: if volumes run out, an empty sample without a name fills in.
    """

    def __init__(self, volumes: Sequence[CachedVolume], *, rank: int = 0, world_size: int = 1):
        self.volumes = list(volumes)[rank::world_size]
        self.length = -(-len(volumes) // world_size)
        self.in_flight = WorkerCaseTracker(self.volumes)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if index == len(self.volumes):
            empty = torch.empty(0)
            return Sample(image=empty, label=empty.to(torch.uint8), case="")
        volume = self.volumes[index]
        with self.in_flight(index):
            return Sample(
                image=torch.from_numpy(np.array(volume.image)),
                label=torch.from_numpy(mark_background(np.array(volume.label), volume)),
                case=volume.name,
            )


def compute_class_fractions(
    patches: TrainingPatches, *, num_classes: int, samples: int, foreground_fraction: float
) -> np.ndarray:
    """Return the fraction of each class (K,) among the labeled voxels of the first patches.

    These are patches of the first epoch before augmentation; batch size and number of ranks do not
    matter. NaN if no voxel is labeled.
    """
    num_patches = max(MIN_PATCHES, TARGET_VOXELS // prod(patches.patch_size))
    sampler = EpochSampler(
        min(samples, num_patches),
        batch_size=1,
        foreground_fraction=foreground_fraction,
        seed=patches.seed,
    )
    counts = np.zeros(num_classes, np.int64)  # labels to skip are higher
    for index in sampler:
        found = np.bincount(patches.read_label(index).ravel(), minlength=num_classes)
        counts += found[:num_classes]
    with np.errstate(invalid="ignore"):
        return counts / counts.sum()
