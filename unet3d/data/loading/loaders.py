"""Samples -> batches on the device, and how long each batch was waited for."""

import signal
from collections.abc import Iterator, Sequence
from math import prod
from time import perf_counter
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info

from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading.datasets import (
    EpochSampler,
    PatchSample,
    TrainingPatches,
    ValidationVolumes,
)
from unet3d.data.loading.worker_errors import oom_kills
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.errors import UsageError
from unet3d.types import Triple


class Batch(TypedDict):
    """What a training step receives."""

    image: Tensor  # (B, C, D, H, W), float32; with keys: the sources of all samples end to end
    label: Tensor  # (B, D, H, W), uint8; likewise
    case: list[str]
    seconds: dict[str, float]  # that each part of making it took, in whatever process
    keys: NotRequired[list[int]]  # of samples that are still to be augmented
    sizes: NotRequired[list[Triple]]  # of their sources
    wait: NotRequired["WaitTimer"]


class WaitTimer:
    """From when a batch was wanted to when it was there, by the clock of the device that works.

    A host that waits is no loss while the GPU still has work. Events in the GPU's own queue tell
    how long it had none: it passes the first when the work before is done, and the second when the
    batch is there as well.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.wanted = self.there = self._now()

    def stop(self) -> None:
        """The batch is there."""
        self.there = self._now()

    def seconds(self) -> float:
        """To be asked when the batch has been worked on: then a GPU stops nobody for it."""
        if self.device.type != "cuda":
            return self.there - self.wanted
        self.there.synchronize()
        return self.wanted.elapsed_time(self.there) / 1000

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class TrainLoader(DataLoader[PatchSample]):
    """The loader of training. On a GPU a batch can be fetched ahead, beside the work on another.

    Workers begin when the first batch is wanted, not when an iterator is made: Lightning makes one
    before it has told the order which epoch it is.
    """

    def __init__(
        self,
        patches: TrainingPatches,
        order: EpochSampler,
        *,
        batch_size: int,
        num_workers: int,
        device: torch.device,
    ):
        super().__init__(
            patches,
            batch_size,
            sampler=order,
            collate_fn=collate,
            num_workers=num_workers,
            pin_memory=device.type == "cuda",
            persistent_workers=num_workers > 0,
            worker_init_fn=ignore_signals,
        )
        self.patches, self.order, self.device = patches, order, device
        self.oom_kills = oom_kills()  # before any worker lived
        self.stream: torch.cuda.Stream | None = None
        self.source: Iterator[Batch] = iter(())
        self.ahead: Batch | None = None

    def skip(self, batches: int) -> None:
        """Leave out the first so many of the epoch that begins: a run goes on within it."""
        self.order.skip(batches)

    def __iter__(self) -> Iterator[Batch]:
        self.source, self.ahead = super().__iter__(), None
        while True:
            if self.ahead is None:
                self.fetch()
            batch, self.ahead = self.ahead, None
            if batch is None:
                return
            yield batch

    def fetch(self) -> None:
        """Get the next batch onto the device, and do there what is left of its augmentation."""
        wait = WaitTimer(self.device)
        batch = next(self.source, None)
        if batch is not None:
            if self.device.type == "cuda":
                self._move(batch)
            wait.stop()
            if "keys" in batch:
                self._augment(batch)
            batch["wait"] = wait
        self.ahead = batch

    def _move(self, batch: Batch) -> None:
        """Copy from pinned memory on a stream of its own, beside what the GPU is doing."""
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        here = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            image = batch["image"].to(self.device, non_blocking=True)
            label = batch["label"].to(self.device, non_blocking=True)
        here.wait_stream(self.stream)
        for tensor in (image, label):
            tensor.record_stream(here)  # else the next copy could be given memory still in use here
        batch["image"], batch["label"] = image, label

    def _augment(self, batch: Batch) -> None:
        sizes, keys = batch.pop("sizes"), batch.pop("keys")
        voxels = [prod(size) for size in sizes]
        channels = batch["image"].numel() // sum(voxels)
        images = batch["image"].split([channels * n for n in voxels])
        labels = batch["label"].split(voxels)
        batch["image"], batch["label"] = self.patches.augment(
            [part.view(channels, *size) for part, size in zip(images, sizes, strict=True)],
            [part.view(size) for part, size in zip(labels, sizes, strict=True)],
            keys,
            self.patches.patch_size,
        )


def ignore_signals(worker: int) -> None:
    """Signals are for the process that trains, which ends its workers itself."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def collate(samples: Sequence[PatchSample]) -> Batch:
    """One batch; sources of several sizes are laid end to end, so that none has to be padded."""
    begun = perf_counter()
    batch: Any = {"case": [sample["case"] for sample in samples]}
    for part in ("image", "label"):
        tensors = [sample[part] for sample in samples]
        if "key" in samples[0]:
            batch[part] = torch.cat([tensor.flatten() for tensor in tensors])
            if get_worker_info() is not None:  # here a full /dev/shm is an error; later, a hang
                batch[part].share_memory_()
        else:
            batch[part] = default_collate(tensors)
    if "key" in samples[0]:
        batch["keys"] = [sample["key"] for sample in samples]
        batch["sizes"] = [tuple(sample["label"].shape) for sample in samples]
    parts = samples[0]["seconds"]
    batch["seconds"] = {part: sum(s["seconds"][part] for s in samples) for part in parts}
    batch["seconds"]["collating"] = perf_counter() - begun
    return batch


def build_loaders(
    training: Sequence[CachedVolume],
    validation: Sequence[CachedVolume],
    *,
    patch_size: Sequence[int],
    batch_size: int,
    patches_per_case: int,
    foreground_fraction: float,
    augment: Augment,
    num_workers: int,
    device: torch.device,
    seed: int,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[TrainLoader, DataLoader | None]:
    """The loaders of training and (None if there are no cases for it) validation."""
    if batch_size < 1 or patches_per_case < 1 or num_workers < 0:
        raise UsageError(
            "data needs batch_size >= 1, patches_per_case >= 1 and num_workers >= 0, "
            f"got {batch_size}, {patches_per_case} and {num_workers}"
        )
    cuda = device.type == "cuda"
    train = TrainLoader(
        TrainingPatches(training, patch_size=patch_size, augment=augment, seed=seed, later=cuda),
        EpochSampler(
            len(training) * patches_per_case,
            batch_size=batch_size,
            foreground_fraction=foreground_fraction,
            seed=seed,
            rank=rank,
            ranks=ranks,
        ),
        batch_size=batch_size,
        num_workers=num_workers,
        device=device,
    )
    if not validation:
        return train, None
    whole = DataLoader(
        ValidationVolumes(validation, rank=rank, ranks=ranks),
        batch_size=1,
        num_workers=min(num_workers, 1),
        pin_memory=cuda,
        persistent_workers=num_workers > 0,
        worker_init_fn=ignore_signals,
    )
    return train, whole
