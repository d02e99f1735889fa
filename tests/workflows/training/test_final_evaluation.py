"""The best checkpoint on whole validation cases, once training is over."""

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest

from unet3d.cli.main import main
from unet3d.data.case import Case
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.workflows.training.final_evaluation import choose_postprocessing, dice


def voxels(path):
    return np.asarray(nibabel.load(path).dataobj)


def test_a_run_ends_with_what_predict_and_evaluate_would_say(unet3d, tmp_path, capsys):
    assert unet3d("trainer.max_steps=4", "evaluation.enabled=true") == 0
    assert "surface Dice" in capsys.readouterr().out
    run = tmp_path / "run"
    report = json.loads((run / "report.json").read_text())
    assert {"dice", "hd95_mm", "surface_dice"} <= set(report["evaluation"]["mean"])
    left = sorted((run / "validation").iterdir())
    images = next(Path(report["config"]["data"]["root"]).rglob("imagesTr"))
    words = [f"checkpoint={run}", f"input={images}", f"output={tmp_path / 'again'}", "device=cpu"]
    assert main(["predict", *words]) == 0
    for path in left:
        assert np.array_equal(voxels(path), voxels(tmp_path / "again" / path.name))


@pytest.mark.parametrize(("beside", "kept"), [(0, [1]), (1, [])])
def test_the_largest_piece_is_kept_where_that_is_better_on_validation(tmp_path, beside, kept):
    """A class has a second piece in the prediction; in the reference too, or not."""
    prediction = np.zeros((8, 8, 8), np.uint8)
    prediction[1:4, 1:4, 1:4] = 1
    prediction[6, 6, 6] = 1
    reference = prediction.copy()
    reference[6, 6, 6] = beside
    folder = tmp_path / "validation"
    folder.mkdir()
    files = {"label": reference, "validation/case": prediction}
    for name, array in files.items():
        nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), tmp_path / f"{name}.nii.gz")
    case = Case(name="case", images=(), label=tmp_path / "label.nii.gz")
    volumes = [CachedVolume(case, tmp_path)]
    assert choose_postprocessing(volumes, range(1, 3), folder) == kept
    left = voxels(folder / "case.nii.gz")
    assert left[6, 6, 6] == beside
    assert dice(left, reference, 1) == 1
