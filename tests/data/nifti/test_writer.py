import nibabel
import numpy as np
import pytest

from unet3d.atomic_write import atomic_write
from unet3d.data.nifti.writer import open_probability_file, write_labels

OBLIQUE = np.array([[0.9, 0.2, 0, 5], [-0.2, 0.9, 0.1, -7], [0, -0.1, 1.5, 3], [0, 0, 0, 1.0]])


@pytest.fixture
def image(tmp_path):
    """An image whose header has something to lose, and something that must not be kept."""
    voxels = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    image = nibabel.Nifti1Image(voxels, OBLIQUE)
    image.set_qform(np.diag([-1.0, 2, 3, 1]), code=1)
    image.set_sform(OBLIQUE, code=4)
    image.header.set_xyzt_units("mm", "sec")
    image.header.set_slope_inter(0.5, -3)
    image.header["cal_max"] = 99
    image.header["descrip"] = b"a scanner"
    nibabel.save(image, tmp_path / "image.nii.gz")
    return tmp_path / "image.nii.gz"


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_labels_have_the_affines_codes_and_units_of_their_image(image, tmp_path, ending):
    labels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    write_labels(tmp_path / f"out{ending}", labels, image)
    found, like = nibabel.load(tmp_path / f"out{ending}"), nibabel.load(image)
    assert found.get_data_dtype() == np.uint8
    np.testing.assert_array_equal(np.asarray(found.dataobj), labels)
    for form in ("get_sform", "get_qform"):
        (mine, code), (theirs, theirs_code) = (getattr(x, form)(coded=True) for x in (found, like))
        np.testing.assert_array_equal(mine, theirs)
        assert code == theirs_code
    assert found.header.get_xyzt_units() == ("mm", "sec")
    assert found.header["descrip"] == like.header["descrip"]
    assert found.header["cal_max"] == 0
    assert found.dataobj.slope == 1


def test_a_label_of_a_file_with_channels_has_none(tmp_path):
    nibabel.save(nibabel.Nifti2Image(np.zeros((2, 3, 4, 2)), OBLIQUE), tmp_path / "image.nii")
    write_labels(tmp_path / "out.nii", np.ones((2, 3, 4), np.uint8), tmp_path / "image.nii")
    found = nibabel.load(tmp_path / "out.nii")
    assert found.shape == (2, 3, 4)
    assert isinstance(found, nibabel.Nifti2Image)


def test_probabilities_are_written_through_the_file(image, tmp_path):
    values = np.random.default_rng(0).random((5, 2, 3, 4), np.float32)
    with open_probability_file(tmp_path / "p.nii", 5, image) as array:
        assert array.base is not None
        array[:] = values
        assert not (tmp_path / "p.nii").exists()
    found = nibabel.load(tmp_path / "p.nii")
    np.testing.assert_array_equal(np.moveaxis(found.get_fdata(), -1, 0), values)
    np.testing.assert_array_equal(found.affine, nibabel.load(image).affine)


def test_a_file_that_was_not_finished_is_gone_and_the_old_one_stays(tmp_path):
    (tmp_path / "a.txt").write_text("old")

    def interrupted():
        with atomic_write(tmp_path / "a.txt") as draft:
            draft.write_text("half of it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"
