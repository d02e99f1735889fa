"""Training loaders of small volumes."""

from types import SimpleNamespace

import torch

from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading.loaders import TrainLoader

AUGMENT = Augment(rotation_p=0.7, scale_p=0.5, flip_p=0.5, brightness_p=0.5, noise_p=0.5)
CPU = torch.device("cpu")


def make_data(**changes):
    """Return the settings of the group `data` that loaders read."""
    settings = {"patch_size": [6, 7, 8], "batch_size": 2, "patches_per_case": 2}
    settings |= {"foreground_fraction": 0.5, "balance_classes": False, "num_workers": 0}
    return SimpleNamespace(**settings | changes)


def make_loader(volumes, *, num_workers=0, defer=False, augment=AUGMENT, device=CPU):
    data = make_data(num_workers=num_workers)
    loader = TrainLoader(volumes, data, augment=augment, device=device, seed=0)
    loader.patches.defer_augmentation |= defer
    return loader


def load_epochs(loader, *epochs):
    batches = []
    for epoch in epochs:
        loader.load_state_dict({"epoch": epoch, "batch": 0})
        batches += list(loader)
    return batches
