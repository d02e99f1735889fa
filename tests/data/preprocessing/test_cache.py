import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

from tests.data.helpers.cases import noise, preprocess, write_case
from unet3d.data.case import Case, InvalidDatasetError
from unet3d.data.loading.datasets import crop_padded
from unet3d.data.preprocessing.cache import (
    digest_volume,
    estimate_preprocessing_cost,
    load_or_make,
    map_array,
    preprocess_all,
)
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.files import make_temporary_path


def test_a_case_is_preprocessed_once_until_its_file_or_the_settings_change(tmp_path):
    case = write_case(tmp_path, noise(12, 10, 8), (noise(12, 10, 8) > 5).astype(np.uint8))
    first = preprocess(case, tmp_path)
    assert (first.shape, first.classes) == ((12, 10, 8), {1})
    assert first.statistics.spacing_mm == (1, 1, 1)
    written = (first.folder / "image.npy").stat().st_mtime_ns
    assert preprocess(case, tmp_path) == first
    assert (first.folder / "image.npy").stat().st_mtime_ns == written
    assert preprocess(case, tmp_path, num_classes=3).folder != first.folder
    (tmp_path / "copy").mkdir()
    copied = write_case(tmp_path / "copy", noise(12, 10, 8), first.label)
    assert preprocess(copied, tmp_path).folder == first.folder
    changed = write_case(tmp_path, noise(12, 10, 8) * 2)
    assert preprocess(changed, tmp_path) != first


def test_a_compressed_case_has_the_same_voxels_and_patches_on_less_disk(tmp_path):
    image = np.zeros((70, 66, 40), np.float32)
    image[20:30, 20:60, 8:20] = noise(10, 40, 12)
    case = write_case(tmp_path, image, (image > 5).astype(np.uint8))
    plain = preprocess(case, tmp_path, crop="none")
    small = preprocess(case, tmp_path, "blosc2", crop="none")
    assert (small.shape, small.classes) == (plain.shape, plain.classes)
    np.testing.assert_array_equal(small.foreground_points, plain.foreground_points)
    for name in ("image", "label"):
        np.testing.assert_array_equal(np.array(getattr(small, name)), getattr(plain, name))
        for start in ((-3, 50, 0), (60, 0, -2), (5, 63, 30)):
            patches = [crop_padded(getattr(v, name), start, (16, 16, 16)) for v in (plain, small)]
            np.testing.assert_array_equal(*patches)
    sizes = [sum(file.stat().st_size for file in v.folder.iterdir()) for v in (plain, small)]
    assert sizes[1] < 0.2 * sizes[0]
    assert preprocess(case, tmp_path, "blosc2", crop="none") == small


def test_what_takes_long_says_how_many_cases_are_done(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("unet3d.data.case.PROGRESS_SECONDS", 0)
    caplog.set_level("INFO", logger="unet3d")
    cases = [write_case(tmp_path, noise(8, 8, 8), name=name) for name in "ab"]
    preprocess_all(cases, Preprocessing(num_classes=2), tmp_path / "cache")
    for doing in ("comparing files", "cached"):
        assert {f"{doing}: {n} of 2 cases" for n in (1, 2)} <= set(caplog.messages)


@pytest.mark.parametrize("spacing_mm", [None, (0.5, 1.0, 2.0), (2.0, 2.0, 2.0)])
def test_preprocessing_needs_no_more_memory_than_estimated(tmp_path, spacing_mm):
    case = write_case(tmp_path, noise(96, 96, 64))
    settings = Preprocessing(num_classes=2, spacing_mm=spacing_mm)
    cost = estimate_preprocessing_cost(case.images, settings)
    tracemalloc.start()
    volume = preprocess_all([case], settings, tmp_path / "cache")[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.4 * cost.ram < peak <= cost.ram
    assert volume.image.nbytes + volume.label.nbytes == cost.disk


def test_cases_whose_spacing_declares_more_than_the_memory_are_all_refused_unread(tmp_path):
    image, settings = noise(32, 32, 32), Preprocessing(num_classes=2, spacing_mm=(1.0, 1.0, 1.0))
    wrong = np.diag([100.0, 100, 100, 1])
    cases = [write_case(tmp_path, image, affine=wrong, name=name) for name in ("a", "b")]
    cases.append(write_case(tmp_path, image, name="c"))
    for case in cases:
        case.images[0].write_bytes(case.images[0].read_bytes()[:-20])  # reading it would fail
    with pytest.raises(InvalidDatasetError, match="2 problems in 2 cases") as error:
        preprocess_all(cases, settings, tmp_path / "cache", ram=2**33)
    assert "a_image.nii.gz takes up to" in str(error.value)
    assert [finding.case for finding in error.value.findings] == ["a", "b"]


@pytest.mark.parametrize(
    ("cache_format", "name", "damage"),
    [
        ("npy", "values.json", lambda file: os.truncate(file, 9)),
        ("npy", "image.npy", lambda file: os.truncate(file, 300)),
        ("npy", "foreground_points.npy", os.remove),
        ("blosc2", "image.b2nd", lambda file: os.truncate(file, 300)),
        ("blosc2", "label.b2nd", os.remove),
    ],
)
def test_an_incomplete_case_is_named_and_preprocessed_again(
    tmp_path, caplog, cache_format, name, damage
):
    caplog.set_level("WARNING", logger="unet3d")
    case = write_case(tmp_path, noise(12, 10, 8))
    volume = preprocess(case, tmp_path, cache_format)
    image = np.array(volume.image)
    damage(volume.folder / name)
    again = preprocess(case, tmp_path, cache_format)
    (message,) = caplog.messages
    assert message == f"{volume.folder} is damaged, preprocessing the case again"
    np.testing.assert_array_equal(again.image, image)
    assert again == volume


def load_or_make_one(folder, make):
    case = Case(name="case", images=(), label=folder)
    return load_or_make(
        {case: folder / "case"},
        load=lambda case, folder: int(map_array(folder, "n")[0]),
        make=lambda case: ({"n": np.array([make()])}, {}),
        choose_threads=len,
    )


def test_one_of_many_fills_a_folder_and_the_others_use_it(tmp_path):
    made = []

    def make(n):
        made.append(n)
        return n

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: load_or_make_one(tmp_path, lambda: make(n)), range(1, 9)))
    assert results == 8 * [made]
    assert [path.name for path in tmp_path.iterdir()] == ["case"]


def test_what_a_kill_left_of_a_case_is_removed_when_it_is_made(tmp_path):
    for name in ("case", "first case"):
        draft = make_temporary_path(tmp_path / name)
        draft.mkdir()
        (draft / "n.npy").touch()
    load_or_make_one(tmp_path, lambda: 1)
    assert {path.name for path in tmp_path.iterdir()} == {"case", draft.name}


def test_arrays_of_one_file_are_different_volumes(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["first"], file["second"] = np.ones((2, 4, 4, 4), np.uint8)
    first, second = (digest_volume(tmp_path / "a.h5" / name) for name in ("first", "second"))
    assert first != second
