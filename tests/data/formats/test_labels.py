import nibabel
import numpy as np
import pytest

from unet3d.data.formats.labels import list_files_by_name, read_labels
from unet3d.errors import UsageError

AFFINE = np.diag([2.0, 1.0, 3.0, 1.0])


def save(path, array):
    nibabel.save(nibabel.Nifti1Image(array, AFFINE), path)
    return path


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64"])
def test_labels_of_any_dtype_are_read_as_integers(tmp_path, dtype):
    expected = np.arange(24).reshape(2, 3, 4)
    labels, affine = read_labels(save(tmp_path / "a.nii", expected.astype(dtype)))
    assert labels.dtype == np.uint8
    assert (labels == expected).all()
    assert (affine == AFFINE).all()


def test_large_and_negative_labels_are_kept(tmp_path):
    labels = np.array([-2, 0, 2035], np.int16).reshape(3, 1, 1)
    assert read_labels(save(tmp_path / "a.nii", labels))[0].ravel().tolist() == [-2, 0, 2035]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((2, 2, 2), 0.5, np.float32), "labels must be integers, found 0.5"),
        (np.full((2, 2, 2), np.nan, np.float32), "labels must be integers, found nan"),
        (np.full((2, 2, 2), np.inf, np.float32), r"within -65535\.\.65535, found inf"),
        (np.full((2, 2, 2), 70000, np.int32), r"within -65535\.\.65535, found 70000"),
        (np.zeros((2, 2, 2, 3), np.uint8), "one real number per voxel, but holds 3 of type uint8"),
        (np.zeros((2, 2), np.uint8), r"3D volume, but has shape \[2, 2\]"),
        (np.zeros((2, 2, 2), np.complex64), "one real number per voxel, but holds 1 of type compl"),
    ],
)
def test_arrays_that_are_not_labels_are_refused_with_their_file(tmp_path, array, message):
    with pytest.raises(UsageError, match=message) as error:
        read_labels(save(tmp_path / "strange.nii.gz", array))
    assert "strange.nii.gz" in str(error.value)


def test_a_singular_affine_is_refused(tmp_path):
    image = nibabel.Nifti1Image(np.zeros((2, 2, 2), np.uint8), None)
    image.header.set_sform(np.diag([1.0, 0.0, 1.0, 1.0]), code=1)
    nibabel.save(image, tmp_path / "flat.nii")
    with pytest.raises(UsageError, match=r"flat\.nii: its affine is singular or not finite"):
        read_labels(tmp_path / "flat.nii")


def test_files_are_listed_by_name_without_hidden_ones(tmp_path):
    for name in ("a.nii.gz", "b.nii", "b.nii.gz", "._a.nii.gz", "c.json", "d.e.nii"):
        (tmp_path / name).touch()
    files = {k: [f.name for f in v] for k, v in list_files_by_name(tmp_path).items()}
    assert files == {"a": ["a.nii.gz"], "b": ["b.nii", "b.nii.gz"], "d.e": ["d.e.nii"]}
