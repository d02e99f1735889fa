"""Prepared volumes -> samples: random patches to train on, whole volumes to validate on.

A patch depends on (seed, epoch, number) alone, so the same patch comes back whatever worker makes
it and wherever a run was resumed.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from unet3d.data.augmentation import augmentation
from unet3d.data.prepared import Volume
from unet3d.types import Misuse, Sample


class TrainingPatches(Dataset[Sample]):
    """Patches of `patch_size`; a share of them is centred on a foreground voxel."""

    def __init__(
        self,
        volumes: Sequence[Volume],
        *,
        patch_size: Sequence[int],
        foreground_share: float,
        augment: str,
        seed: int,
    ):
        if len(patch_size) != 3 or min(patch_size) < 1:
            raise Misuse(f"data.patch_size must be three ints >= 1, got {list(patch_size)}")
        if not 0 <= foreground_share <= 1:
            raise Misuse(f"data.foreground_share must be within 0..1, got {foreground_share}")
        self.volumes = list(volumes)
        self.patch_size = tuple(patch_size)
        self.foreground_share = foreground_share
        self.augment = augmentation(augment)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.volumes)

    def __getitem__(self, index: tuple[int, int]) -> Sample:
        """The patch of (epoch, number)."""
        epoch, number = index
        volume = self.volumes[number % len(self.volumes)]
        rng = np.random.default_rng((self.seed, epoch, number))
        start = self._start(volume, rng)
        image = cut(volume.image, start, self.patch_size)
        label = cut(volume.label, start, self.patch_size)
        sample = {"image": torch.from_numpy(image), "label": torch.from_numpy(label)[None]}
        if self.augment is not None:
            self.augment.set_random_state(int(rng.integers(2**32)))
            sample = self.augment(sample)
        # MONAI's subclass of Tensor would follow the batch into the network and slow it down.
        image, label = (sample[k].as_subclass(torch.Tensor) for k in ("image", "label"))
        return Sample(image=image.contiguous(), label=label[0].contiguous(), case=volume.name)

    def _start(self, volume: Volume, rng: np.random.Generator) -> list[int]:
        """Where the patch begins; below 0 where the volume is smaller than the patch."""
        space = volume.label.shape
        room = [n - p for n, p in zip(space, self.patch_size, strict=True)]
        places = volume.places
        if rng.random() < self.foreground_share and len(places):
            classes = np.unique(places[:, 0])
            of_class = places[places[:, 0] == rng.choice(classes)]
            centre = of_class[rng.integers(len(of_class))][1:]
            wanted = [int(c) - p // 2 for c, p in zip(centre, self.patch_size, strict=True)]
            return [
                min(max(w, 0), r) if r > 0 else r // 2 for w, r in zip(wanted, room, strict=True)
            ]
        return [int(rng.integers(r + 1)) if r > 0 else r // 2 for r in room]


def cut(array: np.ndarray, start: Sequence[int], size: Sequence[int]) -> np.ndarray:
    """A patch of the last three axes; what lies outside the array is 0."""
    patch = np.zeros((*array.shape[:-3], *size), array.dtype)
    source, target = [], []
    for n, s, p in zip(array.shape[-3:], start, size, strict=True):
        source.append(slice(max(s, 0), min(s + p, n)))
        target.append(slice(max(-s, 0), max(-s, 0) + min(s + p, n) - max(s, 0)))
    patch[(..., *target)] = array[(..., *source)]
    return patch


class WholeVolumes(Dataset[Sample]):
    """Every volume as it is."""

    def __init__(self, volumes: Sequence[Volume]):
        self.volumes = list(volumes)

    def __len__(self) -> int:
        return len(self.volumes)

    def __getitem__(self, index: int) -> Sample:
        volume = self.volumes[index]
        return Sample(
            image=torch.from_numpy(np.array(volume.image)),
            label=torch.from_numpy(np.array(volume.label)),
            case=volume.name,
        )


class EpochOrder(Sampler[tuple[int, int]]):
    """(epoch, index) in an order that depends on (seed, epoch) alone; whole batches only.

    Lightning calls `set_epoch` before each epoch.
    """

    def __init__(self, samples: int, *, batch_size: int, seed: int):
        self.samples, self.seed, self.epoch = samples, seed, 0
        self.length = -(-samples // batch_size) * batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.samples)
        # Samples that fill up the last batch get an index, and so a patch, of their own.
        extra = np.arange(self.samples, self.length)
        for index in [*order.tolist(), *extra.tolist()]:
            yield self.epoch, index


def loaders(
    training: Sequence[Volume],
    validation: Sequence[Volume],
    *,
    patch_size: Sequence[int],
    batch_size: int,
    patches_per_case: int,
    foreground_share: float,
    augment: str,
    num_workers: int,
    pin_memory: bool,
    seed: int,
) -> tuple[DataLoader, DataLoader | None]:
    """The loaders of training and (None if there are no cases for it) validation."""
    if batch_size < 1 or patches_per_case < 1 or num_workers < 0:
        raise Misuse(
            "data needs batch_size >= 1, patches_per_case >= 1 and num_workers >= 0, "
            f"got {batch_size}, {patches_per_case} and {num_workers}"
        )
    patches = TrainingPatches(
        training,
        patch_size=patch_size,
        foreground_share=foreground_share,
        augment=augment,
        seed=seed,
    )
    order = EpochOrder(len(training) * patches_per_case, batch_size=batch_size, seed=seed)
    train = DataLoader(
        patches,
        batch_size,
        sampler=order,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
    )
    if not validation:
        return train, None
    whole = DataLoader(
        WholeVolumes(validation),
        batch_size=1,
        num_workers=min(num_workers, 1),
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
    )
    return train, whole
