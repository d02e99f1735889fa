"""What training does about cases that it cannot use."""

import json

import numpy as np
import pytest

from tests.data.helpers.datasets import SIZE, save_volume, write_decathlon
from unet3d.commands.train import build_training
from unet3d.data.case import InvalidDatasetError
from unet3d.errors import UsageError
from unet3d.training.run import summarize_run


@pytest.fixture
def build(composed, small, tmp_path):
    """Build a run on data in the working folder, up to the first step."""
    base = [w for w in small if ".layout" not in w and not w.startswith("data.root")]

    def build_run(*overrides):
        data = ["data=decathlon", f"data.root={tmp_path}", f"data.cache={tmp_path / 'cache'}"]
        return build_training(composed(*data, *overrides, base=base), tmp_path)

    return build_run


def get_error(build, *overrides):
    """Return the message with which building a run fails."""
    with pytest.raises(InvalidDatasetError) as caught:
        build(*overrides)
    return str(caught.value)


def get_names(volumes):
    return [volume.name for volume in volumes]


def write_voxel_errors(root):
    """Make case_02 and case_05 of ten invalid; only voxels show it."""
    write_decathlon(root, 10)
    save_volume(root / "imagesTr" / "case_02.nii.gz", np.full(SIZE, np.nan))
    save_volume(root / "labelsTr" / "case_05.nii.gz", np.full(SIZE, 9, np.uint8))


def test_invalid_voxels_stop_a_run_when_all_cases_were_tried(build, tmp_path):
    write_voxel_errors(tmp_path)
    message = get_error(build)
    assert "2 problems in 2 cases" in message
    assert "case_02.nii.gz holds NaN" in message
    assert "case_05.nii.gz holds 9: labels must be 0..2" in message
    assert len(list((tmp_path / "cache").glob("case_*"))) == 8
    # Intensities are read before anything is preprocessed.
    assert "case_02.nii.gz holds NaN" in get_error(build, "data.normalize=ct")


def test_invalid_cases_are_skipped_and_named_and_folds_stay_the_same(build, tmp_path):
    write_decathlon(tmp_path, 10)
    intact = build("fold=1").data
    write_voxel_errors(tmp_path)
    (tmp_path / "labelsTr" / "case_01.nii.gz").unlink()
    run = build("fold=1", "data.invalid_cases=skip", "data.normalize=ct")
    invalid = ["case_01", "case_02", "case_05"]
    for part in ("training", "validation"):
        before, after = (get_names(getattr(data, part)) for data in (intact, run.data))
        assert after == [name for name in before if name not in invalid]
    assert sorted({finding.case for finding in run.data.skipped}) == invalid
    assert all(f"skipped: {name}: " in summarize_run(run) for name in invalid)


def test_a_long_list_of_errors_is_cut(build, tmp_path):
    write_decathlon(tmp_path, 30)
    for file in (tmp_path / "labelsTr").iterdir():
        file.unlink()
    lines = get_error(build, "data.invalid_cases=skip").splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  and 10 more"


def test_a_fold_without_a_valid_training_case_is_refused(build, tmp_path):
    write_decathlon(tmp_path, 10)
    (tmp_path / "labelsTr" / "case_01.nii.gz").unlink()
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps([{"train": ["case_01"], "val": ["case_00"]}]))
    with pytest.raises(UsageError, match="every training case of fold 0 is invalid, so "):
        build("data.invalid_cases=skip", f"data.splits={splits}")
