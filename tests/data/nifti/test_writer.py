import nibabel
import numpy as np
import pytest

from unet3d.data.nifti.writer import open_probability_file, write_labels
from unet3d.files import atomic_write

OBLIQUE = np.array([[0.9, 0.2, 0, 5], [-0.2, 0.9, 0.1, -7], [0, -0.1, 1.5, 3], [0, 0, 0, 1.0]])


@pytest.fixture
def image(tmp_path):
    """An image whose header has fields that must be copied, and others that must not be."""
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


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_labels_keep_the_affines_codes_and_units_of_their_image(image, tmp_path, suffix):
    labels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    write_labels(tmp_path / f"out{suffix}", labels, image)
    written, original = nibabel.load(tmp_path / f"out{suffix}"), nibabel.load(image)
    assert written.get_data_dtype() == np.uint8
    np.testing.assert_array_equal(np.asarray(written.dataobj), labels)
    for form in ("get_sform", "get_qform"):
        affine, code = getattr(written, form)(coded=True)
        expected_affine, expected_code = getattr(original, form)(coded=True)
        np.testing.assert_array_equal(affine, expected_affine)
        assert code == expected_code
    assert written.header.get_xyzt_units() == ("mm", "sec")
    assert written.header["descrip"] == original.header["descrip"]
    assert written.header["cal_max"] == 0
    assert written.dataobj.slope == 1


def test_the_label_of_a_4d_image_is_3d(tmp_path):
    nibabel.save(nibabel.Nifti2Image(np.zeros((2, 3, 4, 2)), OBLIQUE), tmp_path / "image.nii")
    write_labels(tmp_path / "out.nii", np.ones((2, 3, 4), np.uint8), tmp_path / "image.nii")
    written = nibabel.load(tmp_path / "out.nii")
    assert written.shape == (2, 3, 4)
    assert isinstance(written, nibabel.Nifti2Image)


def test_probabilities_are_written_through_a_memory_map(image, tmp_path):
    values = np.random.default_rng(0).random((5, 2, 3, 4), np.float32)
    with open_probability_file(tmp_path / "p.nii", 5, image) as array:
        assert array.base is not None
        array[:] = values
        assert not (tmp_path / "p.nii").exists()
    written = nibabel.load(tmp_path / "p.nii")
    np.testing.assert_array_equal(np.moveaxis(written.get_fdata(), -1, 0), values)
    np.testing.assert_array_equal(written.affine, nibabel.load(image).affine)


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    (tmp_path / "a.txt").write_text("old")

    def interrupt():
        with atomic_write(tmp_path / "a.txt") as draft:
            draft.write_text("half of it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_write_to_a_full_disk_names_the_file(tmp_path):
    def write():
        with atomic_write(tmp_path / "a.txt") as draft:
            draft.symlink_to("/dev/full")
            draft.write_text("a")

    with pytest.raises(OSError, match="No space left") as error:
        write()
    assert error.value.filename == str(tmp_path / "a.txt")
    assert not list(tmp_path.iterdir())
