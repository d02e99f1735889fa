import re
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK

from tests.data.helpers.cases import noise
from tests.data.helpers.datasets import (
    AFFINE,
    SIZE,
    make_image,
    make_label,
    save_volume,
    write_decathlon,
)
from unet3d.data.checks import (
    check_headers,
    check_scan_headers,
    check_voxels,
    find_assumptions,
    find_odd_spacings,
    is_valid_affine,
)
from unet3d.data.formats.volume_format import VolumeHeader
from unet3d.data.formats.volumes import read_header
from unet3d.data.layouts.decathlon import Decathlon
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.types import IGNORE_LABEL


def check(cases, **options):
    defaults = {
        **{"classes": ["background", "front", "back"], "ignore_labels": (), "workers": 2},
        "progress": lambda done, total: None,
    }
    return check_voxels(cases, **{**defaults, **options})


def find_all(root):
    """Return every finding, combined as `unet3d check` does."""
    layout = Decathlon(str(root))
    cases = layout.list_cases()
    found = [*layout.find_problems(), *check_headers(cases, channels=1), *check(cases)]
    return list(dict.fromkeys(found))


def set_value(path, value):
    array = nibabel.load(path).get_fdata().astype(np.float32)
    array[3, 3, 3] = value
    save_volume(path, array)


SHIFT = np.zeros((4, 4))
SHIFT[0, 3] = 1


CORRUPTIONS = [
    (
        "images",
        lambda p: p.write_bytes(p.read_bytes()[:-8] + bytes(8)),
        "cannot be read: CRC check",
    ),
    ("labels", lambda p: set_value(p, np.nan), "holds NaN"),
    ("labels", lambda p: save_volume(p, np.stack([make_label(53)] * 2, -1)), "one 3D volume"),
    ("images", lambda p: save_volume(p, noise(12, 10)), "it must be 3D, or 4D"),
    ("images", lambda p: save_volume(p, noise(12, 10, 3)), "only 12 x 10 x 3 vox"),
    ("images", lambda p: save_volume(p, np.zeros(SIZE, [(c, "u1") for c in "RGB"])), "real number"),
]
"""Faults that the contract does not plant: the folder of the file, the change, and the message."""


@pytest.mark.parametrize(("folder", "change", "pattern"), CORRUPTIONS)
def test_a_problem_is_reported_with_its_file_and_nothing_else_is(tmp_path, folder, change, pattern):
    file = write_decathlon(tmp_path, 3) / f"{folder}Tr" / "case_01.nii.gz"
    change(file)
    findings = find_all(tmp_path)
    assert any(f.file == file and re.search(pattern, f.message) for f in findings)
    assert {f.case for f in findings} == {"case_01"}
    assert all(f.advice for f in findings)
    assert len(findings) == len({(f.file, f.message) for f in findings}) <= 3


def test_a_file_that_is_listed_twice_is_reported(tmp_path):
    one, other, third = Decathlon(str(write_decathlon(tmp_path, 3))).list_cases()
    findings = check_headers([one, replace(other, label=one.label), third, third], channels=1)
    assert [finding.describe() for finding in findings] == [
        f"case_01: {one.label} is listed twice, first for case_00",
        "case_02: two cases have this name",
    ]


def test_a_class_that_never_occurs_is_reported(tmp_path):
    cases = Decathlon(str(write_decathlon(tmp_path, 1))).list_cases()
    (finding,) = check(cases, classes=["background", "front", "back", "side"])
    assert finding.message == "class 3 (side) occurs in no label"


@pytest.mark.parametrize(("second", "setting"), [(4, "[0, 1, 4]"), (5, "auto")])
def test_values_that_are_no_classes_are_proposed_as_label_values(tmp_path, second, setting):
    cases = Decathlon(str(write_decathlon(tmp_path, 2))).list_cases()
    for n, (case, value) in enumerate(zip(cases, (4, second), strict=True)):
        save_volume(case.label, np.array([0, 1, value], np.uint8)[make_label(n)])
    [hint] = [f for f in check(cases, classes="abc", ignore_labels=()) if f.is_hint]
    assert f"set data.label_values={setting} to" in hint.advice


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ([0, -1, 1], "set data.ignore_label=[-1] if"),
        ([-1, 0, 4], "set data.label_values=[0, 4] to .*; set data.ignore_label=[-1] if"),
        ([0, 1, 255], "set data.label_values=auto to .*; set data.ignore_label=[255] if"),
    ],
)
def test_values_of_voxels_that_nobody_labeled_are_proposed_to_be_ignored(tmp_path, values, advice):
    cases = Decathlon(str(write_decathlon(tmp_path, 1))).list_cases()
    save_volume(cases[0].label, np.array(values, np.int16)[make_label(0)])
    [hint] = [f for f in check(cases, classes="ab", ignore_labels=()) if f.is_hint]
    assert re.match(re.escape(advice).replace(r"\.\*", ".*"), hint.advice)
    settings = Preprocessing(num_classes=2, crop="none", ignore_labels=(-1, 4, 255))
    scan = settings.preprocess_scan(cases[0].images)
    label, _ = settings.preprocess_label(cases[0].label, scan)
    assert (label == IGNORE_LABEL).any()


def test_voxels_of_a_fraction_of_a_nanometer_are_valid():
    assert is_valid_affine(np.diag([2e-7, 2e-7, 6e-7, 1]))
    parallel = [[2e-7, 2e-7, 0, 0], [0, 0, 2e-7, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert not is_valid_affine(np.array(parallel))


def test_rounding_differences_of_headers_are_tolerated(tmp_path):
    write_decathlon(tmp_path, 1)
    affine = AFFINE * 1.00001 + 0.05 * SHIFT
    save_volume(tmp_path / "labelsTr" / "case_00.nii.gz", make_label(0), affine)
    assert find_all(tmp_path) == []


def test_channels_with_different_grids_are_reported(tmp_path):
    write_decathlon(tmp_path, 1)
    case = Decathlon(str(tmp_path)).list_cases()[0]
    second = save_volume(tmp_path / "second.nii.gz", make_image(9), AFFINE + SHIFT)
    both = replace(case, images=(*case.images, second))
    findings = check_headers([both], channels=2)
    assert [(f.file, f.message[:23]) for f in findings] == [(second, "is offset by up to 1 mm")]
    assert "2 channels in total" in check_headers([both], channels=1)[0].message


def test_the_ignore_label_is_not_a_problem_and_progress_goes_to_the_last_case(tmp_path):
    cases, calls = Decathlon(str(write_decathlon(tmp_path, 2))).list_cases(), []
    set_value(tmp_path / "labelsTr" / "case_00.nii.gz", 9)
    assert not check(cases, ignore_labels=(8, 9), progress=lambda *done: calls.append(done))
    assert calls == [(1, 2), (2, 2)]


def test_a_case_that_declares_more_than_the_available_memory_is_named(tmp_path):
    (case,) = Decathlon(str(write_decathlon(tmp_path, 1))).list_cases()
    assert not check_headers([case], channels=1, ram=2**20)
    (image, *_) = check_headers([case], channels=1, ram=2**10)
    assert "declares 16 x 16 x 16 voxels: reading it takes" in image.describe()


def test_a_missing_orientation_is_one_hint_for_all_cases_that_assume_the_same(tmp_path):
    image = nibabel.Nifti1Image(np.zeros(SIZE, np.uint8), None)  # both codes are 0
    nibabel.save(image, tmp_path / "a.nii")
    itk = SimpleITK.GetImageFromArray(np.zeros(SIZE, np.uint8))
    SimpleITK.WriteImage(itk, str(tmp_path / "b.nrrd"))
    header = (tmp_path / "b.nrrd").read_bytes()
    (tmp_path / "c.nrrd").write_bytes(re.sub(rb"space: .*", b"space dimension: 3", header))
    headers = [read_header(tmp_path / name) for name in ("a.nii", "a.nii", "b.nrrd", "c.nrrd")]
    (nifti, nrrd) = find_assumptions(headers, 4)
    assert nifti.message == "2 of 4 cases have no orientation: LAS is assumed"
    assert nrrd.message == "1 of 4 cases have no orientation: LPS is assumed"
    assert "write the orientation" in nifti.advice


def test_voxels_of_another_order_of_magnitude_are_a_hint_and_thick_slices_are_not():
    def make_header(*spacing_mm):
        return VolumeHeader(shape=SIZE, affine=np.diag([*spacing_mm, 1.0]), dtype=np.dtype("u1"))

    headers = {Path(f"{n}.nii"): make_header(1, 1, 0.5 + n) for n in range(5)}
    assert find_odd_spacings(headers) == []
    (hint,) = find_odd_spacings(headers | {Path("x.nii"): make_header(1000, 1000, 2000)})
    assert hint.is_hint
    assert "1 image with voxels 10 times as large or small as those of most others: x.nii" in (
        hint.describe()
    )


@pytest.mark.parametrize(("degrees", "is_refused"), [(0.4, False), (4, False), (10, True)])
def test_axes_that_are_not_orthogonal_are_refused(tmp_path, degrees, is_refused):
    affine = np.diag([1.0, 1.0, 3.0, 1.0])
    affine[1, 2] = 3 * np.tan(np.radians(degrees))  # as slices of a tilted gantry
    file = tmp_path / "tilted.nii"
    nibabel.save(nibabel.Nifti1Image(np.zeros(SIZE, np.uint8), affine), file)
    problems = [finding.message for finding in check_scan_headers("tilted", [file])]
    tilted = f"has axes {90 - degrees} instead of 90 degrees apart, as with a tilted gantry"
    assert [tilted in problem for problem in problems] == ([True] if is_refused else [])
    if not is_refused:
        hints = [hint.describe() for hint in find_assumptions([read_header(file)], 1)]
        assert ["degrees off orthogonal" in hint for hint in hints] == [True] * (degrees > 1)
