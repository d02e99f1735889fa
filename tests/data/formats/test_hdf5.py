import h5py
import numpy as np
import pytest

from tests.data.layouts.test_pairs import make_layout
from unet3d.data.formats.volumes import (
    list_files,
    open_voxels,
    read_header,
    read_labels,
    read_volume,
)
from unet3d.data.layouts.scans import find_scans
from unet3d.data.preprocessing.cache import digest_volume, get_version
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


def test_a_virtual_array_is_that_of_its_sources(tmp_path, voxels):
    layout = h5py.VirtualLayout(shape=voxels.T.shape, dtype=voxels.dtype)
    half = len(voxels.T) // 2
    for n, part in enumerate((slice(0, half), slice(half, None))):
        with h5py.File(tmp_path / f"source{n}.h5", "w") as written:
            written["raw"] = voxels.T[part]
        source = h5py.VirtualSource(f"source{n}.h5", "raw", shape=voxels.T[part].shape)
        layout[part] = source
    volume = tmp_path / "whole.h5" / "raw"
    with h5py.File(tmp_path / "whole.h5", "w") as written:
        written.create_virtual_dataset("raw", layout)
    np.testing.assert_array_equal(read_volume(volume)[0][0], voxels)
    before = get_version(volume), digest_volume(volume)
    with h5py.File(tmp_path / "source1.h5", "r+") as written:
        written["raw"][:] = 9
    assert get_version(volume) != before[0]
    assert digest_volume(volume) != before[1]
    (tmp_path / "source1.h5").unlink()
    with pytest.raises(UsageError, match=r"has values in .*source1\.h5, which is missing"):
        read_volume(volume)


def test_an_array_in_another_file_or_behind_a_link_is_followed(tmp_path, voxels):
    values = np.ascontiguousarray(voxels.T)
    (tmp_path / "a.raw").write_bytes(values.tobytes())
    with h5py.File(tmp_path / "a.h5", "w") as written:
        place = [(str(tmp_path / "a.raw"), 0, values.nbytes)]
        written.create_dataset("raw", values.shape, values.dtype, external=place)
        written["soft"] = h5py.SoftLink("/raw")
    with h5py.File(tmp_path / "b.h5", "w") as written:
        written["other"] = h5py.ExternalLink("a.h5", "raw")
    for volume in (tmp_path / "a.h5" / "soft", tmp_path / "b.h5" / "other"):
        np.testing.assert_array_equal(read_volume(volume)[0][0], voxels)
        assert tmp_path / "a.raw" in list_files(volume)
        assert tmp_path / "a.h5" in list_files(volume)


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
