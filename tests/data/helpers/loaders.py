"""Training loaders of small volumes."""

import torch

from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading.datasets import EpochSampler, TrainingPatches
from unet3d.data.loading.loaders import TrainLoader

AUGMENT = Augment(rotation_p=0.7, scale_p=0.5, flip_p=0.5, brightness_p=0.5, noise_p=0.5)
CPU = torch.device("cpu")


def make_loader(volumes, *, num_workers=0, defer=False, augment=AUGMENT, device=CPU):
    patches = TrainingPatches(
        volumes, patch_size=[6, 7, 8], augment=augment, seed=0, defer_augmentation=defer
    )
    sampler = EpochSampler(5, batch_size=2, foreground_fraction=0.5, seed=0)
    return TrainLoader(patches, sampler, batch_size=2, num_workers=num_workers, device=device)


def load_epochs(loader, *epochs):
    batches = []
    for epoch in epochs:
        loader.load_state_dict({"epoch": epoch, "batch": 0})
        batches += list(loader)
    return batches
