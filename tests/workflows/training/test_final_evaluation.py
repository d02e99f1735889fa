"""The best checkpoint is evaluated on whole validation cases when training ends."""

import json

import nibabel
import numpy as np
import pytest

from unet3d.cli.main import main
from unet3d.data.case import Case
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.workflows.training.final_evaluation import choose_postprocessing


def read_voxels(path):
    return np.asarray(nibabel.load(path).dataobj)


def test_a_run_ends_with_the_labels_that_predict_writes(unet3d, tmp_path, capsys):
    data = tmp_path / "data"
    assert unet3d("trainer.max_steps=4", "evaluation.enabled=true", f"data.root={data}") == 0
    assert "surface Dice" in capsys.readouterr().out
    run = tmp_path / "run"
    report = json.loads((run / "report.json").read_text())
    assert {"dice", "hd95_mm", "surface_dice"} <= set(report["evaluation"]["mean"])
    written = json.loads((run / "evaluation" / "evaluation.json").read_text())
    assert written["mean"] == report["evaluation"]["mean"]
    (images,) = data.rglob("imagesTr")
    output = tmp_path / "predictions"
    assert main(["predict", f"checkpoint={run}", f"input={images}", f"output={output}"]) == 0
    predictions = sorted((run / "validation").iterdir())
    assert predictions
    for path in predictions:
        assert np.array_equal(read_voxels(path), read_voxels(output / path.name))


@pytest.mark.parametrize(("reference_has_both", "chosen"), [(False, [1]), (True, [])])
def test_the_largest_component_is_kept_where_that_raises_dice(tmp_path, reference_has_both, chosen):
    """A class has two components in the prediction, and one or two in the reference."""
    prediction = np.zeros((8, 8, 8), np.uint8)
    prediction[1:4, 1:4, 1:4] = 1
    prediction[6, 6, 6] = 1
    reference = prediction.copy()
    reference[6, 6, 6] = reference_has_both
    folder = tmp_path / "validation"
    folder.mkdir()
    for name, array in {"label": reference, "validation/case": prediction}.items():
        nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), tmp_path / f"{name}.nii.gz")
    case = Case(name="case", images=(), label=tmp_path / "label.nii.gz")
    volumes = [CachedVolume(case, tmp_path)]
    assert choose_postprocessing(volumes, range(1, 3), folder) == chosen
    assert np.array_equal(read_voxels(folder / "case.nii.gz"), reference)
