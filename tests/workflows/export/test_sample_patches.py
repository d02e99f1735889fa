"""Which patches an exported network is compared on."""

import nibabel
import numpy as np
import pytest

from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.workflows.export.sample_patches import COUNT, load_sample_patches, most_varied_patches


@pytest.fixture
def volumes(tmp_path):
    """Files that are empty but for a corner, whose values tell the file."""

    def made(count: int) -> list[tuple]:
        files = []
        for number in range(count):
            voxels = np.zeros((24, 24, 24), np.float32)
            voxels[:10, :10, :10] = np.random.default_rng(0).normal(100 * number, 1, (10, 10, 10))
            files.append((tmp_path / f"{number}.nii",))
            nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), files[-1][0])
        return files

    return made


AS_IT_IS = Preprocessing(num_classes=2, normalize=("none",), crop="none")


@pytest.mark.parametrize(("files", "taken"), [(1, [0, 0, 0]), (2, [0, 0, 1]), (5, [0, 1, 2])])
def test_there_are_as_many_patches_whatever_the_number_of_scans(volumes, files, taken):
    found = most_varied_patches(volumes(files), AS_IT_IS, (12, 12, 12), 1)
    assert [round(float(image.max()) / 100) for image in found] == taken
    assert all(image.shape == (1, 12, 12, 12) for image in found)


def test_patches_lie_where_there_is_something(volumes):
    found = most_varied_patches(volumes(3), AS_IT_IS, (8, 8, 8), 1)
    assert all(float(image.std()) > 0 for image in found)


def test_a_volume_smaller_than_the_patch_is_padded(volumes):
    found = most_varied_patches(volumes(1), AS_IT_IS, (40, 12, 24), 1)
    assert all(image.shape == (1, 40, 12, 24) for image in found)
    assert not found[0][:, :8].any()


def test_batches_are_of_different_sizes(volumes):
    card = {"preparation": AS_IT_IS.to_dict(), "channels": ["MR"]}
    file = volumes(1)[0][0]
    patches = load_sample_patches(str(file), card, (8, 8, 8), [])
    assert [len(batch) for batch in patches.batches()] == [1, COUNT - 1]
    assert patches.told == f"3 patches of {file}"
