import numpy as np
import pytest

from unet3d.data.nifti.labels import files_by_name, read_labels
from unet3d.errors import UsageError

AFFINE = np.diag([2.0, 1.0, 3.0, 1.0])


def save(path, array, affine=AFFINE):
    import nibabel

    nibabel.save(nibabel.Nifti1Image(array, affine), path)
    return path


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64"])
def test_labels_are_read_as_whole_numbers_whatever_their_type(tmp_path, suffix, dtype):
    labels = np.arange(24).reshape(2, 3, 4)
    found, affine = read_labels(save(tmp_path / f"a{suffix}", labels.astype(dtype)))
    assert found.dtype == np.uint8
    assert (found == labels).all()
    assert (affine == AFFINE).all()


def test_labels_that_the_header_scales_are_read_as_it_says(tmp_path):
    import nibabel

    stored = np.arange(-2, 14, 2, dtype=np.int16).reshape(2, 2, 2)
    image = nibabel.Nifti1Image(stored, AFFINE)
    image.header.set_slope_inter(0.5, 1)
    nibabel.save(image, tmp_path / "a.nii.gz")
    assert read_labels(tmp_path / "a.nii.gz")[0].ravel().tolist() == list(range(8))


def test_large_and_negative_labels_are_kept(tmp_path):
    labels = np.array([-2, 0, 2035], np.int16).reshape(3, 1, 1)
    assert read_labels(save(tmp_path / "a.nii", labels))[0].ravel().tolist() == [-2, 0, 2035]


def test_a_fourth_axis_of_one_is_dropped(tmp_path):
    assert read_labels(save(tmp_path / "a.nii", np.zeros((2, 3, 4, 1), np.uint8)))[0].ndim == 3


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.full((2, 2, 2), 0.5, np.float32), "whole numbers, it holds 0.5"),
        (np.full((2, 2, 2), np.nan, np.float32), "whole numbers, it holds nan"),
        (np.full((2, 2, 2), np.inf, np.float32), "labels must be at most 65535, it holds inf"),
        (np.full((2, 2, 2), 70000, np.int32), "labels must be at most 65535, it holds 70000"),
        (np.zeros((2, 2, 2, 3), np.uint8), "one real number per voxel, it holds 3 of uint8"),
        (np.zeros((2, 2), np.uint8), r"3D volume, its shape is \[2, 2\]"),
        (np.zeros((2, 2, 2), np.complex64), "one real number per voxel, it holds 1 of complex64"),
    ],
)
def test_what_cannot_be_labels_is_named_with_its_file(tmp_path, array, said):
    with pytest.raises(UsageError, match=said) as caught:
        read_labels(save(tmp_path / "strange.nii.gz", array))
    assert "strange.nii.gz" in str(caught.value)


def test_a_file_that_is_missing_cut_short_or_no_volume_is_named(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (20, 20, 20)).astype(np.uint8)
    for name in ("short.nii", "short.nii.gz"):
        whole = save(tmp_path / name, noise).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    (tmp_path / "words.nii.gz").write_text("not a volume")
    (tmp_path / "empty.nii").touch()
    for name in ("short.nii", "short.nii.gz", "words.nii.gz", "empty.nii"):
        with pytest.raises(UsageError, match=f"{name} cannot be read as a volume"):
            read_labels(tmp_path / name)
    with pytest.raises(UsageError, match=r"none\.nii is missing"):
        read_labels(tmp_path / "none.nii")


def test_an_affine_without_spacing_is_refused(tmp_path):
    flat = np.diag([1.0, 0.0, 1.0, 1.0])
    import nibabel

    image = nibabel.Nifti1Image(np.zeros((2, 2, 2), np.uint8), None)
    image.header.set_sform(flat, code=1)
    nibabel.save(image, tmp_path / "flat.nii")
    with pytest.raises(UsageError, match=r"flat\.nii: its affine has no spacing above 0"):
        read_labels(tmp_path / "flat.nii")


def test_files_are_found_by_name_and_hidden_ones_are_left_out(tmp_path):
    for name in ("a.nii.gz", "b.nii", "b.nii.gz", "._a.nii.gz", "c.json", "d.e.nii"):
        (tmp_path / name).touch()
    found = {k: [f.name for f in v] for k, v in files_by_name(tmp_path).items()}
    assert found == {"a": ["a.nii.gz"], "b": ["b.nii", "b.nii.gz"], "d.e": ["d.e.nii"]}
