"""Runs and evaluations with the metrics of the config group."""

import json

import numpy as np
import pytest
import torch

from unet3d.__main__ import main
from unet3d.commands.train import build_training
from unet3d.config.compose import list_options
from unet3d.errors import UsageError
from unet3d.training.module import crop_foreground
from unet3d.types import IGNORE_LABEL


def test_a_run_validates_with_every_metric(composed, tmp_path):
    options = [name for name in list_options("metrics") if name != "none"]
    regions = "data.regions={whole:[1,2,3],core:[2,3],inner:[3]}"
    run = build_training(composed(f"metrics=[{','.join(options)}]", regions), tmp_path)
    run.trainer.fit(run.module, run.data)
    logged = {name.split("/")[1] for name in run.trainer.callback_metrics if "val/" in name}
    assert logged == {
        *("loss", "dice", "iou", "hd95_mm", "volume_ratio", "volume_error", "cldice", "ece"),
        *("lesion_f1", "lesion_sensitivity", "lesion_precision"),
    }


def test_the_validation_loss_is_that_of_the_patch_around_the_foreground(composed, tmp_path):
    run = build_training(composed(), tmp_path)
    run.trainer.fit(run.module, run.data)
    (volume,), module = run.data.validation, run.module.eval()
    image, label = (torch.from_numpy(np.array(x))[None] for x in (volume.image, volume.label))
    patch, labels = crop_foreground(image, label, run.settings.data.patch_size, 4)
    assert patch.shape[2:] == labels.shape[1:] == run.settings.data.patch_size
    with torch.no_grad():
        expected = float(module.loss(module.model(patch.float()), labels))
    assert float(run.trainer.callback_metrics["val/loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [(2, 4, 4), (12, 4, 4)])
def test_a_patch_is_around_the_middle_of_the_foreground_and_padded(size):
    label = torch.zeros(1, 8, 8, 8, dtype=torch.uint8)
    label[0, 5:7, 6, 7], label[0, 0, 0, 0] = 1, IGNORE_LABEL
    label[0, 0, 0, 1] = 254  # what some classes of a case are not annotated in
    image, labels = crop_foreground(torch.rand(1, 2, 8, 8, 8), label, size, 2)
    assert (image.shape[1:], labels.shape[1:]) == ((2, *size), size)
    assert (labels == 1).sum() == 2


@pytest.mark.slow
def test_a_metric_chooses_the_best_checkpoint_and_is_in_the_evaluation(unet3d, tmp_path, capsys):
    words = ["metrics=lesions", "callbacks.best_checkpoint.monitor=val/lesion_f1"]
    assert unet3d(*words, "evaluation.enabled=true", "hydra.run.dir=run") == 0
    result = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    assert "lesion_f1" in result["mean"]
    assert "lesion_f1" in result["definitions"]
    folder = tmp_path / "run" / "validation"
    paths = [f"predictions={folder}", f"references={folder}", "output=scores", "draw_worst=0"]
    assert main(["evaluate", *paths, "metrics=calibration"]) == 2
    assert "it is a metric of validation" in capsys.readouterr().err


def test_something_else_than_a_metric_is_refused(composed, tmp_path):
    with pytest.raises(UsageError, match=r"metrics.x: ReLU is not a metric: it needs `scores`"):
        build_training(composed("+metrics.x._target_=torch.nn.ReLU"), tmp_path)
