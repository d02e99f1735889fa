import time
from dataclasses import dataclass

import pytest

from unet3d.commands.train import build_training
from unet3d.data.augmentation.pipeline import Augment
from unet3d.training.datamodule import Prefetch


@dataclass(frozen=True, kw_only=True)
class Slow(Augment):
    """Augment slowly."""

    def __call__(self, *arguments):
        time.sleep(0.03)
        return super().__call__(*arguments)


def test_waiting_for_data_is_measured(composed, tmp_path):
    run = build_training(composed("fold=none", "trainer.max_steps=4"), tmp_path)
    run.data.train_loader.patches.augment = Slow()
    run.trainer.fit(run.module, run.data.train_loader)
    speed = run.callbacks.timing
    waits = [share * seconds for share, seconds in zip(speed.shares, speed.seconds, strict=True)]
    assert len(waits) == 4
    assert all(0.0599 <= w < s for w, s in zip(waits, speed.seconds, strict=True))  # 2 patches
    assert speed.summarize()["median_data_wait_fraction"] == sorted(speed.shares[1:])[1]


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_a_gpu_the_next_batch_is_prefetched(composed, tmp_path, num_workers):
    overrides = ["trainer.accelerator=gpu", "trainer.max_steps=12", "augmentation=nnunet"]
    overrides += ["fold=none", f"data.num_workers={num_workers}"]
    run = build_training(composed(*overrides), tmp_path)
    assert [c for c in run.trainer.callbacks if isinstance(c, Prefetch)]
    run.trainer.fit(run.module, run.data.train_loader)
    assert all(0 <= share < 1 for share in run.callbacks.timing.shares[1:])
