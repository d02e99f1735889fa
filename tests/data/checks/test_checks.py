import json
import re

import nibabel
import numpy as np
import pytest

from tests.data.helpers.cases import write_case
from tests.data.helpers.corruptions import CORRUPTIONS, corrupt, set_value, shift_affine
from tests.data.helpers.datasets import (
    AFFINE,
    SIZE,
    make_image,
    make_label,
    save_volume,
    write_decathlon,
)
from unet3d.data.checks.headers import check_headers
from unet3d.data.checks.voxels import check_voxels
from unet3d.data.formats.volumes import open_header
from unet3d.data.layouts.decathlon import Decathlon
from unet3d.errors import UsageError


def find_all(root):
    """Return every finding, combined as `unet3d check` does."""
    layout = Decathlon(str(root))
    cases, classes = layout.list_cases(), layout.describe().classes
    findings = check_voxels(
        cases, classes=classes, ignore_labels=(), workers=2, progress=lambda done, total: None
    )
    return [*dict.fromkeys([*layout.find_problems(), *check_headers(cases, channels=1), *findings])]


def edit_json(root, change):
    path = root / "dataset.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def select(findings, case, file, pattern):
    return [
        f for f in findings if (f.case, f.file) == (case, file) and re.search(pattern, f.message)
    ]


def test_a_valid_dataset_has_no_findings(tmp_path):
    assert find_all(write_decathlon(tmp_path, 6)) == []


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_problem_is_reported_with_its_file_and_nothing_else_is(tmp_path, corruption):
    expected = corrupt(write_decathlon(tmp_path, 3), "case_01", corruption)
    findings = find_all(tmp_path)
    assert select(findings, *expected)
    assert {f.case for f in findings} == {"case_01"}
    assert all(f.advice for f in findings)
    assert len(findings) == len({(f.file, f.message) for f in findings}) <= 3


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"image": "./imagesTr/case_01.nii.gz"}, "has the invalid entry {'image'"),
        ("./imagesTr/case_01.nii.gz", "has the invalid entry './images"),
        ({"image": 5, "label": None}, "has the invalid entry"),
    ],
)
def test_an_invalid_entry_is_reported_and_other_cases_are_still_checked(tmp_path, entry, message):
    write_decathlon(tmp_path, 3)
    corrupt(tmp_path, "case_02", "NaN")
    edit_json(tmp_path, lambda content: content["training"].__setitem__(1, entry))
    findings = find_all(tmp_path)
    assert select(findings, "training[1]", tmp_path / "dataset.json", re.escape(message))
    assert select(findings, "case_02", tmp_path / "imagesTr" / "case_02.nii.gz", "NaN")


def test_unlisted_files_and_a_wrong_count_are_reported(tmp_path):
    write_decathlon(tmp_path, 3)
    edit_json(tmp_path, lambda content: content["training"].pop())
    save_volume(
        tmp_path / "imagesTr" / "._case_00.nii.gz", make_image(0)
    )  # macOS metadata is ignored
    findings = find_all(tmp_path)
    for folder in ("imagesTr", "labelsTr"):
        assert select(findings, None, tmp_path / folder / "case_02.nii.gz", "no entry")
    assert select(findings, None, tmp_path / "dataset.json", "numTraining 3, but has 2 cases")
    assert len(findings) == 3


def test_links_that_lead_nowhere_and_folders_among_scans_are_hints(tmp_path):
    write_decathlon(tmp_path, 3)
    scans = tmp_path / "imagesTr"
    (scans / "dangling").symlink_to("nowhere")
    (scans / "loop").symlink_to("loop")
    (scans / "more").mkdir()
    (scans / "notes.txt").touch()
    findings = find_all(tmp_path)
    for name, reason in (
        ("dangling", "is a link that leads nowhere, and is ignored"),
        ("loop", "is a link that leads nowhere, and is ignored"),
        ("more", "is a folder without DICOM images, and is ignored"),
    ):
        (finding,) = select(findings, None, scans / name, reason)
        assert finding.is_hint
    assert len(findings) == 3


def test_a_file_that_is_listed_twice_is_reported(tmp_path):
    write_decathlon(tmp_path, 3)
    edit_json(tmp_path, lambda c: c["training"][1].update(label="./labelsTr/case_00.nii.gz"))
    edit_json(tmp_path, lambda c: c["training"].append(c["training"][2]))
    findings = find_all(tmp_path)
    assert select(findings, "case_01", tmp_path / "labelsTr/case_00.nii.gz", "first for case_00")
    assert select(findings, "case_02", None, "two cases have this name")


def test_a_class_that_never_occurs_is_reported(tmp_path):
    write_decathlon(tmp_path, 3)
    edit_json(tmp_path, lambda content: content["labels"].update({"3": "side"}))
    assert [f.message for f in find_all(tmp_path)] == ["class 3 (side) occurs in no label"]


def test_rounding_differences_of_headers_are_tolerated(tmp_path):
    write_decathlon(tmp_path, 1)
    affine = shift_affine(AFFINE * 1.00001, 0.05)
    save_volume(tmp_path / "labelsTr" / "case_00.nii.gz", make_label(0), affine)
    assert find_all(tmp_path) == []


def test_channels_with_different_grids_are_reported(tmp_path):
    write_decathlon(tmp_path, 1)
    case = Decathlon(str(tmp_path)).list_cases()[0]
    second = save_volume(tmp_path / "second.nii.gz", make_image(9), shift_affine(AFFINE, 1))
    both = type(case)(name=case.name, images=(*case.images, second), label=case.label)
    findings = check_headers([both], channels=2)
    assert [(f.file, f.message[:23]) for f in findings] == [(second, "is offset by up to 1 mm")]
    assert "2 channels in total" in check_headers([both], channels=1)[0].message


def test_a_constant_channel_of_several_is_reported(tmp_path):
    write_decathlon(tmp_path, 3)
    array = make_image(0, (*SIZE, 2))
    array[..., 1] = 0
    save_volume(tmp_path / "imagesTr" / "case_00.nii.gz", array)
    assert "channel 1 is 0 everywhere" in [f.message for f in find_all(tmp_path)]


def test_progress_is_reported_up_to_the_last_case(tmp_path):
    cases, calls = Decathlon(str(write_decathlon(tmp_path, 3))).list_cases(), []
    check_voxels(
        cases,
        classes=["a", "b", "c"],
        ignore_labels=(),
        workers=1,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_the_ignore_label_is_not_a_problem(tmp_path):
    write_decathlon(tmp_path, 1)
    set_value(tmp_path / "labelsTr" / "case_00.nii.gz", 9)
    for ignore_labels, count in (((9,), 0), ((8, 9), 0), ((), 1)):
        findings = check_voxels(
            Decathlon(str(tmp_path)).list_cases(),
            classes=["a", "b", "c"],
            ignore_labels=ignore_labels,
            workers=1,
            progress=lambda done, total: None,
        )
        assert len(findings) == count


def test_a_case_that_declares_more_than_the_available_memory_is_named(tmp_path):
    case = write_case(tmp_path, np.zeros((16, 16, 16), np.float32))
    assert not check_headers([case], channels=1, ram=2**20)
    (image, *_) = check_headers([case], channels=1, ram=2**12)
    assert "declares 16 x 16 x 16 voxels: reading it takes" in image.describe()


def test_complex_voxels_are_refused_wherever_a_header_is_opened(tmp_path):
    file = tmp_path / "a.nii.gz"
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4, 4), np.complex64), np.eye(4)), file)
    with pytest.raises(UsageError, match="has voxels of complex64, not one real number each"):
        open_header(file)
