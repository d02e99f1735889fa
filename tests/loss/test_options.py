"""Every file of conf/loss trains with an ignore label, deep supervision and regions."""

from pathlib import Path

import pytest

from unet3d.commands.train import build_training
from unet3d.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = sorted(file.stem for file in (ROOT / "conf" / "loss").glob("*.yaml"))
REGIONS = "data.regions={whole:[1,2,3],core:[2,3],inner:[3]}"
VARIANTS = {
    **{option: (f"loss={option}", REGIONS) for option in OPTIONS},
    "cross_entropy": ("loss=cross_entropy",),
    "topk": ("loss.voxel_loss=topk", "loss.class_weights=[0.1,1,1,2]"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_is_estimated_and_trains(composed, tmp_path, name):
    given = "model.deep_supervision=true", "data.ignore_label=9", "memory.estimate=true"
    run = build_training(composed(*VARIANTS[name], *given), tmp_path)
    run.trainer.fit(run.module, run.data)
    assert run.trainer.global_step > 0
    assert run.estimate.peak.allocated > 0


def test_a_loss_of_classes_refuses_regions(composed, tmp_path):
    with pytest.raises(UsageError, match="CrossEntropyLoss takes one class per voxel, not data"):
        build_training(composed("loss=cross_entropy", REGIONS), tmp_path)
