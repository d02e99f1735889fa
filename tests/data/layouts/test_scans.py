import numpy as np
import pytest

from tests.data.helpers.formats import write_series
from unet3d.data.layouts.scans import describe_ignored, find_scans
from unet3d.errors import UsageError


@pytest.fixture
def folder(tmp_path):
    def touch(*names):
        for name in names:
            (tmp_path / name).touch()
        return tmp_path

    return touch


def get_names(scans):
    return {scan.name: [file.name for file in scan.files] for scan in scans}


def test_with_one_channel_every_image_is_a_scan_without_its_0000(folder):
    root = folder("b.nii", "a_0000.nii.gz", "notes.txt", ".hidden.nii", "c.d.nii.gz")
    assert get_names(find_scans(root, ["CT"])) == {
        "a": ["a_0000.nii.gz"],
        "b": ["b.nii"],
        "c.d": ["c.d.nii.gz"],
    }


def test_patients_numbered_from_0000_keep_their_numbers(folder):
    names = ["patient_0000", "patient_0001", "patient_0012"]
    root = folder(*(f"{name}.nii" for name in names))
    assert list(get_names(find_scans(root, ["CT"]))) == names


def test_several_channels_are_one_file_each_or_one_file(folder):
    root = folder("a_0001.nii", "a_0000.nii", "whole.nii.gz", "patient_0007.nii")
    assert get_names(find_scans(root, ["T1", "T2"])) == {
        "a": ["a_0000.nii", "a_0001.nii"],
        "patient_0007": ["patient_0007.nii"],
        "whole": ["whole.nii.gz"],
    }


def test_a_single_file_brings_the_other_channels_of_its_scan(folder):
    root = folder("a_0000.nii", "a_0001.nii", "b_0000.nii", "b_0001.nii")
    assert get_names(find_scans(root / "b_0000.nii", ["T1", "T2"])) == {
        "b": ["b_0000.nii", "b_0001.nii"]
    }
    assert get_names(find_scans(root / "b_0000.nii", ["T1"])) == {"b": ["b_0000.nii"]}


def test_a_single_file_may_lie_beside_files_of_the_same_name(folder):
    root = folder("a_0000.nii", "a_0001.nii", "b.nii", "b.nrrd", "whole.nii")
    assert get_names(find_scans(root / "whole.nii", ["T1", "T2"])) == {"whole": ["whole.nii"]}
    found = get_names(find_scans(root / "a_0001.nii", ["T1", "T2"]))
    assert found == {"a": ["a_0000.nii", "a_0001.nii"]}


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ((), "", "no .nii.gz, .nii, .nrrd, .mha"),
        ((), "none.nii", "no file or folder"),
        (("a.png",), "a.png", "must be a folder"),
        (("a.MGZ",), "a.MGZ", r"; convert it by nibabel's command: nib-convert a.MGZ a.nii.gz"),
        (("a.nii", "a.nii.gz"), "", "same case name a"),
        (("a_0000.nii", "a_0000.nii.gz"), "", "the same channel of a"),
    ],
)
def test_an_invalid_input_is_refused(folder, files, source, message):
    with pytest.raises(UsageError, match=message):
        find_scans(folder(*files) / source, ["CT"])


def test_scans_in_a_folder_for_each_patient_are_hinted_at(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t1.nii.gz").touch()
    with pytest.raises(UsageError, match=rf"that hold scans, such as {tmp_path / 'a'}$"):
        find_scans(tmp_path, ["T1"])


def test_what_is_ignored_is_named(folder):
    root = folder("a.nii", "b.NII", ".hidden")
    (root / "more").mkdir()
    assert describe_ignored(root).startswith(f"{root}: ignoring b.NII, more: not named .nii.gz")
    assert describe_ignored(root / "a.nii") is None


def test_series_deeper_in_an_export_are_listed_also_beside_a_stray_slice(tmp_path):
    series = tmp_path / "export" / "patient" / "study" / "series"
    series.parent.mkdir(parents=True)
    write_series(series, np.zeros((4, 5, 6), np.int16), np.eye(4))
    link = rf"1 folder below \(patient/study/series\): .* ln -s {series} FOLDER/NAME"
    with pytest.raises(UsageError, match=f"no .nii.gz.*; DICOM images are in {link}"):
        find_scans(tmp_path / "export", ["CT"])
    (tmp_path / "export" / "stray").write_bytes(next(series.iterdir()).read_bytes())
    with pytest.raises(UsageError, match=f"export has DICOM images of its own.* in {link}"):
        find_scans(tmp_path / "export", ["CT"])
