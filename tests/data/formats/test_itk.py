import numpy as np
import pytest
import SimpleITK

from tests.data.helpers.formats import turn, write_itk
from unet3d.data.formats.volumes import list_files, read_header, read_volume
from unet3d.data.preprocessing.cache import estimate_preprocessing_cost
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError

OBLIQUE = turn(0.7, 0.8, 2.5)


def test_vectors_and_a_fourth_axis_are_channels_and_simpleitks_image_counts_as_memory(tmp_path):
    voxels, file = np.random.default_rng(0).random((3, 7, 8, 9)), tmp_path / "a.nrrd"
    vectors = SimpleITK.GetImageFromArray(np.moveaxis(voxels, 0, -1), isVector=True)
    for image in (vectors, SimpleITK.GetImageFromArray(voxels, isVector=False)):
        SimpleITK.WriteImage(image, str(file))
        np.testing.assert_array_equal(read_volume(file)[0], voxels.transpose(0, 3, 2, 1))
        assert read_header(file).shape == (9, 8, 7, 3)
    cost = estimate_preprocessing_cost([file], Preprocessing(num_classes=2))
    assert cost.ram >= 2 * voxels.nbytes


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
    (tmp_path / "a.raw").unlink()
    with pytest.raises(UsageError, match=r"a\.raw"):
        read_header(file)
