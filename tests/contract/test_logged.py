"""What a run writes: curves, pictures, the report, checkpoints, the evaluation."""

import csv

import pytest

from tests.contract.helpers.pairs import write_pairs
from tests.contract.helpers.runs import (
    read_curve,
    read_events,
    read_report,
    read_step,
    read_steps,
)

CLASSES = ("ball", "tube", "box")


@pytest.mark.parametrize(
    "tag",
    [
        *("train/loss", "train/lr"),
        *("speed/step_seconds", "speed/volumes_per_second", "speed/data_wait_fraction"),
        *("memory/step_peak_resident_mib", "memory/estimated_step_peak_mib"),
        *(f"memory/{phase}_peak_resident_mib" for phase in ("forward", "backward", "optimizer")),
    ],
)
def test_tensorboard_has_a_value_of_every_step(trained, tag):
    assert read_steps(trained.folder, tag) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "tag",
    [
        *("val/dice", "val/iou", "val/hd95_mm", "memory/validation_peak_resident_mib"),
        *(f"val/{score}/{name}" for score in ("dice", "volume_ratio") for name in CLASSES),
    ],
)
def test_tensorboard_has_a_value_of_every_validation(trained, tag):
    assert read_steps(trained.folder, tag) == [1, 3, 5]


def test_the_peak_of_a_step_is_the_highest_of_its_phases(trained):
    events = read_events(trained.folder)
    phases = [
        [event.value for event in events.Scalars(f"memory/{phase}_peak_resident_mib")]
        for phase in ("forward", "backward", "optimizer")
    ]
    steps = [event.value for event in events.Scalars("memory/step_peak_resident_mib")]
    assert steps == [max(peaks) for peaks in zip(*phases, strict=True)]


def test_tensorboard_shows_validation_cases_and_the_memory_of_a_step(trained):
    images = read_events(trained.folder).Tags()["images"]
    assert any("case_000" in tag for tag in images)
    assert any(tag.startswith("memory/") for tag in images)


def test_the_csv_file_and_tensorboard_have_the_same_loss(trained):
    events = read_events(trained.folder).Scalars("train/loss")
    rows = read_curve(trained.folder, "train/loss")
    assert [step for step, _ in rows] == [event.step for event in events]
    assert [float(value) for _, value in rows] == pytest.approx([event.value for event in events])


def test_the_report_has_scores_memory_speed_precision_and_versions(trained):
    report = read_report(trained.folder)
    assert (report["finished"], report["steps"], report["parameters"]) == (True, 6, 88_860)
    assert {"train/loss", "val/dice", "val/dice/ball", "val/hd95_mm"} <= report["metrics"].keys()
    assert {"estimated", "first_step", "steady_step", "validation"} == report["memory"].keys()
    assert report["memory"]["steady_step"]["resident"] > 2**26
    assert {"median_step_seconds", "median_data_wait_fraction"} <= report["speed"].keys()
    assert report["precision"] == {"requested": "32", "used": "32"}
    assert {"torch", "unet3d"} <= report["versions"].keys()
    assert report["config"]["data"]["num_classes"] == 4


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", set()),
        ("csv", {"csv/metrics.csv", "csv/hparams.yaml"}),
        ("tensorboard", {"tensorboard/events"}),
    ],
)
def test_a_logger_writes_its_files_and_no_others(train, tmp_path, choice, expected):
    assert train(f"logger={choice}", "fold=none").code == 0
    written = {
        f"{folder}/{path.name.split('.out.')[0]}"
        for folder in ("csv", "tensorboard")
        for path in (tmp_path / "run" / folder).glob("*.*")
    }
    assert written == expected


@pytest.mark.parametrize(("mode", "choose"), [("max", max), ("min", min)])
def test_best_is_the_checkpoint_of_the_best_validation_and_last_that_of_the_last_step(
    train, tmp_path, mode, choose
):
    option = f"callbacks.best_checkpoint.mode={mode}"
    assert train("trainer.max_steps=5", "logger=csv", option).code == 0
    dice = {step: float(value) for step, value in read_curve(tmp_path / "run", "val/dice")}
    assert min(dice.values()) < max(dice.values())
    first = next(step for step in dice if dice[step] == choose(dice.values()))
    checkpoints = tmp_path / "run" / "checkpoints"
    assert read_step(checkpoints / "best.ckpt") == first + 1
    assert read_step(checkpoints / "last.ckpt") == 5


def test_the_evaluation_scores_every_class_of_every_validation_case(trained):
    with (trained.folder / "evaluation" / "evaluation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["case"], row["class"]) for row in rows] == [("case_000", c) for c in CLASSES]
    assert all(0 <= float(row["dice"]) <= 1 and float(row["hd95_mm"]) > 0 for row in rows)
    assert (trained.folder / "validation" / "case_000.nii.gz").exists()


def test_the_report_says_what_was_evaluated_and_which_components_predictions_keep(trained):
    report = read_report(trained.folder)
    assert report["evaluation"]["checkpoint"].endswith("best.ckpt")
    assert report["evaluation"]["best_of"] == 3
    assert {"dice", "hd95_mm", "surface_dice"} <= report["evaluation"]["mean"].keys()
    assert "validation case" in report["postprocessing"]["evidence"]
    assert set(report["postprocessing"]["largest_component"]) <= set(CLASSES)


def test_a_class_that_no_case_has_is_a_warning_of_the_report(unet3d, tmp_path):
    names = "data.classes=[background,front,back,ghost]"
    data = write_pairs(tmp_path / "data")
    assert unet3d("train", *data, "data.num_classes=4", names, "logger=none").code == 0
    warnings = read_report(tmp_path / "run")["warnings"]
    assert [warning for warning in warnings if "ghost" in warning and "case" in warning]
