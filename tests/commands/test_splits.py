"""Which cases are validated: the scans of a patient stay together, and files of folds are named."""

import json

import numpy as np
import pytest

from tests.data.helpers.datasets import make_image, make_label, save_volume
from unet3d.__main__ import main

pytestmark = pytest.mark.slow

SCANS = [f"p{patient}_visit{visit}" for patient in range(5) for visit in (1, 2)]
MISSING = "scans/splits_final.json names cases that are not in the dataset: p9_visit1"
OPTION = r"data.group_by='(.+)_visit\d+'"

DATA = ["data=pairs", "data.num_classes=3", "data.patch_size=[8,8,8]", "data.batch_size=2"]
SMALL = ["model.width=4", "model.convs_per_level=1", "memory.estimate=false"]
TRAIN = ["trainer.max_steps=1", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write scans of these names into scans/ of an empty working folder."""
    monkeypatch.chdir(tmp_path)

    def write_scans(names):
        for n, name in enumerate(names):
            save_volume(tmp_path / "scans" / "images" / f"{name}.nii.gz", make_image(n))
            save_volume(tmp_path / "scans" / "labels" / f"{name}.nii.gz", make_label(n))

    return write_scans


@pytest.fixture
def train(tmp_path, capsys):
    """Train a step on scans/; return the exit code, what was printed, and the validation cases."""

    def command(*words, data=("data.root=scans", *DATA)):
        shared = [*data, *SMALL, *TRAIN, "evaluation.enabled=false", "hydra.run.dir=run"]
        code = main(["train", *shared, *words])
        shown = capsys.readouterr()
        report = tmp_path / "run" / "report.json"
        warnings = json.loads(report.read_text())["warnings"] if not code else []
        return code, (shown.out + shown.err).splitlines(), warnings

    return command


def plan(*words):
    return main(["plan", "data.root=scans", *DATA, *SMALL, "measure_time=false", *words])


def test_a_plan_keeps_the_scans_of_a_patient_together(write, train, tmp_path, capsys):
    write(SCANS)
    assert plan("budget_gib=4") == 0
    assert f"p0_visit1 and p0_visit2: the plan sets {OPTION}\n" in capsys.readouterr().out
    code, lines, warnings = train("experiment=planned", data=())
    assert code == 0
    assert any(line.startswith("8 cases in 4 groups for training") for line in lines)
    assert not any("patients" in line for line in [*lines, *warnings])
    assert any(line.endswith(", 2 at a time, normalized by zscore") for line in lines)


def test_training_warns_once_of_patients_on_both_sides_of_the_split(write, train, tmp_path):
    write(SCANS)
    code, lines, warnings = train()
    assert code == 0
    (warning,) = [line for line in warnings if "patients" in line]
    assert warning.startswith("2 of 2 validation cases seem to be of patients that are also in ")
    assert warning.endswith(f"for example p0_visit1 and p0_visit2; add {OPTION}")
    assert lines.count(warning) == 1  # the table at the end has it in a row
    for word in (OPTION, "data.group_by=null"):
        assert not any("patients" in line for line in train(word)[1])


def test_training_warns_of_patients_on_both_sides_of_a_file_of_folds(write, train, tmp_path):
    write(SCANS)
    folds = [{"train": SCANS[:3], "val": [SCANS[3]]}]
    (tmp_path / "folds.json").write_text(json.dumps(folds))
    (warning,) = [line for line in train("data.splits=folds.json")[2] if "patients" in line]
    assert warning.startswith("1 of 1 validation case seem to be of patients that are also in ")
    assert warning.endswith("; see folds.json")
    (line,) = [line for line in train("data.splits=folds.json")[1] if "do not occur" in line]
    assert line == "folds are those of folds.json, in which 6 of 10 cases do not occur"


def test_training_warns_of_patients_that_data_group_by_does_not_group(write, train):
    write(SCANS)
    (warning,) = [line for line in train("data.group_by='(.+)'")[2] if "patients" in line]
    assert warning.startswith("2 of 2 validation cases seem to be of patients that are also in ")


def test_training_warns_of_structures_that_resampling_erases(write, train, tmp_path):
    """A voxel of a class, of which one of eight is kept."""
    write(names := [f"case_{letter}" for letter in "abcdefghij"])
    label = np.zeros_like(make_label(0))
    label[:8, :8, :8], label[9, 9, 9] = 1, 2
    for name in names[3:5]:
        save_volume(tmp_path / "scans" / "labels" / f"{name}.nii.gz", label)
    coarser = train("data.spacing_mm=[2,2,2]")[2]
    (warning,) = [line for line in coarser if "resampling" in line]
    assert warning == (
        "resampling to data.spacing_mm=[2,2,2] leaves less than half of the volume of class_2 of "
        "case_d, class_2 of case_e: set a finer spacing"
    )
    assert not any("resampling" in line for line in train()[2])


def test_training_warns_of_validation_cases_with_the_images_of_training_cases(
    write, train, tmp_path
):
    write(names := [f"case_{letter}" for letter in "abcdefghij"])
    assert not any("the same images" in line for line in train()[2])
    for name in names:
        save_volume(tmp_path / "scans" / "images" / f"{name}.nii.gz", make_image(0))
    (warning,) = [line for line in train()[2] if "the same images" in line]
    assert warning.startswith("2 of 2 validation cases have the same images as training cases, ")


def test_training_warns_of_constant_images(write, train, tmp_path):
    write(names := [f"case_{letter}" for letter in "abcdefghij"])
    for name in names[:2]:
        constant = np.full_like(make_image(0), 5)
        save_volume(tmp_path / "scans" / "images" / f"{name}.nii.gz", constant)
    (warning,) = [line for line in train()[2] if "one value" in line]
    assert warning == "images with one value everywhere: case_a, case_b: check these files"


def test_training_warns_of_labels_where_nothing_was_scanned(write, train, tmp_path):
    write(names := [f"case_{letter}" for letter in "abcdefghij"])
    image = make_image(0)
    image[: len(image) // 2] = 0
    for name in names[:2]:
        save_volume(tmp_path / "scans" / "images" / f"{name}.nii.gz", image)
        save_volume(tmp_path / "scans" / "labels" / f"{name}.nii.gz", np.ones(image.shape, "u1"))
    (warning,) = [line for line in train()[2] if "cuts off" in line]
    assert "of the labels of case_a, case_b, in training and validation" in warning
    assert not any("cuts off" in line for line in train("data.crop=none")[2])


def test_training_says_which_volumes_match_no_pattern(write, train, tmp_path):
    write(SCANS)
    (tmp_path / "scans" / "images" / "p0_visit1.nii.gz").rename("scans/images/p0_visit1.NII.GZ")
    (tmp_path / "scans" / "labels" / "p0_visit1.nii.gz").rename("scans/labels/p0_visit1.NII.GZ")
    (line,) = [line for line in train()[1] if "match no pattern" in line]
    assert line.startswith("hint: dataset: 2 volumes match no pattern of data.images and data.lab")


def test_a_file_of_folds_that_is_not_used_is_named_with_the_reason(write, train, tmp_path):
    write(SCANS)
    file = tmp_path / "scans" / "splits_final.json"
    file.write_text(json.dumps([{"train": SCANS[2:], "val": ["p9_visit1"]}]))
    _, lines, _ = train()
    assert f"ignored: {MISSING}" in lines
    assert any(line.startswith("8 cases for training") for line in lines)
    file.write_text(json.dumps([{"train": SCANS[4:], "val": SCANS[:4]}]))
    assert "ignored scans/splits_final.json: data.group_by is set" in train(OPTION)[1]
    assert not any("splits_final" in line for line in train("fold=none")[1])


def test_an_evaluation_resamples_patients_for_its_intervals(write, tmp_path, capsys):
    write(SCANS)
    for n, name in enumerate(SCANS):  # the same for both scans of a patient
        predicted = np.roll(make_label(n), n // 2, 0)
        save_volume(tmp_path / "predicted" / f"{name}.nii.gz", predicted)

    def evaluate(*words):
        folders = ["predictions=predicted", "references=scans/labels", "output=scores"]
        assert main(["evaluate", *folders, "draw_worst=0", *words]) == 0
        content = json.loads((tmp_path / "scores" / "evaluation.json").read_text())
        return content, "".join(capsys.readouterr())

    option = r"group_by='(.+)_visit\d+'"
    alone, shown = evaluate()
    assert f": add {option} to resample patients for" in shown
    grouped, shown = evaluate(option)
    assert "confidence intervals resample groups: 10 cases in 5 groups\n" in shown
    wide, narrow = (found["mean"]["dice"] for found in (grouped, alone))
    assert wide["mean"] == narrow["mean"]
    assert wide["high"] - wide["low"] > 1.2 * (narrow["high"] - narrow["low"])


def test_a_fold_whose_validation_cases_are_all_invalid_is_a_warning(write, train, tmp_path):
    write(names := ["a", "b", "c"])
    (tmp_path / "scans" / "labels" / "c.nii.gz").write_bytes(b"")
    (tmp_path / "folds.json").write_text(json.dumps([{"train": names[:2], "val": ["c"]}]))
    warnings = train("data.splits=folds.json", "data.invalid_cases=skip")[2]
    assert any(line.startswith("every validation case of fold 0 is invalid") for line in warnings)
