"""Small cases on disk, and what preprocessing makes of them."""

import numpy as np

from tests.contract.helpers.datasets import save
from unet3d.data.case import Case
from unet3d.data.preprocessing.cache import preprocess_all
from unet3d.data.preprocessing.pipeline import Preprocessing


def write_case(folder, image, label=None, affine=None, name="case"):
    """Write an image (channels last) and its label, zeros if none is given."""
    label = np.zeros(image.shape[:3], np.uint8) if label is None else label
    affine = np.eye(4) if affine is None else affine
    image_file = save(folder / f"{name}_image.nii.gz", image, affine)
    label_file = save(folder / f"{name}_label.nii.gz", label, affine)
    return Case(name=name, images=(image_file,), label=label_file)


def noise(*size, mean=5.0):
    return np.random.default_rng(0).normal(mean, 2, size).astype(np.float32)


def zero_padded_noise():
    """Noise in a box of 6 x 6 x 8 voxels within zeros."""
    image = np.zeros((12, 12, 12), np.float32)
    image[2:8, 3:9, 4:12] = noise(6, 6, 8)
    return image


def preprocess(case, tmp_path, cache_format="npy", **settings):
    """Preprocess one case with two classes, unless the settings say otherwise."""
    settings = Preprocessing(**{"num_classes": 2, **settings})
    return preprocess_all([case], settings, tmp_path / "cache", cache_format)[0]
