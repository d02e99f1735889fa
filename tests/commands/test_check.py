import json

import pytest

from tests.data.helpers.datasets import (
    write_decathlon,
)
from unet3d.__main__ import main


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Run `unet3d check` on a dataset in the working folder; return the exit code."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: main(["check", "data=decathlon", f"data.root={tmp_path}", *words])


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
