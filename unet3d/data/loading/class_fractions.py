"""Measure how often each class occurs in training patches."""

from math import prod

import numpy as np

from unet3d.data.loading.datasets import TrainingPatches
from unet3d.data.loading.sampler import EpochSampler
from unet3d.types import IGNORE_LABEL

TARGET_VOXELS = 2**26
"""Voxels to count, which takes a fifth of a second."""

MIN_PATCHES = 32


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
    counts = np.zeros(256, np.int64)
    for index in sampler:
        counts += np.bincount(patches.read_label(index).ravel(), minlength=256)
    counts[IGNORE_LABEL] = 0
    with np.errstate(invalid="ignore"):
        return counts[:num_classes] / counts[:num_classes].sum()
