import time
from dataclasses import dataclass

import pytest
import torch

from unet3d import nvml
from unet3d.commands.train import build_training
from unet3d.data.augmentation.pipeline import Augment
from unet3d.training.callbacks import step_timing
from unet3d.training.callbacks.step_timing import StepDuration, StepTimer, format_bottleneck


@dataclass(frozen=True, kw_only=True)
class Slow(Augment):
    """Augment slowly."""

    def __call__(self, *arguments):
        time.sleep(0.03)
        return super().__call__(*arguments)


def train(composed, folder, *overrides, augment=None):
    run = build_training(composed("fold=none", *overrides), folder)
    if augment is not None:
        run.data.train_loader.patches.augment = augment
    run.trainer.fit(run.module, run.data.train_loader)
    return run.callbacks.timing


def test_waiting_for_data_is_measured_in_every_step(composed, tmp_path):
    quick = train(composed, tmp_path, "trainer.max_steps=4")
    slow = train(composed, tmp_path, "trainer.max_steps=4", augment=Slow())
    assert len(quick.shares) == len(slow.shares) == 4
    assert all(0 < share < 1 for share in quick.shares + slow.shares)
    assert all(step.waiting >= 0.06 for step in slow.recent)  # two patches
    assert all(step.loading["augmenting"] >= 0.06 for step in slow.recent)
    assert slow.summarize()["median_data_wait_fraction"] == sorted(slow.shares[1:])[1]


def test_a_step_counts_the_waiting_for_all_of_its_micro_batches(composed, tmp_path):
    words = ["trainer.max_steps=1", "trainer.accumulate_grad_batches=2"]
    (step,) = train(composed, tmp_path, *words, augment=Slow()).recent
    assert 0.12 <= step.waiting < step.total


def test_the_cause_of_waiting_is_printed_once(composed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(step_timing, "WINDOW", 3)
    train(composed, tmp_path, "trainer.max_steps=11", augment=Slow())
    lines = [line for line in capsys.readouterr().out.splitlines() if "waiting for data" in line]
    assert len(lines) == 1
    assert "augmenting takes 0.0" in lines[0]
    assert "try data.num_workers=" in lines[0]
    assert lines[0].endswith("or augmentation=light or none")


def test_short_waiting_prints_nothing(composed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(step_timing, "WINDOW", 3)
    monkeypatch.setitem(step_timing.MAX_WAIT_FRACTION, "cpu", 0.99)
    train(composed, tmp_path, "trainer.max_steps=5", augment=Slow())
    assert "waiting" not in capsys.readouterr().out


def test_workers_report_the_seconds_of_each_part(composed, tmp_path):
    speed = train(composed, tmp_path, "trainer.max_steps=2", "data.num_workers=1")
    assert set(speed.recent[-1].loading) == {"reading", "augmenting", "collating"}


def step(total, waiting, **loading):
    return StepDuration(total=total, waiting=waiting, loading=loading)


@pytest.mark.parametrize(
    ("timing", "workers", "cause", "end"),
    [
        (
            step(0.30, 0.06, reading=0.01, augmenting=0.04, collating=0.01),
            0,
            "augmenting",
            "waiting for data takes 20% of a step (0.060 of 0.300 s): augmenting takes 0.040 of "
            "the 0.060 s to load its batches; try data.num_workers=1, or "
            "augmentation=light or none",
        ),
        (
            step(0.10, 0.05, reading=0.30, augmenting=0.10, collating=0.0),
            4,
            "reading",
            "reading takes 0.300 of the 0.400 s to load its batches; try "
            "data.num_workers=8, or data.cache on a faster disk",
        ),
        (
            step(0.10, 0.05, reading=0.1, augmenting=0.9, collating=0.0),
            8,
            "augmenting",
            "to load its batches; try augmentation=light or none",
        ),
        (
            step(0.10, 0.05, reading=0.1, augmenting=0.1, collating=0.9),
            8,
            "collating",
            "collating takes 0.900 of the 1.100 s to load its batches",
        ),
        (
            step(0.10, 0.05, reading=0.02, augmenting=0.02, collating=0.0),
            2,
            "transfer",
            "2 workers load the batches of a step in 0.020 s, so the bottleneck is transferring "
            "batches from the workers",
        ),
    ],
)
def test_the_message_names_the_slow_part_and_what_to_try(timing, workers, cause, end):
    part, line = format_bottleneck(timing, workers, max_workers=8)
    assert part == cause
    assert line.endswith(end)
    assert "\n" not in line


def test_gpu_utilization_is_queried_once_a_second_and_omitted_if_unknown(monkeypatch):
    samples, gpu = iter([40, 60]), torch.device("cuda")
    monkeypatch.setattr(nvml, "get_utilization", lambda device: next(samples))
    speed = StepTimer(num_workers=0)
    use = [
        speed._query_gpu(gpu, now)["speed/gpu_utilization_percent"] for now in (10.0, 10.5, 11.0)
    ]
    assert use == [40.0, 40.0, 60.0]
    monkeypatch.setattr(nvml, "get_utilization", lambda device: None)
    assert StepTimer(num_workers=0)._query_gpu(gpu, 10.0) == {}
    assert StepTimer(num_workers=0)._query_gpu(torch.device("cpu"), 10.0) == {}
