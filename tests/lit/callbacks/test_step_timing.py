import time
from dataclasses import dataclass

import pytest
import torch

from unet3d import nvml
from unet3d.data.augmentation.pipeline import Augment
from unet3d.lit.callbacks import step_timing
from unet3d.lit.callbacks.step_timing import StepSpeed, StepTiming, format_bottleneck
from unet3d.workflows.training.build import build_training


@dataclass(frozen=True, kw_only=True)
class Slow(Augment):
    """Takes its time."""

    def __call__(self, *arguments):
        time.sleep(0.03)
        return super().__call__(*arguments)


def trained(composed, folder, *overrides, augment=None):
    run = build_training(composed("fold=none", *overrides), folder)
    if augment is not None:
        run.train_loader.patches.augment = augment
    run.trainer.fit(run.task, run.train_loader)
    return run.speed


def test_waiting_for_data_is_a_share_of_every_step(composed, tmp_path):
    quick = trained(composed, tmp_path, "trainer.max_steps=4")
    slow = trained(composed, tmp_path, "trainer.max_steps=4", augment=Slow())
    assert len(quick.shares) == len(slow.shares) == 4
    assert all(0 < share < 1 for share in quick.shares + slow.shares)
    assert all(step.waiting >= 0.06 for step in slow.recent)  # two patches
    assert all(step.making["augmenting"] >= 0.06 for step in slow.recent)
    assert slow.summary()["median_data_wait_share"] == sorted(slow.shares[1:])[1]


def test_a_step_of_several_micro_batches_counts_the_waiting_for_all_of_them(composed, tmp_path):
    words = ["trainer.max_steps=1", "trainer.accumulate_grad_batches=2"]
    (step,) = trained(composed, tmp_path, *words, augment=Slow()).recent
    assert 0.12 <= step.waiting < step.whole


def test_what_is_slow_is_said_once(composed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(step_timing, "WINDOW", 3)
    trained(composed, tmp_path, "trainer.max_steps=11", augment=Slow())
    said = [line for line in capsys.readouterr().out.splitlines() if "waiting for data" in line]
    assert len(said) == 1
    assert "augmenting takes 0.0" in said[0]
    assert "try data.num_workers=" in said[0]
    assert said[0].endswith("or augmentation=light or none")


def test_little_waiting_is_not_worth_a_line(composed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(step_timing, "WINDOW", 3)
    monkeypatch.setitem(step_timing.WORTH, "cpu", 0.99)
    trained(composed, tmp_path, "trainer.max_steps=5", augment=Slow())
    assert "waiting" not in capsys.readouterr().out


def test_workers_tell_what_they_took(composed, tmp_path):
    found = trained(composed, tmp_path, "trainer.max_steps=2", "data.num_workers=1")
    assert set(found.recent[-1].making) == {"reading", "augmenting", "collating"}


def step(whole, waiting, **making):
    return StepTiming(whole=whole, waiting=waiting, making=making)


@pytest.mark.parametrize(
    ("timed", "workers", "cause", "said"),
    [
        (
            step(0.30, 0.06, reading=0.01, augmenting=0.04, collating=0.01),
            0,
            "augmenting",
            "waiting for data takes 20 % of a step (0.060 of 0.300 s): augmenting takes 0.040 of "
            "the 0.060 s that making its batches takes; try data.num_workers=1, or "
            "augmentation=light or none",
        ),
        (
            step(0.10, 0.05, reading=0.30, augmenting=0.10, collating=0.0),
            4,
            "reading",
            "reading takes 0.300 of the 0.400 s that making its batches takes; try "
            "data.num_workers=8, or data.cache on a faster disk",
        ),
        (
            step(0.10, 0.05, reading=0.1, augmenting=0.9, collating=0.0),
            8,
            "augmenting",
            "making its batches takes; try augmentation=light or none",
        ),
        (
            step(0.10, 0.05, reading=0.1, augmenting=0.1, collating=0.9),
            8,
            "collating",
            "collating takes 0.900 of the 1.100 s that making its batches takes",
        ),
        (
            step(0.10, 0.05, reading=0.02, augmenting=0.02, collating=0.0),
            2,
            "handing over",
            "2 workers make the batches of a step in 0.020 s, so what is slow is to hand them over",
        ),
    ],
)
def test_the_line_names_the_slow_part_and_what_may_help(timed, workers, cause, said):
    found, line = format_bottleneck(timed, workers, most_workers=8)
    assert found == cause
    assert line.endswith(said)
    assert "\n" not in line


def test_the_gpus_use_is_asked_for_once_a_second_and_missing_where_nobody_tells(monkeypatch):
    told, gpu = iter([40, 60]), torch.device("cuda")
    monkeypatch.setattr(nvml, "get_utilization", lambda device: next(told))
    steps = StepSpeed(num_workers=0)
    use = [steps._gpu_use(gpu, now)["speed/gpu_use_percent"] for now in (10.0, 10.5, 11.0)]
    assert use == [40.0, 40.0, 60.0]
    monkeypatch.setattr(nvml, "get_utilization", lambda device: None)
    assert StepSpeed(num_workers=0)._gpu_use(gpu, 10.0) == {}
    assert StepSpeed(num_workers=0)._gpu_use(torch.device("cpu"), 10.0) == {}
