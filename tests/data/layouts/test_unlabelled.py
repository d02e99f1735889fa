import pytest

from unet3d.data.layouts.unlabelled import find_scans
from unet3d.errors import UsageError


@pytest.fixture
def folder(tmp_path):
    def made(*names):
        for name in names:
            (tmp_path / name).touch()
        return tmp_path

    return made


def names(found):
    return {scan.name: [file.name for file in scan.files] for scan in found}


def test_with_one_channel_every_image_is_a_scan_and_loses_its_0000(folder):
    root = folder("b.nii", "a_0000.nii.gz", "notes.txt", ".hidden.nii", "c.d.nii.gz")
    assert names(find_scans(root, ["CT"])) == {
        "a": ["a_0000.nii.gz"],
        "b": ["b.nii"],
        "c.d": ["c.d.nii.gz"],
    }


def test_patients_that_are_numbered_from_0000_keep_their_numbers(folder):
    root = folder("patient_0000.nii", "patient_0001.nii", "patient_0012.nii")
    assert list(names(find_scans(root, ["CT"]))) == ["patient_0000", "patient_0001", "patient_0012"]


def test_several_channels_are_files_of_a_scan_or_one_file(folder):
    root = folder("a_0001.nii", "a_0000.nii", "whole.nii.gz", "patient_0007.nii")
    assert names(find_scans(root, ["T1", "T2"])) == {
        "a": ["a_0000.nii", "a_0001.nii"],
        "patient_0007": ["patient_0007.nii"],
        "whole": ["whole.nii.gz"],
    }


def test_a_missing_channel_is_named_so_that_reading_it_says_so(folder):
    (scan,) = find_scans(folder("a_0000.nii.gz", "a_0002.nii.gz"), ["T1", "T2", "FLAIR"])
    assert [file.name for file in scan.files] == [f"a_000{n}.nii.gz" for n in range(3)]


def test_a_channel_too_many_is_kept_so_that_its_number_is_refused(folder):
    (scan,) = find_scans(folder("a_0000.nii", "a_0001.nii", "a_0002.nii"), ["T1", "T2"])
    assert len(scan.files) == 3


def test_a_single_file_brings_its_other_channels_along(folder):
    root = folder("a_0000.nii", "a_0001.nii", "b_0000.nii", "b_0001.nii")
    assert names(find_scans(root / "b_0000.nii", ["T1", "T2"])) == {
        "b": ["b_0000.nii", "b_0001.nii"]
    }
    assert names(find_scans(root / "b_0000.nii", ["T1"])) == {"b": ["b_0000.nii"]}


@pytest.mark.parametrize(
    ("there", "asked", "said"),
    [
        ((), "", "no .nii or .nii.gz"),
        ((), "none.nii", "nothing at"),
        (("a.png",), "a.png", "must be a folder"),
        (("a.nii", "a.nii.gz"), "", "both called a"),
        (("a.nii", "a_0000.nii"), "", "both called a"),
        (("a_0000.nii", "a_0000.nii.gz"), "", "the same channel of a"),
    ],
)
def test_what_cannot_be_is_said(folder, there, asked, said):
    with pytest.raises(UsageError, match=said):
        find_scans(folder(*there) / asked, ["CT"])
