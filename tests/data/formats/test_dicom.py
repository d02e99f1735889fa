import highdicom
import numpy as np
import pydicom
import pytest
from pydicom.uid import generate_uid

from tests.data.helpers.formats import turn, write_nifti, write_series
from unet3d.data.case import Case
from unet3d.data.checks.headers import check_headers
from unet3d.data.formats import dicom
from unet3d.data.formats.labels import read_label_pair, read_labels
from unet3d.data.formats.volumes import (
    is_volume,
    list_volumes,
    open_header,
    read_header,
    read_volume,
    write_labels,
)
from unet3d.errors import UsageError

OBLIQUE = turn(0.7, 0.8, 2.5)


@pytest.fixture
def voxels():
    return np.random.default_rng(0).integers(0, 999, (10, 9, 7)).astype(np.int16)


@pytest.fixture
def labels():
    labels = np.zeros((10, 9, 7), np.uint8)
    labels[2:5, 3:8, 2:4], labels[6:8, 1:3, 3:5] = 1, 3
    return labels


def test_slices_are_sorted_by_position_and_scaled(tmp_path, voxels):
    folder = write_series(tmp_path / "a", voxels, OBLIQUE, intercept=-1024)
    (folder / "DICOMDIR").write_bytes(b"\0" * 128 + b"DICM")
    (folder / "000_readme.txt").write_text("scan")
    channels, affine = read_volume(folder)
    assert channels.dtype == np.float32
    np.testing.assert_array_equal(channels[0], voxels - 1024)
    np.testing.assert_allclose(affine, OBLIQUE, atol=1e-9)


def change(folder, number, **fields):
    file = sorted(folder.iterdir())[number]
    dataset = pydicom.dcmread(file)
    for key, value in fields.items():
        setattr(dataset, key, value)
    dataset.save_as(file)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"ImagePositionPatient": [0, 0, 0]}, r"has slices .* to .* mm apart, .*resample"),
        ({"SeriesInstanceUID": "1.2.3"}, r"holds 2 series: CT \(6 images, 003, .* own"),
        ({"Rows": 3}, r"has Rows 9 in 003, 3 in 017: separate"),
        ({"ImagePositionPatient": None}, "has 017 without ImagePositionPatient"),
        ({"ImageOrientationPatient": [0, 1, 0, 0, 0, 1]}, "has ImageOrientationPatient"),
        ({"SamplesPerPixel": 3}, "has SamplesPerPixel 1 in 003, 3 in 017"),
    ],
)
def test_images_that_do_not_form_one_volume_are_refused(tmp_path, voxels, fields, problem):
    folder = write_series(tmp_path / "a", voxels, OBLIQUE)
    change(folder, 2, **fields)
    with pytest.raises(UsageError, match=f"a cannot be read as a volume: it {problem}") as error:
        open_header(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("skip", [[3], [3, 4], [1]])
def test_missing_slices_are_refused(tmp_path, voxels, skip):
    folder = write_series(tmp_path / "a", voxels, OBLIQUE, skip=skip)
    gap = 2.5 * (len(skip) + 1)
    with pytest.raises(UsageError, match=f"slices 2.5 to {gap:g} mm apart, as between .* copy"):
        open_header(folder)


def test_slices_at_one_position_or_shifted_are_refused(tmp_path, voxels):
    folder = write_series(tmp_path / "a", voxels, OBLIQUE)
    file = sorted(folder.iterdir())[3]
    (folder / "050").write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match=r"has slices 0 to 2\.5 mm apart"):
        open_header(folder)
    (folder / "050").unlink()
    dataset = pydicom.dcmread(file)
    along = np.array(dataset.ImageOrientationPatient[:3], float)
    change(folder, 3, ImagePositionPatient=(dataset.ImagePositionPatient + 0.1 * along).tolist())
    with pytest.raises(UsageError, match=r"has slices 2\.5 to 2\.5 mm apart"):
        open_header(folder)


def test_a_segmentation_has_the_grid_names_and_references_of_its_images(tmp_path, voxels, labels):
    folder = write_series(tmp_path / "a", voxels, OBLIQUE)
    write_labels(tmp_path / "a.dcm", labels, folder, ["background", "liver", "cyst", "vein"])
    read, affine = read_labels(tmp_path / "a.dcm")
    np.testing.assert_array_equal(read, labels)
    np.testing.assert_array_equal(affine, open_header(folder).affine)
    segmentation = highdicom.seg.segread(tmp_path / "a.dcm")
    assert [s.SegmentLabel for s in segmentation.SegmentSequence] == ["liver", "cyst", "vein"]
    images = {pydicom.dcmread(f).SOPInstanceUID for f in folder.iterdir()}
    referenced = segmentation.ReferencedSeriesSequence[0].ReferencedInstanceSequence
    assert {r.ReferencedSOPInstanceUID for r in referenced} == images
    assert segmentation.PatientName == "Doe^Jane"


def remove(folder, *keywords):
    for file in folder.iterdir():
        dataset = pydicom.dcmread(file)
        for keyword in keywords:
            if keyword in dataset:
                delattr(dataset, keyword)
        dataset.save_as(file)


@pytest.mark.parametrize("keywords", [("SliceThickness",), dicom.OF_PATIENT_AND_STUDY])
@pytest.mark.parametrize("make_empty", [False, True])
def test_a_series_without_some_fields_is_segmented(tmp_path, voxels, labels, keywords, make_empty):
    folder = write_series(tmp_path / "a", voxels, OBLIQUE)
    if make_empty:
        for number in range(voxels.shape[2]):
            change(folder, number, **dict.fromkeys(keywords))
    else:
        remove(folder, *keywords)
    write_labels(tmp_path / "a.dcm", labels, folder)
    np.testing.assert_array_equal(read_labels(tmp_path / "a.dcm")[0], labels)


@pytest.fixture
def cropped(tmp_path, voxels, labels, monkeypatch):
    """A segmentation of the slices that have labels alone, as most programs write it."""
    folder = write_series(tmp_path / "a", voxels, OBLIQUE)
    write = highdicom.seg.Segmentation.__init__

    def omit(self, *args, omit_empty_frames, **options):
        write(self, *args, omit_empty_frames=True, **options)

    with monkeypatch.context() as patch:
        patch.setattr(highdicom.seg.Segmentation, "__init__", omit)
        write_labels(tmp_path / "a.dcm", labels, folder, ["background", "a", "b", "c"])
    return folder, tmp_path / "a.dcm"


def test_a_segmentation_of_some_slices_is_put_on_the_grid_of_its_images(cropped, labels):
    folder, file = cropped
    assert read_header(file).shape == (10, 9, 3)
    grid = open_header(folder)
    assert read_header(file, grid).shape == grid.shape
    read, affine = read_labels(file, grid)
    np.testing.assert_array_equal(read, labels)
    np.testing.assert_array_equal(affine, grid.affine)


def test_a_segmentation_of_some_slices_is_compared_on_the_grid_of_the_other(
    cropped, labels, tmp_path
):
    folder, file = cropped
    other = write_nifti(tmp_path / "b.nii", labels, open_header(folder).affine)
    for pair in ((file, other), (other, file)):
        for read, _ in read_label_pair(*pair):
            np.testing.assert_array_equal(read, labels)
    assert check_headers([Case(name="a", images=(folder,), label=file)], channels=1) == []


def test_folders_of_series_and_files_of_volumes_are_told_apart(cropped, tmp_path):
    folder, file = cropped
    (tmp_path / "labels").mkdir()
    file.rename(tmp_path / "labels" / "a.dcm")
    assert is_volume(folder)
    assert not is_volume(tmp_path / "labels")
    assert not is_volume(tmp_path)
    assert list_volumes(tmp_path / "labels") == [tmp_path / "labels" / "a.dcm"]
    assert list_volumes(tmp_path) == [folder]


def test_one_slice_is_refused(tmp_path, voxels):
    folder = write_series(tmp_path / "a", voxels, OBLIQUE)
    (folder / "003").rename(tmp_path / "one.dcm")
    with pytest.raises(UsageError, match="is one slice of a series: give the folder of its series"):
        open_header(tmp_path / "one.dcm")


@pytest.mark.filterwarnings("ignore")  # highdicom, about what the slices leave out
def test_an_enhanced_image_is_read_and_segmented(tmp_path, voxels, labels):
    folder = write_series(tmp_path / "a", voxels, OBLIQUE, intercept=-1024)
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
    np.testing.assert_array_equal(affine, open_header(folder).affine)
    write_labels(tmp_path / "c.dcm", labels, tmp_path / "b.dcm", ["background", "a", "b", "c"])
    np.testing.assert_array_equal(read_labels(tmp_path / "c.dcm")[0], labels)
