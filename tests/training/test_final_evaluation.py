"""The best checkpoint is evaluated on whole validation cases when training ends."""

import json
import shutil
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest

from tests.contract.helpers.pairs import write_pairs
from unet3d.__main__ import main
from unet3d.checkpoint_file import load_checkpoint
from unet3d.data.case import Case
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.data.preprocessing.statistics import Statistics
from unet3d.inference.postprocess import keep_largest_component
from unet3d.inference.predictor import Predictor
from unet3d.training import final_evaluation
from unet3d.training.final_evaluation import (
    choose_postprocessing,
    evaluate_best_checkpoint,
    find_single_components,
)


def read_voxels(path):
    return np.asarray(nibabel.load(path).dataobj)


@pytest.mark.slow
def test_a_run_ends_with_the_labels_that_predict_writes(unet3d, tmp_path, capsys):
    data = tmp_path / "data"
    words = ["trainer.max_steps=4", f"data.root={data}", "augmentation.flip_p=0.5"]
    assert unet3d(*words) == 0
    words += ["resume=auto", "evaluation.enabled=true", "evaluation.tta=true"]
    words.append("evaluation.tolerance_mm=50")
    assert unet3d(*words) == 0  # what the checkpoint does not say yet
    *_, line = [line for line in capsys.readouterr().out.splitlines() if "Dice, mean" in line]
    assert line.endswith("(validation, best of 2 checkpoints)")
    run = tmp_path / "run"
    warnings = json.loads((run / "report.json").read_text())["warnings"]
    assert [line for line in warnings if "accepts errors of 50 mm" in line]
    assert len(set(warnings)) == len(warnings)
    (images,) = data.rglob("imagesTr")
    output = tmp_path / "predictions"
    assert main(["predict", f"checkpoint={run}", f"input={images}", f"output={output}"]) == 0
    assert (
        "tta=auto: mirroring the axes that training flipped: [0, 1, 2]" in capsys.readouterr().out
    )
    predictions = sorted((run / "validation").iterdir())
    assert predictions
    for path in predictions:
        assert np.array_equal(read_voxels(path), read_voxels(output / path.name))


@pytest.mark.parametrize(
    ("voxels_of_reference", "annotated", "chosen"),
    [
        ([np.s_[1:4, 1:4, 1:4]], np.s_[:], [1]),
        ([np.s_[1:4, 1:4, 1:4], (6, 6, 6)], np.s_[:], []),
        ([(0, 7, 0)], np.s_[:], []),  # Dice is 0, and cannot be lower
        ([np.s_[2, 1:4, 1:4], (6, 6, 6)], np.s_[2:7:4], []),  # others are ignored
    ],
)
def test_the_largest_component_is_kept_where_it_is_found_and_dice_is_not_lower(
    tmp_path, voxels_of_reference, annotated, chosen
):
    """A class has two components in the prediction, the second of one voxel."""
    prediction, reference = np.zeros((2, 8, 8, 8), np.uint8)
    prediction[1:4, 1:4, 1:4] = prediction[6, 6, 6] = 1
    for index in voxels_of_reference:
        reference[index] = 1
    if annotated != np.s_[:]:
        prediction[0, 5::2, ::2] = 1
    skipped = np.full_like(reference, 255)
    skipped[annotated] = reference[annotated]
    reference = skipped
    folder = tmp_path / "validation"
    folder.mkdir()
    for name, array in {"label": reference, "validation/case": prediction}.items():
        nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), tmp_path / f"{name}.nii.gz")
    case = Case(name="case", images=(), label=tmp_path / "label.nii.gz")
    statistics = Statistics(spacing_mm=(1, 1, 1), extent_mm=(8, 8, 8), percentiles=())
    volumes = [CachedVolume(case, tmp_path, (8, 8, 8), frozenset({1}), statistics)]
    preprocessing = Preprocessing(num_classes=2, ignore_labels=(255,))
    assert choose_postprocessing(volumes, [1], folder, preprocessing) == chosen
    kept = reference if chosen else prediction
    assert np.array_equal(read_voxels(folder / "case.nii.gz"), kept)


@pytest.mark.slow
def test_a_case_that_cannot_be_predicted_costs_no_other_case(unet3d, tmp_path, monkeypatch):
    prepare = Predictor.prepare

    def fail_first(self, task):
        monkeypatch.setattr(Predictor, "prepare", prepare)
        task.labels.touch()  # as an earlier evaluation did
        raise MemoryError("too large")

    monkeypatch.setattr(Predictor, "prepare", fail_first)
    assert unet3d("evaluation.enabled=true", "data.layout.num_cases=10", "logger=none") == 1
    errors = json.loads((tmp_path / "run" / "report.json").read_text())["evaluation"]["errors"]
    scored = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())["cases"]
    assert (len(errors), len(scored)) == (1, 1)
    assert not errors.keys() & scored.keys()


@pytest.mark.parametrize(("has_ignored", "labels"), [(False, [1]), (True, [])])
def test_one_component_proves_nothing_where_others_may_not_be_annotated(has_ignored, labels):
    label = np.zeros((8, 8, 8), np.uint8)
    label[2:5, 2:5, 2:5] = 1
    volume = SimpleNamespace(label=label, has_ignored=has_ignored)
    dataset = SimpleNamespace(classes=("background", "cell"), regions=None)
    run = SimpleNamespace(data=SimpleNamespace(dataset=dataset, training=[volume] * 10))
    assert find_single_components(run)[0] == labels


def test_the_report_says_why_regions_keep_all_components(tmp_path):
    dataset = SimpleNamespace(classes=("background", "rim", "core"), regions={"whole": (1, 2)})
    data = SimpleNamespace(dataset=dataset, training=[], validation=[])
    run, lines = SimpleNamespace(folder=tmp_path, data=data), []
    found = evaluate_best_checkpoint(run, lines.append)["postprocessing"]
    assert found["evidence"] == "regions overlap: none is reduced to its largest component"
    assert (found["largest_component"], len(lines)) == ([], 1)


def draw_components(number):
    """Draw an organ, a rare one, a lesion of two components, and an organ with a stray voxel."""
    label = np.zeros((16, 16, 16), np.uint8)
    label[2:7, 2:7, 2:7] = 1
    if number < 4:
        label[9:11, 2:4, 2:4] = 2
    label[12:14, 12:14, 2:4] = label[2:4, 12:14, 12:14] = 3
    label[8:14, 2:8, 8:14] = label[0, 0, 0] = 4
    return label


@pytest.fixture
def train_on_components(tmp_path):
    words = ["train", *write_pairs(tmp_path / "pairs", draw_components), "model.width=2"]
    words += ["model.depth=2", "data.num_classes=5"]
    words += ["data.classes=[background,organ,rare,lesion,speckled]", "logger=none"]
    return words


@pytest.mark.slow
def test_several_training_labels_are_searched_for_components_at_a_time(
    train_on_components, tmp_path, monkeypatch
):
    pair = Barrier(2)

    def meet_another(*arguments):
        with suppress(BrokenBarrierError):  # the last of five labels is alone
            met.append(pair.wait(timeout=2))
        return keep_largest_component(*arguments)

    met: list[int] = []
    monkeypatch.setattr(final_evaluation, "count_usable_cores", lambda: 2)
    monkeypatch.setattr(final_evaluation, "keep_largest_component", meet_another)
    words = [*train_on_components, "fold=none", f"hydra.run.dir={tmp_path / 'all'}"]
    assert main([*words, "evaluation.enabled=true"]) == 0
    assert sorted(met) == [0, 0, 1, 1]


def test_a_run_on_all_cases_keeps_the_largest_component_of_what_is_one_in_the_training_labels(
    train_on_components, tmp_path, capsys
):
    words = [*train_on_components, "fold=none", f"hydra.run.dir={tmp_path / 'all'}"]
    assert main(words) == 0
    assert "largest component" not in capsys.readouterr().out
    last = tmp_path / "all" / "checkpoints" / "last.ckpt"
    member = shutil.copy(last, last.with_name("best-step=000001.ckpt"))  # as top_k keeps
    words += ["resume=auto", "evaluation.enabled=true"]
    assert main(words) == 0  # finished, but not evaluated
    kept = "predictions keep the largest component alone of organ, speckled (report.json says why)"
    assert kept in capsys.readouterr().out.splitlines()
    report = json.loads((tmp_path / "all" / "report.json").read_text())
    assert report["postprocessing"]["evidence"] == (
        "5 training labels: in every case with the class, one component holds at least 99% of its "
        "voxels (organ 5, speckled 5)"
    )
    assert report["postprocessing"]["largest_component"] == ["organ", "speckled"]
    for path in (last, member):
        kept = load_checkpoint(path)["unet3d"]["keep_largest_component"]
        assert kept == ["organ", "speckled"]
