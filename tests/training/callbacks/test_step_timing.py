import time
from dataclasses import dataclass

import torch

from unet3d import peak_memory
from unet3d.commands.train import build_training
from unet3d.data.augmentation.pipeline import Augment
from unet3d.training.callbacks.step_records import StepTimer


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


def test_gpu_utilization_is_queried_once_a_second_and_omitted_if_unknown(monkeypatch):
    samples, gpu = iter([40, 60, None]), torch.device("cuda")
    monkeypatch.setattr(peak_memory, "get_utilization", lambda device: next(samples))
    speed = StepTimer()
    use = [
        speed._query_gpu(gpu, now)["speed/gpu_utilization_percent"] for now in (10.0, 10.5, 11.0)
    ]
    assert use == [40.0, 40.0, 60.0]
    assert speed._query_gpu(gpu, 12.0) == {}
    assert StepTimer()._query_gpu(torch.device("cpu"), 10.0) == {}
