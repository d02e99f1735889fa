import json

import numpy as np
import pytest

from tests.data.helpers.datasets import (
    SIZE,
    make_label,
    save_volume,
    write_decathlon,
)
from unet3d.__main__ import main


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Run `unet3d check` on a dataset in the working folder; return the exit code."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: main(["check", "data=decathlon", f"data.root={tmp_path}", *words])


def test_findings_are_grouped_by_case_with_exit_code_1(check, tmp_path, capsys):
    write_decathlon(tmp_path, 3)
    affine = np.diag([1.0, 1, 3, 1])
    save_volume(tmp_path / "labelsTr" / "case_01.nii.gz", make_label(1) * 3, affine)
    save_volume(tmp_path / "imagesTr" / "case_02.nii.gz", np.full(SIZE, np.nan))
    assert check("workers=1") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line[:1] not in (" ", "")] == [
        "case_01",
        "case_02",
        "3 cases, 3 problems in 2 cases",
        "NIfTI, 16 x 16 x 16 voxels of 1 x 1 x 2 mm; channels MRI; classes background, front, back",
    ]
    start = lines.index("case_01")
    assert lines[start + 1].startswith("  labelsTr/case_01.nii.gz has spacing 1 x 1 x 3 mm")
    assert lines[start + 2].startswith("    -> if the voxel grids already match")
    assert lines[start + 3].startswith("  labelsTr/case_01.nii.gz holds 3, 6: labels must be 0..2")


def test_equal_problems_of_many_cases_are_one_with_their_number(check, tmp_path, capsys):
    write_decathlon(tmp_path, 8)
    for n in range(7):
        (tmp_path / "labelsTr" / f"case_{n:02d}.nii.gz").unlink()
    (tmp_path / "imagesTr" / "case_07.nii.gz").write_bytes(b"")
    assert check("read_voxels=false") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "case_07"
    assert lines[4:9] == [
        "7 cases: case_00, case_01, case_02, case_03, case_04 and 2 more",
        "  labelsTr/case_00.nii.gz (and 6 more files) is missing",
        "    -> add it, or remove the case",
        "",
        "8 cases, 8 problems in 8 cases",
    ]
    assert check("read_voxels=false", "format=json") == 1
    assert len(json.loads(capsys.readouterr().out)["errors"]) == 8
