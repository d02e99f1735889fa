"""An exported network is compared with its checkpoint on patches that vary."""

import numpy as np
import pytest

from tests.contract.helpers.datasets import save
from unet3d.commands.export import (
    NUM_PATCHES,
    load_sample_patches,
    select_varied_patches,
)
from unet3d.data.preprocessing.pipeline import Preprocessing


@pytest.fixture
def write_volumes(tmp_path):
    """Write volumes that are empty but for a corner, whose values tell which file it is."""

    def write(number: int) -> tuple:
        voxels = np.zeros((24, 24, 24), np.float32)
        voxels[:10, :10, :10] = np.random.default_rng(0).normal(100 * number, 1, (10, 10, 10))
        return (save(tmp_path / f"{number}.nii", voxels, np.eye(4)),)

    return lambda count: [write(number) for number in range(count)]


UNCHANGED = Preprocessing(num_classes=2, normalize=("none",), crop="none")


@pytest.mark.parametrize(("num_files", "numbers"), [(1, [0, 0, 0]), (2, [0, 0, 1]), (5, [0, 1, 2])])
def test_three_patches_come_from_any_number_of_scans(write_volumes, num_files, numbers):
    images = select_varied_patches(write_volumes(num_files), UNCHANGED, (12, 12, 12), ["T1"])
    assert [round(float(image.max()) / 100) for image in images] == numbers
    assert all(image.shape == (1, 12, 12, 12) for image in images)


def test_noise_replaces_a_dataset_that_is_gone(tmp_path):
    metadata = {
        "preprocessing": UNCHANGED.to_dict(),
        "channels": ["T1", "T2"],
        "config": {"data": {"root": str(tmp_path / "gone")}},
    }
    images, source = load_sample_patches(None, metadata, (8, 8, 8), [])
    assert [tuple(image.shape) for image in images] == [(2, 8, 8, 8)] * NUM_PATCHES
    assert source.startswith("seeded noise instead of scans (the training dataset was not found")
    assert str(tmp_path / "gone") in source
