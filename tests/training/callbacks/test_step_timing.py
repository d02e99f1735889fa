import time
from dataclasses import dataclass

from unet3d.commands.train import build_training
from unet3d.data.augmentation.pipeline import Augment


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
