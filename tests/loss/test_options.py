"""Every file of conf/loss trains with an ignore label, deep supervision and regions."""

from pathlib import Path

import pytest

from unet3d.commands.train import build_training
from unet3d.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = sorted(file.stem for file in (ROOT / "conf" / "loss").glob("*.yaml"))
REGIONS = "data.regions={whole:[1,2,3],core:[2,3],inner:[3]}"
NO_REGIONS = {"cross_entropy": "CrossEntropyLoss takes one class per voxel, not data.regions"}


def train(settings, folder):
    run = build_training(settings, folder)
    run.trainer.fit(run.module, run.data)
    assert run.trainer.global_step > 0
    return run


@pytest.mark.parametrize("option", OPTIONS)
def test_a_run_with_each_option_is_estimated_and_trains(composed, tmp_path, option):
    given = "model.deep_supervision=true", "data.ignore_label=9", "memory.estimate=true"
    assert train(composed(f"loss={option}", *given), tmp_path).estimate.peak.allocated > 0


@pytest.mark.parametrize("option", OPTIONS)
def test_a_run_with_each_option_learns_regions_or_says_why_not(composed, tmp_path, option):
    settings = composed(f"loss={option}", REGIONS)
    if option in NO_REGIONS:
        with pytest.raises(UsageError, match=NO_REGIONS[option]):
            build_training(settings, tmp_path)
    else:
        train(settings, tmp_path)


@pytest.mark.parametrize("option", ["voxel_loss=focal", "voxel_loss=topk", "label_smoothing=0.1"])
def test_a_run_with_each_voxel_loss_is_estimated_and_trains(composed, tmp_path, option):
    words = [f"loss.{option}", "loss.class_weights=[0.1,1,1,2]", "memory.estimate=true"]
    run = train(composed(*words, "model.deep_supervision=true"), tmp_path)
    assert run.estimate.peak.allocated > 0
