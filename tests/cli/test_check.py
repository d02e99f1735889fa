import json
import re

import numpy as np
import pytest

from tests.data.helpers.faulty import FAULTS, spoil
from tests.data.helpers.folders import SIZE, decathlon, image, label, save
from unet3d.cli.main import main


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Run `unet3d check` on a data set in the working folder; return the exit code."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: main(["check", "data=decathlon", f"data.root={tmp_path}", *words])


def faulty(root):
    """Three cases: a label with a value and a place that cannot be, and an image of NaN."""
    decathlon(root, 3)
    affine = np.diag([1.0, 1, 3, 1])
    save(root / "labelsTr" / "case_01.nii.gz", label(1) * 3, affine)
    save(root / "imagesTr" / "case_02.nii.gz", np.full(SIZE, np.nan))


def test_a_clean_set_is_summed_up_and_ends_with_0(check, tmp_path, capsys):
    decathlon(tmp_path, 3)
    assert check() == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "3 cases, no faults",
        "12 x 10 x 8 voxels of 1 x 1 x 2 mm; channels MRI; classes background, front, back",
    ]
    assert shown.err.splitlines()[-1] == "3 of 3 cases"


def test_a_constant_border_is_a_hint_until_the_config_knows_of_it(check, tmp_path, capsys):
    decathlon(tmp_path, 3)
    for n in (0, 2):
        framed = np.full(SIZE, -3.5 - n, np.float32)
        framed[2:-2, 2:-2, 2:-2] = image(n)[2:-2, 2:-2, 2:-2]
        save(tmp_path / "imagesTr" / f"case_{n:02d}.nii.gz", framed)
    assert check() == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "hint: 2 of 3 cases have a constant border that is not data.background: -5.5 to -3.5",
        "    -> set data.background=auto, so that crop and normalization leave it out",
    ]
    assert check("data.background=auto", "format=json") == 0
    assert json.loads(capsys.readouterr().out)["hints"] == []


def test_faults_are_grouped_by_case_and_end_with_1(check, tmp_path, capsys):
    faulty(tmp_path)
    assert check("workers=1") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line[:1] not in (" ", "")] == [
        "case_01",
        "case_02",
        "3 cases, 3 faults in 2 cases",
        "12 x 10 x 8 voxels of 1 x 1 x 2 mm; channels MRI; classes background, front, back",
    ]
    start = lines.index("case_01")
    assert lines[start + 1].startswith("  labelsTr/case_01.nii.gz has spacing 1 x 1 x 3 mm")
    assert lines[start + 2].startswith("    -> if the voxels lie on each other")
    assert lines[start + 3].startswith("  labelsTr/case_01.nii.gz holds 3, 6: labels must be 0..2")


def test_a_folder_with_every_fault_is_told_whole(check, tmp_path, capsys):
    decathlon(tmp_path, len(FAULTS) + 2)
    expected = [spoil(tmp_path, f"case_{n:02d}", fault) for n, fault in enumerate(FAULTS, start=1)]
    assert check("format=json") == 1
    told = json.loads(capsys.readouterr().out)["faults"]
    for case, file, said in expected:
        mine = [f["what"] for f in told if (f["case"], f["file"]) == (case, str(file))]
        assert re.search(said, " ".join(mine)), (case, said)
    assert check() == 1
    assert not [line for line in capsys.readouterr().out.splitlines() if line == "case_00"]


def test_scans_of_one_patient_are_hinted_at_until_groups_are_given(check, tmp_path, capsys):
    for folder in ("images", "labels"):
        for name in ("p1_visit1", "p1_visit2", "p2_visit1"):
            save(tmp_path / folder / f"{name}.nii.gz", label(1))
    words = ["data=pairs", "data.num_classes=3", "read_voxels=false"]
    assert check(*words) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "hint: 3 cases look like scans of 2 patients, as p1_visit1 and p1_visit2",
        r"    -> set data.group_by='(.+)_visit\d+', which keeps the scans of a patient in one fold",
    ]
    assert check(*words, r"data.group_by=(.+)_visit\d+") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "3 cases of 2 groups, no faults"
    assert "hint" not in shown[-1]
    assert check(*words, "data.group_by=(.+)_visit2") == 2
    assert "captures nothing from 2 of 3 cases: p1_visit1, p2_visit1" in capsys.readouterr().err


def test_headers_alone_are_looked_at_on_request(check, tmp_path, capsys):
    faulty(tmp_path)
    assert check("read_voxels=false") == 1
    shown = capsys.readouterr()
    assert "3 cases, 1 fault in 1 case" in shown.out
    assert not shown.err


def test_json_and_a_file_are_for_other_programs(check, tmp_path, capsys):
    faulty(tmp_path)
    assert check("format=json", "output=faults.json") == 1
    assert not capsys.readouterr().out
    told = json.loads((tmp_path / "faults.json").read_text())
    assert told["cases"] == 3
    assert [fault["case"] for fault in told["faults"]] == ["case_01", "case_01", "case_02"]
    assert told["faults"][2]["file"].endswith("imagesTr/case_02.nii.gz")
    assert all(fault["what"] and fault["do"] for fault in told["faults"])


def test_a_set_without_a_readable_image_is_reported_all_the_same(check, tmp_path, capsys):
    decathlon(tmp_path, 2)
    for file in (tmp_path / "imagesTr").iterdir():
        file.write_bytes(b"")
    assert check() == 1
    assert "no image can be read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.root=nowhere"], "no dataset.json in"),
        (["data.root=empty"], "no dataset.json in"),
        (["data=pairs", "data.num_classes=2", "data.root=nowhere"], "data.root: no folder"),
        (["data=pairs", "data.num_classes=2", "data.root=empty"], "data.images: no file in"),
        (["data=pairs"], "data.num_classes"),
        (["data=nnunet", "data.root=???"], "data.root must be given"),
        (["data=nnunet", "data.root=empty"], "no dataset.json in"),
        (["workers=0"], "workers must be an int >= 1"),
        (["workers=two"], "workers must be an int >= 1"),
        (["format=png"], "format must be table or json"),
        (["read_voxels=maybe"], "read_voxels must be bool"),
        (["output=/nowhere/faults.txt"], "/nowhere/faults.txt"),
        (["wrokers=1"], "did you mean workers?"),
    ],
)
def test_misuse_is_answered_in_a_line_with_2(check, tmp_path, capsys, words, said):
    decathlon(tmp_path, 2)
    (tmp_path / "empty").mkdir()
    assert check(*words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in error


def test_training_lists_faults_line_by_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    faulty(tmp_path)
    assert main(["train", "data=decathlon", f"data.root={tmp_path}", "fold=none"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[0].startswith("unet3d: 1 fault in 1 case; data.invalid_cases=skip")
    assert error[1].startswith("  case_01: ")
