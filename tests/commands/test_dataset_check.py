"""What training does about cases that it cannot use."""

import numpy as np
import pytest

from tests.data.helpers.datasets import SIZE, save_volume, write_decathlon
from unet3d.commands.train import build_training
from unet3d.data.case import InvalidDatasetError
from unet3d.training.run import summarize_run


def test_invalid_cases_stop_a_run_or_are_skipped_and_folds_stay_the_same(composed, small, tmp_path):
    base = [w for w in small if ".layout" not in w and not w.startswith("data.root")]
    data = ["data=decathlon", f"data.root={tmp_path}", f"data.cache={tmp_path / 'cache'}"]

    def build(*overrides):
        return build_training(composed(*data, "fold=1", *overrides, base=base), tmp_path)

    write_decathlon(tmp_path, 10)
    intact = build().data
    save_volume(tmp_path / "imagesTr" / "case_02.nii.gz", np.full(SIZE, np.nan))
    save_volume(tmp_path / "labelsTr" / "case_05.nii.gz", np.full(SIZE, 9, np.uint8))
    with pytest.raises(InvalidDatasetError, match=r"(?s)2 problems in 2 cases.* holds NaN.* 9: "):
        build()
    (tmp_path / "labelsTr" / "case_01.nii.gz").unlink()
    run = build("data.invalid_cases=skip", "data.normalize=ct")
    invalid = ["case_01", "case_02", "case_05"]
    for part in ("training", "validation"):
        before, after = ([v.name for v in getattr(d, part)] for d in (intact, run.data))
        assert after == [name for name in before if name not in invalid]
    assert sorted({finding.case for finding in run.data.skipped}) == invalid
    assert all(f"skipped: {name}: " in summarize_run(run) for name in invalid)
    for case in (tmp_path / "imagesTr").iterdir():
        case.write_bytes(b"")
    with pytest.raises(
        InvalidDatasetError, match=r"^data.invalid_cases=skip leaves no case: 1[01] "
    ):
        build("data.invalid_cases=skip")


def test_a_patch_that_is_mostly_padding_is_a_warning(composed, tmp_path):
    run = build_training(composed("data.patch_size=[32,32,32]"), tmp_path)
    expected = "data.patch_size=[32, 32, 32] has 8 times the voxels of the largest case (16x16x16)"
    assert any(note.startswith(expected) for note in run.notes)
    assert not any("padding" in note for note in build_training(composed(), tmp_path).notes)
