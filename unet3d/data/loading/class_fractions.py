"""How often each class occurs in the patches that a training sees."""

from math import prod

import numpy as np

from unet3d.data.loading.datasets import EpochSampler, TrainingPatches
from unet3d.types import IGNORE_LABEL

MOST_VOXELS = 2**26
"""Labels to count, which takes a fifth of a second; a few patches at least."""

LEAST_PATCHES = 32


def compute_class_fractions(
    patches: TrainingPatches, *, num_classes: int, samples: int, foreground_fraction: float
) -> np.ndarray:
    """Return the share of each class (K,) among the labeled voxels of the first patches.

    The patches are those of the first epoch before augmentation, in numbers that no batch or rank
    decides. NaN where no voxel is labeled.
    """
    number = max(LEAST_PATCHES, MOST_VOXELS // prod(patches.patch_size))
    order = EpochSampler(
        min(samples, number),
        batch_size=1,
        foreground_fraction=foreground_fraction,
        seed=patches.seed,
    )
    counts = np.zeros(256, np.int64)
    for place in order:
        counts += np.bincount(patches.label(place).ravel(), minlength=256)
    counts[IGNORE_LABEL] = 0
    with np.errstate(invalid="ignore"):
        return counts[:num_classes] / counts[:num_classes].sum()
