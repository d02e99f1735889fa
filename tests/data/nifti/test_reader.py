import gzip

import nibabel
import numpy as np
import pytest

from tests.data.helpers.faulty import header_of
from tests.data.helpers.folders import image, save
from unet3d.data.nifti.reader import read_volume
from unet3d.errors import UsageError


def test_integers_stay_integers_unless_the_header_scales_them(tmp_path):
    voxels = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    image = nibabel.Nifti1Image(voxels, np.eye(4))
    nibabel.save(image, tmp_path / "plain.nii")
    image.header.set_slope_inter(0.5, -3)
    nibabel.save(image, tmp_path / "scaled.nii.gz")
    plain, scaled = (read_volume(tmp_path / name)[0] for name in ("plain.nii", "scaled.nii.gz"))
    assert plain.dtype == np.int16
    np.testing.assert_array_equal(plain[0], voxels)
    assert scaled.dtype == np.float32
    np.testing.assert_array_equal(scaled[0], voxels * 0.5 - 3)


@pytest.mark.parametrize("place", [0.3, 0.5, 0.9, -12, -6])
def test_a_flipped_bit_of_a_compressed_file_is_noticed_though_its_voxels_can_be_read(
    tmp_path, place
):
    file = save(tmp_path / "a.nii.gz", image(0))
    content = bytearray(file.read_bytes())
    content[place if place < 0 else int(place * len(content))] ^= 1
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.nii\.gz cannot be read as a volume"):
        read_volume(file)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
def test_a_file_that_holds_more_or_fewer_bytes_than_its_header_tells_is_refused(tmp_path, name):
    whole = nibabel.Nifti1Image(image(0), np.eye(4)).to_bytes()
    for content, said in ((whole + b"x", "goes on after"), (whole[:-1], "ends after")):
        (tmp_path / name).write_bytes(gzip.compress(content) if name[-1] == "z" else content)
        with pytest.raises(UsageError, match=said):
            read_volume(tmp_path / name)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, ">i2"])
def test_scaled_values_are_those_that_nibabel_computes(tmp_path, name, dtype):
    written = nibabel.Nifti1Image((image(0) * 3).astype(dtype), np.eye(4))
    written.header.set_slope_inter(0.37, -11.3)
    nibabel.save(written, tmp_path / name)
    found, _ = read_volume(tmp_path / name)
    assert found.dtype == np.float32
    wanted = np.asarray(nibabel.load(tmp_path / name).dataobj, np.float32)
    assert np.array_equal(found[0], wanted)


def test_an_immense_shape_is_refused_before_memory_is_asked_for(tmp_path):
    file = save(tmp_path / "a.nii.gz", image(0))
    header_of(file, dim=[3, 32767, 32767, 32767, 1, 1, 1, 1])
    with pytest.raises(UsageError, match="is too short for 35,181"):
        read_volume(file)
