"""What every format must do, and reading labels of any format."""

import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.helpers.datasets import save
from tests.data.helpers.formats import (
    turn,
    write_hdf5,
    write_itk,
    write_nifti,
    write_numpy,
    write_series,
    write_tiff,
    write_zarr,
)
from unet3d.data.formats.volume_format import Grid
from unet3d.data.formats.volumes import (
    find_offset,
    list_files,
    list_volumes,
    read_header,
    read_label_pair,
    read_labels,
    read_volume,
    split_suffix,
    write_labels,
)
from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.preprocessing.cache import estimate_preprocessing_cost
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError

STRAIGHT = np.diag([0.0003, 0.0004, 0.0012, 1.0])
OBLIQUE = turn(0.7, 0.8, 2.5)

WRITERS = {
    "a.nii.gz": (write_nifti, OBLIQUE.astype(np.float32).astype(float)),
    "a.nii": (write_nifti, OBLIQUE.astype(np.float32).astype(float)),
    "a.nrrd": (write_itk, OBLIQUE),
    "a.mhd": (write_itk, OBLIQUE),
    "a.tif": (write_tiff, STRAIGHT),
    "a.ome.zarr": (write_zarr, STRAIGHT),
    "a.h5": (write_hdf5, STRAIGHT),
    "a.npy": (write_numpy, np.eye(4)),
    "a": (write_series, OBLIQUE),
}

every_format = pytest.mark.parametrize("name", WRITERS)


@pytest.fixture
def labels(voxels):
    return (voxels % 3).astype(np.uint8)


def write(folder: Path, name: str, voxels: np.ndarray) -> Path:
    writer, affine = WRITERS[name]
    return writer(folder / name, voxels, affine)


@every_format
def test_voxels_and_geometry_are_read_as_they_were_written(tmp_path, voxels, name):
    file = write(tmp_path, name, voxels)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    assert list_volumes(tmp_path) == [file]
    assert split_suffix(file) == ("a", name[1:])
    files = {path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".txt"}
    assert {*list_files(file)} == files  # also those of which the header is not a part
    header, (channels, affine) = read_header(file), read_volume(file)
    assert channels.dtype.kind in "iu"
    np.testing.assert_array_equal(channels, voxels[None])
    np.testing.assert_allclose(affine, WRITERS[name][1], rtol=1e-6, atol=1e-9)
    assert (header.shape, header.dtype) == (channels.shape[1:], channels.dtype)
    np.testing.assert_array_equal(header.affine, affine)
    assert (header.assumption is None) == (name != "a.npy")


@every_format
def test_labels_have_the_affine_of_their_image(tmp_path, voxels, labels, name):
    """Exactly, unless SimpleITK (NRRD) or highdicom (a folder) computes it from the axes."""
    image = write(tmp_path, name, voxels)
    path = tmp_path / f"labels{ScanFiles(name='a', files=(image,)).suffix}"
    for values in (labels, labels[::-1]):  # written, then replaced
        write_labels(path, values, image, ["background", "organ", "lesion"])
        read, affine = read_volume(path)
        assert read.dtype == np.uint8
        np.testing.assert_array_equal(read, values[None])
        atol = {"a.nrrd": 1e-14, "a": 1e-11}.get(name, 0)
        np.testing.assert_allclose(affine, read_volume(image)[1], rtol=0, atol=atol)
    assert {p.name for p in tmp_path.iterdir() if p.name.startswith((".", "labels"))} == {path.name}


@every_format
def test_a_truncated_or_missing_volume_is_one_line_that_names_it(tmp_path, voxels, name):
    with pytest.raises(UsageError, match=r"a.* is missing$"):
        read_volume(tmp_path / name)
    file = write(tmp_path, name, voxels)
    part = max(list_files(file), key=lambda part: part.stat().st_size)
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with pytest.raises(UsageError) as error:
        read_volume(file)
    assert str(error.value).startswith(f"{file} cannot be read as a volume: ")
    assert "\n" not in str(error.value)


TRUSTING = ("a.nrrd", "a.mha")
"""Read by SimpleITK, which trusts what a header says: these are only cut off."""

fraction = st.floats(0, 1)


@pytest.mark.filterwarnings("ignore")  # of the libraries, about what they find
@pytest.mark.parametrize(
    "name", [*TRUSTING, "a.nii.gz", "a.nii", "a.tif", "a.zarr", "a.h5", "a.npy", "a"]
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(part=fraction, start=fraction, end=fraction, noise=st.binary(max_size=64))
def test_a_changed_file_is_read_or_refused_in_one_line(tmp_path, name, part, start, end, noise):
    """A file that is cut off or overwritten."""
    file = tmp_path / name
    if not file.exists():
        writer, affine = WRITERS[{"a.mha": "a.nrrd", "a.zarr": "a.ome.zarr"}.get(name, name)]
        writer(file, np.random.default_rng(0).integers(0, 99, (6, 5, 4)).astype(np.uint16), affine)
    files = list_files(file)
    changed = files[int(part * (len(files) - 1))]
    original = changed.read_bytes()
    at = int(start * len(original))
    body = original if name in TRUSTING else original[:at] + noise + original[at + len(noise) :]
    changed.write_bytes(body[: int(end * len(body))] if len(noise) % 2 else body)
    message = f"{file}: read"
    try:
        read_volume(file)
    except UsageError as error:
        message = str(error)
    finally:
        changed.write_bytes(original)
    assert message.startswith(str(file))
    assert "\n" not in message


@pytest.mark.parametrize(("unit", "said"), [("um", "the space units um, which"), ("mm", None)])
def test_units_of_nrrd_files_that_are_not_read_are_said(tmp_path, labels, unit, said):
    file = write_itk(tmp_path / "a.nrrd", labels, np.eye(4))
    header, voxels = file.read_bytes().split(b"\n\n", 1)
    file.write_bytes(header + f'\nspace units: "{unit}" "{unit}" "{unit}"\n\n'.encode() + voxels)
    assumption = read_header(file).assumption
    assert assumption is None if said is None else assumption.startswith(said)


def test_labels_are_refused_by_a_format_that_cannot_hold_their_grid(tmp_path, labels):
    affine = np.diag([0.7, 0.7, 2.3, 1.0])  # other numbers in micrometers, after rounding
    image = write_itk(tmp_path / "a.nrrd", labels, affine)
    write_labels(tmp_path / "b.tif", labels, image)
    assert (read_header(tmp_path / "b.tif").affine == read_header(image).affine).all()
    affine[0, 3] = 1
    write_itk(image, labels, affine)
    with pytest.raises(UsageError, match=r"b\.tif cannot hold the position of .*a\.nrrd"):
        write_labels(tmp_path / "b.tif", labels, image)
    affine[0, 1] = 0.003
    image = write_nifti(tmp_path / "a.nii", labels, affine)
    with pytest.raises(UsageError, match="cannot hold the skewed axes"):
        write_labels(tmp_path / "b.mha", labels, image)


@pytest.mark.parametrize(
    ("name", "package", "needed"),
    [("a.nrrd", "SimpleITK", "SimpleITK"), ("a", "pydicom", "pydicom highdicom")],
)
def test_a_missing_package_is_one_line_with_the_packages_to_install(
    tmp_path, voxels, name, package, needed, monkeypatch
):
    write(tmp_path, name, voxels)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"needs .*: pip install {needed} \\("):
        read_header(tmp_path / name)


def test_several_channels_follow_one_another(tmp_path):
    voxels = np.random.default_rng(0).integers(0, 99, (2, 6, 5, 4)).astype(np.uint8)
    np.save(tmp_path / "a.npy", voxels)
    write_zarr(tmp_path / "a.zarr", voxels, STRAIGHT)
    write_zarr(tmp_path / "b.zarr", voxels, STRAIGHT, version=2, chunks=(3, 5, 6))
    for name in ("a.npy", "a.zarr", "b.zarr"):
        np.testing.assert_array_equal(read_volume(tmp_path / name)[0], voxels)
        assert read_header(tmp_path / name).num_channels == 2


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
    ("shape", "translation", "scale", "offset"),
    [
        ((2, 3, 1), (4.001, 2, 9), (2.0, 2.0, 3.0), (2, 1, 3)),
        ((2, 3, 1), (5, 2, 9), (2.0, 2.0, 3.0), None),  # between two voxels
        ((2, 3, 1), (4, 2, 12), (2.0, 2.0, 3.0), None),  # outside
        ((2, 3, 2), (4, 8, 0), (2.0, -2.0, 3.0), None),
    ],
)
def test_a_part_of_a_grid_has_an_offset(shape, translation, scale, offset):
    whole = Grid(shape=(6, 5, 4), affine=np.diag([2.0, 2.0, 3.0, 1.0]))
    affine = np.diag([*scale, 1.0])
    affine[:3, 3] = translation
    assert find_offset(Grid(shape=shape, affine=affine), whole) == offset


@pytest.mark.parametrize("axes", ["LPS", "SRA", "AIL"])
def test_labels_along_other_axes_are_turned_to_their_image(tmp_path, labels, axes):
    image = write_nifti(tmp_path / "image.nii", labels, OBLIQUE)
    stored = nibabel.load(image)
    turn = nibabel.orientations.ornt_transform(
        nibabel.io_orientation(OBLIQUE), nibabel.orientations.axcodes2ornt(axes)
    )
    nibabel.save(stored.as_reoriented(turn), tmp_path / "label.nii")
    grid = read_header(image)
    values, affine = read_labels(tmp_path / "label.nii", grid)
    np.testing.assert_array_equal(values, labels)
    np.testing.assert_allclose(affine, grid.affine, atol=1e-5)
    assert read_header(tmp_path / "label.nii", grid).shape == labels.shape
    assert not np.array_equal(read_labels(tmp_path / "label.nii")[0], labels)
    (first, _), (second, _) = read_label_pair(tmp_path / "label.nii", image)
    np.testing.assert_array_equal(first, second)


def test_labels_that_are_elsewhere_are_not_turned(tmp_path, labels):
    image = write_nifti(tmp_path / "image.nii", labels, OBLIQUE)
    elsewhere = write_nifti(tmp_path / "label.nii", labels, OBLIQUE @ np.diag([-1.0, 1, 1, 1]))
    values, affine = read_labels(elsewhere, read_header(image))
    np.testing.assert_array_equal(values, labels)
    np.testing.assert_array_equal(affine, read_header(elsewhere).affine)


def test_labels_without_a_spacing_have_that_of_their_image(tmp_path, labels):
    image = write_tiff(tmp_path / "image.tif", labels, STRAIGHT)
    for shape, expected in ((labels.shape, STRAIGHT), (labels[1:].shape, np.eye(4))):
        label = write_numpy(tmp_path / "label.npy", np.ones(shape, np.uint8), np.eye(4))
        for affine in (
            read_header(label, read_header(image)).affine,
            read_labels(label, read_header(image))[1],
        ):
            np.testing.assert_allclose(affine, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float64"])
def test_labels_of_any_dtype_are_read_as_integers(tmp_path, dtype):
    expected = np.arange(24).reshape(2, 3, 4)
    labels, _ = read_labels(save(tmp_path / "a.nii", expected.astype(dtype)))
    assert labels.dtype == np.uint8
    assert (labels == expected).all()
    labels, _ = read_labels(save(tmp_path / "a.nii", (expected - 2000).astype(np.int16)))
    assert (labels == expected - 2000).all()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((2, 2, 2), 0.5, np.float32), "labels must be integers, found 0.5"),
        (np.full((2, 2, 2), 0.9999999, np.float32), r"labels must be integers, found 0\.9999999"),
        (np.full((2, 2, 2), 70000, np.int32), r"within -65535\.\.65535, found 70000"),
        (np.zeros((2, 2, 2, 3), np.uint8), "one real number per voxel, but holds 3 of type uint8"),
        (np.zeros((2, 2, 2), np.complex64), "one real number per voxel, but holds 1 of type compl"),
    ],
)
def test_arrays_that_are_not_labels_are_refused_with_their_file(tmp_path, array, message):
    with pytest.raises(UsageError, match=rf"strange\.nii\.gz.*{message}"):
        read_labels(save(tmp_path / "strange.nii.gz", array))
