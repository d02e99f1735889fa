"""What training does about faults."""

import json

import numpy as np
import pytest

from tests.data.helpers.folders import SIZE, decathlon, image, label, nnunet, save
from unet3d.data.findings import InvalidDatasetError
from unet3d.errors import UsageError
from unet3d.workflows.training.build import build_training, summarize_run


@pytest.fixture
def built(composed, small, tmp_path):
    """Build a run on data in the working folder, up to the first step."""
    base = [w for w in small if ".source" not in w and not w.startswith("data.root")]

    def run(*words, option="decathlon"):
        words = [f"data={option}", f"data.root={tmp_path}", *words]
        return build_training(
            composed(*words, f"data.cache={tmp_path / 'cache'}", base=base), tmp_path
        )

    return run


def said(built, *words):
    with pytest.raises(InvalidDatasetError) as caught:
        built(*words)
    return str(caught.value)


def with_header_faults(root):
    """case_01 and case_04 of ten, which headers show."""
    decathlon(root, 10)
    (root / "labelsTr" / "case_01.nii.gz").unlink()
    save(root / "labelsTr" / "case_04.nii.gz", label(4), np.diag([2.0, 1, 2, 1]))


def with_voxel_faults(root):
    """case_02 and case_05 of ten, which only voxels show."""
    decathlon(root, 10)
    save(root / "imagesTr" / "case_02.nii.gz", np.full(SIZE, np.nan))
    save(root / "labelsTr" / "case_05.nii.gz", np.full(SIZE, 9, np.uint8))


def test_faults_of_headers_stop_a_run_before_anything_is_prepared(built, tmp_path):
    with_header_faults(tmp_path)
    text = said(built)
    assert text.startswith("2 faults in 2 cases; data.invalid_cases=skip leaves such cases out")
    assert "case_01.nii.gz is missing" in text
    assert "case_04.nii.gz has spacing 2 x 1 x 2 mm, its image 1 x 1 x 2 mm" in text
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("words", [[], ["data.normalize=ct"]])
def test_faults_of_voxels_stop_a_run_when_all_cases_are_tried(built, tmp_path, words):
    with_voxel_faults(tmp_path)
    text = said(built, *words)
    assert "case_02.nii.gz holds NaN" in text
    if not words:  # ct reads the images before anything is prepared
        assert "2 faults in 2 cases" in text
        assert "labels must be 0..2, it holds 9" in text
        assert len(list((tmp_path / "cache").iterdir())) == 8


@pytest.mark.parametrize("words", [[], ["data.normalize=ct"]])
@pytest.mark.parametrize(
    ("spoil", "names"),
    [(with_header_faults, ["case_01", "case_04"]), (with_voxel_faults, ["case_02", "case_05"])],
)
def test_faulty_cases_are_skipped_said_and_folds_stay_the_same(
    built, tmp_path, spoil, names, words
):
    decathlon(tmp_path, 10)
    whole = built("fold=1")
    spoil(tmp_path)
    run = built("fold=1", "data.invalid_cases=skip", *words)
    for before, after in ((whole.training, run.training), (whole.validation, run.validation)):
        assert [v.name for v in after] == [v.name for v in before if v.name not in names]
    assert sorted({f.case for f in run.left_out}) == names
    assert [f"left out: {name}: " in summarize_run(run) for name in names] == [True, True]


def test_an_entry_that_is_no_case_stops_or_is_said(built, tmp_path):
    decathlon(tmp_path, 6)
    content = json.loads((tmp_path / "dataset.json").read_text())
    del content["training"][0]["label"]
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    assert "training[0]: " in said(built)
    assert "left out: training[0]: " in summarize_run(built("data.invalid_cases=skip"))


def test_files_that_no_case_names_do_not_hinder_a_run(built, tmp_path):
    save(decathlon(tmp_path, 5) / "imagesTr" / "other.nii.gz", image(9))
    assert len(built().training) == 4


def test_many_faults_are_not_all_listed(built, tmp_path):
    decathlon(tmp_path, 30)
    for file in (tmp_path / "labelsTr").iterdir():
        file.unlink()
    lines = said(built, "data.invalid_cases=skip").splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  and 10 more"


def test_a_fold_without_a_sound_case_to_train_on_is_refused(built, tmp_path):
    with_header_faults(tmp_path)
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps([{"train": ["case_01", "case_04"], "val": ["case_00"]}]))
    with pytest.raises(UsageError, match="every case to train on is left out"):
        built("data.invalid_cases=skip", f"data.splits={splits}")


def test_another_word_than_stop_or_skip_is_refused(built, tmp_path):
    decathlon(tmp_path, 5)
    with pytest.raises(UsageError, match=r"data\.invalid_cases must be stop or skip, got 'ignore'"):
        built("data.invalid_cases=ignore")


def test_the_label_to_ignore_is_the_data_sets_own(built, tmp_path):
    labels = {"background": 0, "front": 1, "back": 2, "ignore": 3}
    nnunet(tmp_path, 5, labels=labels)
    save(tmp_path / "labelsTr" / "case_00.nii.gz", np.full(SIZE, 3, np.uint8))
    run = built(option="nnunet")
    assert run.config["data"]["ignore_label"] == 3
    assert run.class_names == ("background", "front", "back")
    with pytest.raises(InvalidDatasetError, match="it holds 3"):
        built("data.ignore_label=9", option="nnunet")


def test_what_float32_cannot_hold_is_found_before_it_is_trained_on(built, tmp_path):
    array = image(0).astype(np.float64)
    array[0, 0, 0] = 1e300
    save(decathlon(tmp_path, 5) / "imagesTr" / "case_00.nii.gz", array)
    assert "case_00.nii.gz holds NaN or infinite values" in said(built)


def test_scans_of_a_patient_train_together_and_the_introduction_counts_patients(built, tmp_path):
    decathlon(tmp_path, 10)
    pairs = {f"case_{n:02d}": n // 2 for n in range(10)}
    (tmp_path / "patients.json").write_text(json.dumps(pairs))
    run = built(f"data.group_by={tmp_path / 'patients.json'}")
    sides = [{pairs[v.name] for v in part} for part in (run.training, run.validation)]
    assert not sides[0] & sides[1]
    told = summarize_run(run)
    assert "8 cases of 4 groups to train on, 2 cases of 1 group to validate on; " in told
    with pytest.raises(UsageError, match="has no capture group"):
        built("data.group_by='case'")
