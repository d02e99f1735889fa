import json
import re
from itertools import pairwise

import nibabel
import numpy as np
import pytest

from tests.data.helpers.faulty import FAULTS, moved, spoil, with_value
from tests.data.helpers.folders import AFFINE, SIZE, decathlon, image, label, save
from unet3d.data.checks.headers import check_headers
from unet3d.data.checks.voxels import check_voxels
from unet3d.data.layouts.decathlon import Decathlon
from unet3d.data.nifti.stream import CHUNK, iter_voxels, read_header


def found(root):
    """Every finding, as `unet3d check` puts them together."""
    source = Decathlon(str(root))
    cases, classes = source.cases(), source.describe().classes
    seen = check_voxels(
        cases, classes=classes, ignore_label=None, workers=2, progress=lambda done, total: None
    )
    return [*dict.fromkeys([*source.faults(), *check_headers(cases, channels=1), *seen])]


def in_json(root, change):
    path = root / "dataset.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def is_said(findings, case, file, said):
    return [f for f in findings if (f.case, f.file) == (case, file) and re.search(said, f.what)]


def test_a_healthy_set_has_no_faults(tmp_path):
    assert found(decathlon(tmp_path, 6)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_its_file_and_nothing_else_is(tmp_path, fault):
    expected = spoil(decathlon(tmp_path, 3), "case_01", fault)
    findings = found(tmp_path)
    assert is_said(findings, *expected)
    assert {f.case for f in findings} == {"case_01"}
    assert all(f.do for f in findings)
    assert len(findings) == len({(f.file, f.what) for f in findings}) <= 3


def test_all_faults_at_once_are_all_told(tmp_path):
    decathlon(tmp_path, len(FAULTS) + 2)
    expected = [spoil(tmp_path, f"case_{n:02d}", fault) for n, fault in enumerate(FAULTS, start=1)]
    findings = found(tmp_path)
    assert not [e for e in expected if not is_said(findings, *e)]
    assert not [f for f in findings if f.case in ("case_00", f"case_{len(FAULTS) + 1:02d}")]


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ({"image": "./imagesTr/case_01.nii.gz"}, "its entry is {'image'"),
        ("./imagesTr/case_01.nii.gz", "its entry is './images"),
        ({"image": 5, "label": None}, "its entry is"),
    ],
)
def test_an_entry_that_is_no_case_is_told_and_the_others_are_looked_at(tmp_path, entry, what):
    decathlon(tmp_path, 3)
    spoil(tmp_path, "case_02", "NaN")
    in_json(tmp_path, lambda content: content["training"].__setitem__(1, entry))
    findings = found(tmp_path)
    assert is_said(findings, "training[1]", tmp_path / "dataset.json", re.escape(what))
    assert is_said(findings, "case_02", tmp_path / "imagesTr" / "case_02.nii.gz", "NaN")


def test_files_without_an_entry_and_a_wrong_count_are_told(tmp_path):
    decathlon(tmp_path, 3)
    in_json(tmp_path, lambda content: content["training"].pop())
    save(tmp_path / "imagesTr" / "._case_00.nii.gz", image(0))  # as macOS leaves them
    findings = found(tmp_path)
    for folder in ("imagesTr", "labelsTr"):
        assert is_said(findings, None, tmp_path / folder / "case_02.nii.gz", "no entry")
    assert is_said(findings, None, tmp_path / "dataset.json", "numTraining 3, but there are 2")
    assert len(findings) == 3


def test_a_file_that_is_listed_twice_is_told(tmp_path):
    decathlon(tmp_path, 3)
    in_json(tmp_path, lambda c: c["training"][1].update(label="./labelsTr/case_00.nii.gz"))
    in_json(tmp_path, lambda c: c["training"].append(c["training"][2]))
    findings = found(tmp_path)
    assert is_said(findings, "case_01", tmp_path / "labelsTr/case_00.nii.gz", "first for case_00")
    assert is_said(findings, "case_02", None, "two cases have this name")


def test_a_class_that_never_occurs_is_told(tmp_path):
    decathlon(tmp_path, 3)
    in_json(tmp_path, lambda content: content["labels"].update({"3": "side"}))
    assert [f.what for f in found(tmp_path)] == ["class 3 (side) occurs in no label"]


def test_headers_that_round_are_equal(tmp_path):
    decathlon(tmp_path, 1)
    save(tmp_path / "labelsTr" / "case_00.nii.gz", label(0), moved(AFFINE * 1.00001, 0.05))
    assert found(tmp_path) == []


def test_channels_that_differ_are_told(tmp_path):
    decathlon(tmp_path, 1)
    case = Decathlon(str(tmp_path)).cases()[0]
    second = save(tmp_path / "second.nii.gz", image(9), moved(AFFINE, 1))
    both = type(case)(name=case.name, images=(*case.images, second), label=case.label)
    findings = check_headers([both], channels=2)
    assert [(f.file, f.what[:16]) for f in findings] == [(second, "lies up to 1 mm ")]
    assert "2 channels in all" in check_headers([both], channels=1)[0].what


def test_a_constant_channel_of_several_is_told(tmp_path):
    decathlon(tmp_path, 3)
    array = image(0, (*SIZE, 2))
    array[..., 1] = 0
    save(tmp_path / "imagesTr" / "case_00.nii.gz", array)
    assert "channel 1 is 0 everywhere" in [f.what for f in found(tmp_path)]


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float64, ">i4"])
def test_voxels_come_in_pieces_as_nibabel_reads_them(tmp_path, name, dtype, monkeypatch):
    monkeypatch.setattr("unet3d.data.nifti.stream.CHUNK", 100)
    volume = nibabel.Nifti1Image(image(0, (5, 6, 7, 2)).astype(dtype), AFFINE)
    volume.header.set_slope_inter(0.5, 3)
    nibabel.save(volume, tmp_path / name)
    header = read_header(tmp_path / name)
    pieces = list(iter_voxels(tmp_path / name, header))
    assert max(len(values) for _, values in pieces) == 100 < CHUNK
    assert all(a[0] <= b[0] for a, b in pairwise(pieces))
    whole = np.concatenate([values for _, values in pieces]).reshape(header.shape, order="F")
    expected = nibabel.load(tmp_path / name).get_fdata(dtype=np.float32)
    assert np.allclose(whole, expected, rtol=1e-6)


def test_progress_is_told_to_the_last_case(tmp_path):
    cases, told = Decathlon(str(decathlon(tmp_path, 3))).cases(), []
    check_voxels(
        cases,
        classes=["a", "b", "c"],
        ignore_label=None,
        workers=1,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_label_to_ignore_is_no_fault(tmp_path):
    decathlon(tmp_path, 1)
    with_value(tmp_path / "labelsTr" / "case_00.nii.gz", 9)
    for ignore_label, count in ((9, 0), (None, 1)):
        findings = check_voxels(
            Decathlon(str(tmp_path)).cases(),
            classes=["a", "b", "c"],
            ignore_label=ignore_label,
            workers=1,
            progress=lambda done, total: None,
        )
        assert len(findings) == count
