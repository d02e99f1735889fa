"""Load batches onto the device and measure the time spent waiting for them."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from time import perf_counter
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info

from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.config import DataConfig
from unet3d.data.loading.datasets import (
    EpochSampler,
    PatchSample,
    TrainingPatches,
    ValidationVolumes,
)
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.signals import STOP_SIGNALS
from unet3d.types import Triple


class Batch(TypedDict):
    """The input of a training step."""

    image: Tensor  # (B, C, D, H, W), float32; with seeds: the flat contexts of all samples
    label: Tensor  # (B, D, H, W), uint8; likewise
    case: list[str]
    augmentation_seeds: NotRequired[list[int]]  # of samples whose augmentation is deferred
    sizes: NotRequired[list[Triple]]  # (D, H, W) of their contexts
    wait: NotRequired["WaitTimer"]


class WaitTimer:
    """Measure how long the device waits for a batch.

    While the GPU is busy, a waiting host costs nothing. CUDA events measure how long the GPU is
    idle: the first fires when the previous work is done, the second when the batch has also
    arrived.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.started = self.stopped = self._now()

    def stop(self) -> None:
        self.stopped = self._now()

    def get_seconds(self) -> float:
        """Return the waiting time; call it after the step, when the GPU has passed both events."""
        if self.device.type != "cuda":
            return self.stopped - self.started
        self.stopped.synchronize()
        return self.started.elapsed_time(self.stopped) / 1000

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class TrainLoader(DataLoader[PatchSample]):
    """Load training batches; on a GPU, `prefetch` copies the next batch during the current step.

    The state is the position in the run: the epoch, and the batches of it that were handed out,
    not those that workers have fetched ahead.
    """

    def __init__(
        self,
        volumes: Sequence[CachedVolume],
        data: DataConfig,
        *,
        augment: Augment,
        device: torch.device,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ):
        is_cuda = device.type == "cuda"
        self.patches = TrainingPatches(
            volumes,
            patch_size=data.patch_size,
            augment=augment,
            seed=seed,
            balance_classes=data.balance_classes,
            defer_augmentation=is_cuda,
        )
        self.epoch_sampler = EpochSampler(
            len(volumes) * data.patches_per_case,
            batch_size=data.batch_size,
            foreground_fraction=data.foreground_fraction,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        super().__init__(
            self.patches,
            data.batch_size,
            sampler=self.epoch_sampler,
            collate_fn=collate,
            num_workers=data.num_workers,
            pin_memory=is_cuda,
            persistent_workers=data.num_workers > 0,
            worker_init_fn=prepare_worker,
        )
        self.device = device
        self.epoch = self.batch = 0
        self.stream: torch.cuda.Stream | None = None
        self._batches: Iterator[Batch] = iter(())
        self._next: Batch | None = None

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration begin at a position."""
        self.epoch, self.batch = state["epoch"], state["batch"]

    def __iter__(self) -> Iterator[Batch]:
        """Load what is left of the epoch, or the next one if nothing is."""
        if self.batch == len(self):
            self.epoch, self.batch = self.epoch + 1, 0
        self.epoch_sampler.epoch, self.epoch_sampler.first_batch = self.epoch, self.batch
        self._batches, self._next = super().__iter__(), None
        while True:
            if self._next is None:
                self.prefetch()
            batch, self._next = self._next, None
            if batch is None:
                return
            self.batch += 1
            yield batch

    def prefetch(self) -> None:
        """Get the next batch onto the device and apply its deferred augmentation."""
        wait = WaitTimer(self.device)
        batch = next(self._batches, None)
        if batch is not None:
            if self.device.type == "cuda":
                self._copy_to_device(batch)
            wait.stop()
            if "augmentation_seeds" in batch:
                self._augment(batch)
            batch["wait"] = wait
        self._next = batch

    def _copy_to_device(self, batch: Batch) -> None:
        """Copy from pinned memory on a separate stream, in parallel with the GPU's work."""
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            image = batch["image"].to(self.device, non_blocking=True)
            label = batch["label"].to(self.device, non_blocking=True)
        current.wait_stream(self.stream)
        for tensor in (image, label):
            tensor.record_stream(current)  # else the next copy could reuse memory still in use
        batch["image"], batch["label"] = image, label

    def _augment(self, batch: Batch) -> None:
        sizes, augmentation_seeds = batch.pop("sizes"), batch.pop("augmentation_seeds")
        voxels = [prod(size) for size in sizes]
        channels = batch["image"].numel() // sum(voxels)
        images = batch["image"].split([channels * n for n in voxels])
        labels = batch["label"].split(voxels)
        batch["image"], batch["label"] = self.patches.make_patches(
            [part.view(channels, *size) for part, size in zip(images, sizes, strict=True)],
            [part.view(size) for part, size in zip(labels, sizes, strict=True)],
            augmentation_seeds,
        )


def prepare_worker(worker: int) -> None:
    """Ignore signals in a worker: the training process handles them and ends its workers."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def collate(samples: list[PatchSample]) -> Batch:
    """Collate a batch; contexts of different sizes are concatenated, so that none is padded."""
    if "augmentation_seed" not in samples[0]:
        return default_collate(samples)
    batch: Any = {
        "case": [sample["case"] for sample in samples],
        "augmentation_seeds": [sample["augmentation_seed"] for sample in samples],
        "sizes": [tuple(sample["label"].shape) for sample in samples],
    }
    for part in ("image", "label"):
        batch[part] = torch.cat([sample[part].flatten() for sample in samples])
        if get_worker_info() is not None:  # a full /dev/shm is an error here, but a hang later
            batch[part].share_memory_()
    return batch


def build_validation_loader(
    volumes: Sequence[CachedVolume],
    data: DataConfig,
    *,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> DataLoader:
    """Build the loader of whole volumes."""
    return DataLoader(
        ValidationVolumes(volumes, rank=rank, world_size=world_size),
        batch_size=1,
        num_workers=min(data.num_workers, 1),
        pin_memory=device.type == "cuda",
        persistent_workers=data.num_workers > 0,
        worker_init_fn=prepare_worker,
    )
