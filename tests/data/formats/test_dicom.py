from unittest import mock

import highdicom
import numpy as np
import pydicom
import pytest
from pydicom.uid import generate_uid

from tests.data.helpers.formats import turn, write_nifti, write_series
from unet3d.data.case import Case
from unet3d.data.checks import check_headers
from unet3d.data.formats import dicom, volumes
from unet3d.data.formats.volume_format import VolumeHeader, find_other_name
from unet3d.data.formats.volumes import (
    is_volume,
    list_volumes,
    read_header,
    read_label_pair,
    read_labels,
    read_volume,
    write_labels,
)
from unet3d.errors import UsageError

OBLIQUE = turn(0.7, 0.8, 2.5)


@pytest.fixture
def labels():
    labels = np.zeros((10, 9, 7), np.uint8)
    labels[2:5, 3:8, 2:4], labels[6:8, 1:3, 3:5] = 1, 3
    return labels


@pytest.fixture
def folder(tmp_path, voxels):
    """A series whose files are in the order of its slices."""
    return write_series(tmp_path / "a", voxels, OBLIQUE)


def change(files, **fields):
    for file in files:
        dataset = pydicom.dcmread(file)
        for key, value in fields.items():
            setattr(dataset, key, value)
        dataset.save_as(file)


def test_slices_are_sorted_by_position_and_scaled(folder, voxels):
    change(folder.iterdir(), RescaleIntercept=-1024)
    (folder / "DICOMDIR").write_bytes(b"\0" * 128 + b"DICM")
    (folder / "000_readme.txt").write_text("scan")
    channels, affine = read_volume(folder)
    assert channels.dtype == np.float32
    np.testing.assert_array_equal(channels[0], voxels - 1024)
    np.testing.assert_allclose(affine, OBLIQUE, atol=1e-9)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"ImagePositionPatient": [0, 0, 1]}, r"has slices .* to .* mm apart, .*resample"),
        ({"SeriesInstanceUID": "1.2.3"}, r"holds 2 series or sizes .*: CT \(6 images, 003, .* own"),
        ({"Rows": 3}, "holds 2 series or sizes of images"),
        ({"PhotometricInterpretation": "MONOCHROME1"}, r"has inverted gray values .* in 017: save"),
        ({"ImagePositionPatient": None}, "has 017 without ImagePositionPatient"),
        ({"ImageOrientationPatient": [0, 1, 0, 0, 0, 1]}, "has .* with another orientation"),
    ],
)
def test_images_that_do_not_form_one_volume_are_refused(folder, fields, problem):
    change([folder / "017"], **fields)
    with pytest.raises(UsageError, match=f"a cannot be read as a volume: it {problem}") as error:
        read_header(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "size", "problem"),
    [
        ("017", 0, "empty or no DICOM"),
        ("018.dcm", 100, "empty or no DICOM"),
        ("017", 400, "cut off"),
    ],
)
def test_a_slice_that_was_cut_off_is_refused(folder, name, size, problem):
    (folder / name).write_bytes((folder / "017").read_bytes()[:size])
    with pytest.raises(UsageError, match=f"has {name}, which is {problem}.*: copy it again"):
        read_header(folder)


def test_two_slices_at_one_position_are_refused(tmp_path, voxels):
    folder = write_series(tmp_path / "two", voxels[..., :2], OBLIQUE)
    first, second = sorted(folder.iterdir())
    change([second], ImagePositionPatient=pydicom.dcmread(first).ImagePositionPatient)
    with pytest.raises(UsageError, match="at one position"):
        read_header(folder)


def test_a_segmentation_of_frames_that_fill_no_bytes_is_read(tmp_path):
    scan = write_series(tmp_path / "odd", np.zeros((11, 7, 5), np.int16), OBLIQUE)
    labels = np.random.default_rng(0).integers(0, 3, (11, 7, 5), dtype=np.uint8)
    write_labels(tmp_path / "odd.dcm", labels, scan, ["background", "a", "b"])
    np.testing.assert_array_equal(read_labels(tmp_path / "odd.dcm", read_header(scan))[0], labels)


def test_a_segmentation_of_tilted_slices_is_refused(tmp_path):
    tilt = np.eye(4)
    tilt[1, 2] = np.tan(np.radians(2))
    scan = write_series(tmp_path / "tilted", np.zeros((8, 7, 20), np.int16), tilt)
    labels = np.ones((8, 7, 20), np.uint8)
    with pytest.raises(UsageError, match="cannot hold the tilted slices of"):
        write_labels(tmp_path / "a.dcm", labels, scan)
    with mock.patch.object(volumes, "MAX_TILT", 5):
        write_labels(tmp_path / "a.dcm", labels, scan)
    with pytest.raises(UsageError, match="not the slices of one volume"):
        read_header(tmp_path / "a.dcm")


def test_a_segmentation_has_the_names_and_references_of_its_images(tmp_path, folder, labels):
    write_labels(tmp_path / "a.dcm", labels, folder, ["background", "liver", "cyst", "vein"])
    segmentation = highdicom.seg.segread(tmp_path / "a.dcm")
    assert [s.SegmentLabel for s in segmentation.SegmentSequence] == ["liver", "cyst", "vein"]
    referenced = segmentation.ReferencedSeriesSequence[0].ReferencedInstanceSequence
    images = {pydicom.dcmread(f).SOPInstanceUID for f in folder.iterdir()}
    assert {r.ReferencedSOPInstanceUID for r in referenced} == images
    assert segmentation.PatientName == "Doe^Jane"


def test_a_series_without_some_fields_is_segmented(tmp_path, folder, labels):
    for file in folder.iterdir():
        dataset = pydicom.dcmread(file)
        dataset.SliceThickness = None
        for keyword in dicom.PATIENT_AND_STUDY_TAGS:
            if keyword in dataset:
                delattr(dataset, keyword)
        dataset.save_as(file)
    write_labels(tmp_path / "a.dcm", labels, folder)
    np.testing.assert_array_equal(read_labels(tmp_path / "a.dcm")[0], labels)


@pytest.fixture
def cropped(tmp_path, folder, labels, monkeypatch):
    """A segmentation of the slices that have labels alone, as most programs write it."""
    write = highdicom.seg.Segmentation.__init__

    def omit(self, *args, omit_empty_frames, **options):
        write(self, *args, omit_empty_frames=True, **options)

    with monkeypatch.context() as patch:
        patch.setattr(highdicom.seg.Segmentation, "__init__", omit)
        write_labels(tmp_path / "a.dcm", labels, folder, ["background", "a", "b", "c"])
    return tmp_path / "a.dcm"


def test_a_segmentation_of_some_slices_is_put_on_the_grid_of_the_other_file(
    cropped, folder, labels, tmp_path
):
    assert read_header(cropped).shape == (10, 9, 3)
    grid = read_header(folder)
    assert read_header(cropped, grid).shape == grid.shape
    read, affine = read_labels(cropped, grid)
    np.testing.assert_array_equal(read, labels)
    np.testing.assert_array_equal(affine, grid.affine)
    other = write_nifti(tmp_path / "b.nii", labels, grid.affine)
    for pair in ((cropped, other), (other, cropped)):
        for read, _ in read_label_pair(*pair):
            np.testing.assert_array_equal(read, labels)
    assert check_headers([Case(name="a", images=(folder,), label=cropped)], channels=1) == []


def test_folders_of_series_and_files_of_volumes_are_told_apart(cropped, folder, tmp_path):
    (tmp_path / "labels").mkdir()
    cropped.rename(tmp_path / "labels" / "a.dcm")
    assert is_volume(folder)
    assert not is_volume(tmp_path / "labels")
    assert not is_volume(tmp_path)
    assert list_volumes(tmp_path / "labels") == [tmp_path / "labels" / "a.dcm"]
    assert list_volumes(tmp_path) == [folder]
    (folder / "003").rename(tmp_path / "one.dcm")
    with pytest.raises(UsageError, match="is one slice of a series: give the folder of its series"):
        read_header(tmp_path / "one.dcm")


@pytest.mark.filterwarnings("ignore")  # highdicom, about what the slices leave out
def test_an_enhanced_image_is_read_and_segmented(tmp_path, folder, voxels, labels):
    change(folder.iterdir(), RescaleIntercept=-1024)
    slices = [pydicom.dcmread(file) for file in sorted(folder.iterdir())]
    enhanced = highdicom.legacy.LegacyConvertedEnhancedCTImage(
        legacy_datasets=slices,
        series_instance_uid=generate_uid(),
        series_number=2,
        sop_instance_uid=generate_uid(),
        instance_number=1,
    )
    enhanced.save_as(tmp_path / "b.dcm")
    channels, affine = read_volume(tmp_path / "b.dcm")
    np.testing.assert_array_equal(channels[0], voxels - 1024)
    np.testing.assert_allclose(affine, read_header(folder).affine, atol=1e-11)
    write_labels(tmp_path / "c.dcm", labels, tmp_path / "b.dcm", ["background", "a", "b", "c"])
    np.testing.assert_array_equal(read_labels(tmp_path / "c.dcm")[0], labels)


@pytest.mark.filterwarnings("ignore")  # highdicom, about what the slices leave out
def test_structures_that_a_file_numbers_otherwise_are_found(tmp_path, folder, labels):
    cases = []
    for n, names in enumerate((["a", "b", "c"], ["b", "A", "c"], ["other", "b", "c"])):
        write_labels(tmp_path / f"{n}.dcm", labels, folder, ["background", *names])
        cases.append(Case(name=str(n), images=(folder,), label=tmp_path / f"{n}.dcm"))

    def check(known):
        found = check_headers(cases, channels=1, label_names=known)
        return [(f.case, f.message.partition(" in ")[0]) for f in found if "calls" in f.message]

    assert check({}) == [("1", "calls label 1 b, which is 2")]
    swapped = "calls label 2 b, which is 1"
    assert check({"b": (1,)}) == [
        ("0", swapped),
        ("1", "calls label 2 A, which is 1"),
        ("2", swapped),
    ]


def test_contours_are_refused_with_what_converts_them(tmp_path, folder):
    contours = pydicom.dcmread(next(folder.iterdir()))
    contours.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.481.3"
    contours.save_as(tmp_path / "label.dcm")
    case = Case(name="a", images=(folder,), label=tmp_path / "label.dcm")
    (finding,) = check_headers([case], channels=1)
    assert finding.message.startswith("has contours (RTSTRUCT) and no voxels: convert it to NIfTI")
    assert finding.advice == "correct it, or remove the case"


def test_several_labels_of_one_name_are_one_structure_of_a_file():
    grid = {"shape": (4, 4, 4), "affine": np.eye(4), "dtype": np.dtype(np.uint8)}
    header = VolumeHeader(**grid, label_names=((1, "cell"), (2, "Cell"), (3, "wall")))
    known: dict = {}
    assert find_other_name(header, known, "a") is None
    assert known == {"cell": (1, 2), "wall": (3,)}
    other = VolumeHeader(**grid, label_names=((3, "cell"),))
    assert find_other_name(other, known, "a") == "calls label 3 cell, which is 1, 2 in a"
