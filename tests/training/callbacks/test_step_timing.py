import time
from dataclasses import dataclass

import pytest
import torch

from unet3d import peak_memory
from unet3d.commands.train import build_training
from unet3d.data.augmentation.pipeline import Augment
from unet3d.training.callbacks import step_records
from unet3d.training.callbacks.step_records import StepTimer, format_bottleneck


@dataclass(frozen=True, kw_only=True)
class Slow(Augment):
    """Augment slowly."""

    def __call__(self, *arguments):
        time.sleep(0.03)
        return super().__call__(*arguments)


def test_waiting_for_data_is_measured_and_its_cause_printed_once(
    composed, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(step_records, "WINDOW", 3)
    run = build_training(composed("fold=none", "trainer.max_steps=8"), tmp_path)
    run.data.train_loader.patches.augment = Slow()
    run.trainer.fit(run.module, run.data.train_loader)
    speed = run.callbacks.timing
    waits = [share * seconds for share, seconds in zip(speed.shares, speed.seconds, strict=True)]
    assert len(waits) == 8
    assert all(0.0599 <= w < s for w, s in zip(waits, speed.seconds, strict=True))  # 2 patches
    assert speed.recent["augmenting"] >= 0.06  # since the seventh step
    assert speed.recent["waiting"] == pytest.approx(waits[-1])
    assert speed.recent["total"] == pytest.approx(speed.seconds[-1])
    assert speed.summarize()["median_data_wait_fraction"] == sorted(speed.shares[1:])[3]
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "waiting for data" in line]
    assert "augmenting takes 0.0" in line
    assert line.endswith("or augmentation=light or none")


@pytest.mark.parametrize(
    ("total", "waiting", "parts", "workers", "end"),
    [
        (
            *(0.30, 0.06, (0.01, 0.04, 0.01), 0),
            "waiting for data takes 20% of a step (0.060 of 0.300 s): augmenting takes 0.040 of "
            "the 0.060 s to load its batches; try data.num_workers=1, or "
            "augmentation=light or none",
        ),
        (*(0.10, 0.05, (0.1, 0.9, 0.0), 8), "its batches; try augmentation=light or none"),
        (
            *(0.10, 0.05, (0.1, 0.1, 0.9), 8),
            "collating takes 0.900 of the 1.100 s to load its batches",
        ),
    ],
)
def test_the_message_names_the_slow_part_and_what_to_try(total, waiting, parts, workers, end):
    loading = dict(zip(("reading", "augmenting", "collating"), parts, strict=True))
    step = {"total": total, "waiting": waiting, **loading}
    assert format_bottleneck(step, workers, max_workers=8).endswith(end)


def test_gpu_utilization_is_queried_once_a_second_and_omitted_if_unknown(monkeypatch):
    samples, gpu = iter([40, 60]), torch.device("cuda")
    monkeypatch.setattr(peak_memory, "get_utilization", lambda device: next(samples))
    speed = StepTimer(num_workers=0)
    use = [
        speed._query_gpu(gpu, now)["speed/gpu_utilization_percent"] for now in (10.0, 10.5, 11.0)
    ]
    assert use == [40.0, 40.0, 60.0]
    monkeypatch.setattr(peak_memory, "get_utilization", lambda device: None)
    assert StepTimer(num_workers=0)._query_gpu(gpu, 10.0) == {}
    assert StepTimer(num_workers=0)._query_gpu(torch.device("cpu"), 10.0) == {}
