import numpy as np
import pytest
import SimpleITK

from tests.data.helpers.formats import turn, write_itk
from unet3d.data.formats.volumes import list_files, open_header, read_volume
from unet3d.data.preprocessing.cache import estimate_preprocessing_cost
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError

OBLIQUE = turn(0.7, 0.8, 2.5)


@pytest.fixture
def voxels():
    return np.random.default_rng(0).integers(0, 99, (9, 8, 7)).astype(np.int16)


@pytest.mark.parametrize("suffix", [".nrrd", ".mha"])
def test_vectors_and_a_fourth_axis_are_channels(tmp_path, suffix):
    voxels = np.random.default_rng(0).random((3, 7, 8, 9)).astype(np.float32)  # (C, Z, Y, X)
    vectors = SimpleITK.GetImageFromArray(np.moveaxis(voxels, 0, -1), isVector=True)
    volumes = SimpleITK.GetImageFromArray(voxels, isVector=False)
    for image in (vectors, volumes):
        SimpleITK.WriteImage(image, str(tmp_path / f"a{suffix}"))
        header = open_header(tmp_path / f"a{suffix}")
        channels, _ = read_volume(tmp_path / f"a{suffix}")
        np.testing.assert_array_equal(channels, voxels.transpose(0, 3, 2, 1))
        assert header.shape == (9, 8, 7, 3)


@pytest.mark.parametrize(
    ("suffix", "line", "other"),
    [(".nrrd", "encoding:", "Data File: a.raw\nencoding:"), (".mha", "= LOCAL", ": a.raw")],
)
def test_the_file_of_the_voxels_is_found_as_the_library_finds_it(
    tmp_path, voxels, suffix, line, other
):
    file = write_itk(tmp_path / f"a{suffix}", voxels, OBLIQUE)
    content = file.read_bytes()[: -voxels.nbytes]
    (tmp_path / "a.raw").write_bytes(voxels.tobytes(order="F"))
    file.write_bytes(content.replace(f"{line}".encode(), other.encode()))
    assert list_files(file) == [file, tmp_path / "a.raw"]
    np.testing.assert_array_equal(read_volume(file)[0][0], voxels)


def test_a_header_without_its_voxels_is_refused(tmp_path, voxels):
    file = write_itk(tmp_path / "a.mhd", voxels, OBLIQUE)
    assert list_files(file) == [file, tmp_path / "a.raw"]
    (tmp_path / "a.raw").unlink()
    with pytest.raises(UsageError, match=r"a\.mhd .*names a\.raw for its voxels, which is missing"):
        open_header(file)


def test_an_image_is_refused(tmp_path):
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(np.zeros((8, 8))), str(tmp_path / "a.mha"))
    with pytest.raises(UsageError, match=r"a\.mha must be a 3D volume, but has shape \[8, 8\]"):
        open_header(tmp_path / "a.mha")


def test_the_image_of_simpleitk_counts_as_memory(tmp_path):
    voxels = np.zeros((16, 60, 60, 60))
    file = tmp_path / "a.mha"
    image = SimpleITK.GetImageFromArray(np.moveaxis(voxels, 0, -1), isVector=True)
    SimpleITK.WriteImage(image, str(file), True)
    cost = estimate_preprocessing_cost([file], Preprocessing(num_classes=2))
    assert cost.ram >= 2 * voxels.nbytes
