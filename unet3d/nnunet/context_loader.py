"""nnU-Net's loader, which reads no more around a patch than its rotation and scale will need.

nnU-Net reads for every patch what the largest rotation needs, four times the patch, and rotates one
patch in five. Here a sample's seed draws its rotation and scale before it is read, and again where
it is transformed.
"""

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from batchgeneratorsv2.transforms.spatial.spatial import SpatialTransform
from batchgeneratorsv2.transforms.utils.pseudo2d import Convert3DTo2DTransform
from nnunetv2.training.dataloading.data_loader import nnUNetDataLoader


@contextmanager
def use_seed(seed: int) -> Generator[None]:
    """Draw NumPy's random numbers in the body from a seed."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


def find_spatial(transforms: Any) -> SpatialTransform | None:
    """Return the transform that comes first, if it crops the center and does not deform."""
    for part in getattr(transforms, "transforms", ()):
        if isinstance(part, SpatialTransform):
            crops_center = not part.random_crop and not part.p_elastic_deform
            return part if crops_center else None
        if not isinstance(part, Convert3DTo2DTransform):
            break
    return None


def count_unread(spatial: SpatialTransform, context: Sequence[int], seed: int) -> list[int]:
    """Return how many voxels at each side of a context the transform will not read."""
    small, dim = copy.copy(spatial), len(spatial.patch_size)
    small.patch_size = (1,) * dim  # the grid is not needed
    shape = tuple(context[-dim:])
    with use_seed(seed):
        affine = small.get_parameters(image=torch.empty(1, *shape, device="meta"))["affine"]
    half = (np.array(spatial.patch_size) - 1) / 2
    reach = half if affine is None else np.abs(affine) @ half
    unread = np.floor((np.array(shape) - 1) / 2 - reach - 1)
    return [0] * (len(context) - dim) + [int(n) for n in np.maximum(unread, 0)]


class Contexts:
    """Stands for a loader's transforms: keeps its samples, which may differ in size."""

    def __init__(self, spatial: SpatialTransform | None):
        self.spatial = copy.deepcopy(spatial)  # a device changes the other
        self.images, self.labels, self.seeds = list[Any](), list[Any](), list[int]()

    def __call__(self, *, image: torch.Tensor, segmentation: torch.Tensor) -> dict[str, Any]:
        self.images.append(image)
        self.labels.append(segmentation)
        return {"image": image.new_empty(0), "segmentation": segmentation.new_empty(0)}

    def take(self) -> dict[str, Any]:
        """Return the samples that were kept, and keep them no longer."""
        batch = {"data": self.images, "target": self.labels, "seeds": self.seeds}
        self.images, self.labels, self.seeds = [], [], []
        return batch


class ContextLoader(nnUNetDataLoader):
    """nnU-Net's loader; with `Contexts` for transforms, its batches are lists of samples."""

    def get_bbox(self, *args: Any, **options: Any) -> tuple[list[int], list[int]]:
        lower, upper = super().get_bbox(*args, **options)
        contexts = self.transforms
        if isinstance(contexts, Contexts) and contexts.spatial is not None:
            seed = np.random.randint(2**31)
            contexts.seeds.append(seed)
            unread = count_unread(contexts.spatial, tuple(self.patch_size), seed)
            lower = [n + m for n, m in zip(lower, unread, strict=True)]
            upper = [n - m for n, m in zip(upper, unread, strict=True)]
        return lower, upper

    def generate_train_batch(self) -> dict[str, Any]:
        batch = super().generate_train_batch()
        return batch | (self.transforms.take() if isinstance(self.transforms, Contexts) else {})
