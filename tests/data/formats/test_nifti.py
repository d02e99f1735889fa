import tracemalloc

import nibabel
import numpy as np
import pytest

from tests.contract.helpers.datasets import save as save_volume
from tests.data.helpers.cases import noise
from unet3d.data.formats.volumes import read_header, read_volume, write_labels

OBLIQUE = np.array([[0.9, 0.2, 0.04, 5], [-0.2, 0.9, 0.18, -7], [0, -0.1, 1.7, 3], [0, 0, 0, 1.0]])


def test_labels_keep_the_header_of_their_image_but_not_its_range_and_scaling(tmp_path):
    image = nibabel.Nifti1Image(np.arange(24, dtype=np.int16).reshape(2, 3, 4), OBLIQUE)
    image.set_qform(np.diag([-1.0, 2, 3, 1]), code=1)
    image.set_sform(OBLIQUE, code=4)
    image.header.set_slope_inter(0.5, -3)
    image.header["cal_max"], image.header["descrip"] = 99, b"a scanner"
    nibabel.save(image, tmp_path / "image.nii.gz")
    labels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    write_labels(tmp_path / "out.nii.gz", labels, tmp_path / "image.nii.gz")
    written = nibabel.load(tmp_path / "out.nii.gz")
    np.testing.assert_array_equal(np.asarray(written.dataobj), labels)
    np.testing.assert_array_equal(written.get_qform(), image.get_qform())
    assert (written.header["descrip"], written.header["cal_max"]) == (b"a scanner", 0)
    assert written.dataobj.slope == 1


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("slope", [None, 0.37])
def test_values_match_nibabel_and_integers_stay_integers_without_scaling(tmp_path, name, slope):
    written = nibabel.Nifti1Image((noise(5, 6, 7, 2) * 3).astype(np.int16), np.eye(4))
    written.header.set_slope_inter(slope, None if slope is None else -11.3)
    nibabel.save(written, tmp_path / name)
    channels, _ = read_volume(tmp_path / name)
    assert channels.dtype == (np.int16 if slope is None else np.float32)
    assert read_header(tmp_path / name).reading_bytes == channels.nbytes
    expected = np.asarray(nibabel.load(tmp_path / name).dataobj, np.float32)
    np.testing.assert_array_equal(channels, np.moveaxis(expected, -1, 0))


def test_axes_of_size_1_after_the_third_do_not_count(tmp_path):
    image = nibabel.Nifti1Image(np.zeros((5, 6, 7, 1, 1), np.uint8), np.eye(4))
    for name in ("a.nii", "a.nii.gz"):
        nibabel.save(image, tmp_path / name)
        assert read_header(tmp_path / name).shape == (5, 6, 7)
        assert read_volume(tmp_path / name)[0].shape == (1, 5, 6, 7)


def test_a_compressed_volume_is_held_once_while_it_is_read(tmp_path):
    voxels = np.zeros((64, 64, 64), np.float32)
    file = save_volume(tmp_path / "a.nii.gz", voxels)
    read_volume(file)  # imports
    tracemalloc.start()
    read_volume(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.3 * voxels.nbytes


@pytest.mark.parametrize(("unit", "factor"), [("meter", 1e3), ("mm", 1), ("micron", 1e-3)])
def test_the_unit_of_a_header_is_converted_to_mm_and_kept_in_labels(tmp_path, unit, factor):
    image = nibabel.Nifti1Image(np.zeros((5, 6, 7), np.uint8), OBLIQUE)
    image.header.set_xyzt_units(unit)
    nibabel.save(image, tmp_path / "a.nii")
    expected = np.diag([factor, factor, factor, 1]) @ OBLIQUE
    np.testing.assert_allclose(read_volume(tmp_path / "a.nii")[1], expected, rtol=1e-6)
    write_labels(tmp_path / "b.nii", np.zeros((5, 6, 7), np.uint8), tmp_path / "a.nii")
    np.testing.assert_array_equal(*(read_header(tmp_path / f"{n}.nii").affine for n in "ab"))
