import h5py
import numpy as np
import pytest

from tests.data.layouts.test_pairs import make_layout
from unet3d.data.formats.volumes import open_voxels, read_header, read_labels, read_volume
from unet3d.data.layouts.scans import find_scans
from unet3d.errors import UsageError


@pytest.fixture
def file(tmp_path, voxels):
    """A file as pytorch-3dunet reads it, with two channels."""
    with h5py.File(tmp_path / "a.h5", "w") as written:
        written["raw"] = np.stack([voxels.T, voxels.T + 1])
        written["label"] = (voxels.T % 3).astype(np.int64)
        written["table"] = np.zeros((2, 2))
    return tmp_path / "a.h5"


def test_an_array_is_named_after_its_file(file, voxels):
    assert read_header(file / "raw").shape == (*voxels.shape, 2)
    assert read_header(file / "raw").assumption == "no voxel spacing: 1 mm is assumed"
    np.testing.assert_array_equal(read_volume(file / "raw")[0], [voxels, voxels + 1])
    np.testing.assert_array_equal(read_labels(file / "label")[0], voxels % 3)
    box = (slice(1, 3), slice(0, 2), slice(2, 5))
    np.testing.assert_array_equal(open_voxels(file / "raw").read(box)[1], voxels[box] + 1)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "it has several volumes: label, raw: name one, as in a.h5/label"),
        ("mask", "it has no volume mask: label, raw: name one"),
        ("table", "it has no volume table: label, raw: name one"),
    ],
)
def test_an_array_that_is_not_named_or_missing_is_refused(file, name, problem):
    with pytest.raises(UsageError, match=problem):
        read_volume(file / name if name else file)


def test_a_file_without_a_volume_is_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as written:
        written["table"] = np.zeros((2, 2))
    with pytest.raises(UsageError, match="it has no array of three or four axes"):
        read_volume(tmp_path / "a.h5")


def test_patterns_name_the_arrays_of_images_and_labels(file):
    layout = make_layout(file.parent, images="*.h5/raw", labels="*.h5/label")
    [case] = layout.list_cases()
    assert (case.name, case.images, case.label) == ("a", (file / "raw",), file / "label")
    assert layout.find_problems() == []
    [scan] = find_scans(file / "raw", ["one", "two"])
    assert (scan.name, scan.files, scan.suffix) == ("a", (file / "raw",), ".h5")
