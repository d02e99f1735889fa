from mmap import PAGESIZE, mmap

import lightning.pytorch as pl
import pytest

from unet3d.commands.train import build_training
from unet3d.memory.peak import PeakMeter
from unet3d.memory.record import MemoryRecord
from unet3d.training.callbacks.step_memory import StepMemory
from unet3d.units import MIB


class RecordMetrics(pl.Callback):
    """Record what each step logs."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, *_):
        self.steps.append({k: float(v) for k, v in trainer.logged_metrics.items()})


def train(composed, tmp_path, *overrides, before_step=None, meter=None):
    run = build_training(composed(*overrides), tmp_path)
    if meter is not None:
        run.callbacks.memory.meter = meter
    logged = RecordMetrics()
    run.trainer.callbacks.append(logged)
    if before_step is not None:
        run.module.model.register_forward_pre_hook(before_step)
    run.trainer.fit(run.module, run.data.train_loader)
    return run, logged.steps


def test_a_step_logs_its_own_peak_and_not_that_of_the_process(composed, tmp_path):
    """The first forward maps and unmaps 300 MiB, which later steps must not show."""
    calls = []

    def spike(*_):
        if not calls:
            with mmap(-1, 300 * MIB) as area:  # not of the heap, which may have room
                for page in range(0, len(area), PAGESIZE):
                    area[page] = 1
        calls.append(1)

    _, steps = train(composed, tmp_path, "trainer.max_steps=3", "fold=none", before_step=spike)
    peaks = [step["memory/step_peak_resident_mib"] for step in steps]
    assert peaks[0] - peaks[1] > 200
    assert peaks[0] - peaks[2] > 200


class CountingMeter(PeakMeter):
    """Return 1, 2, 3, ... MiB, so that each reading is recognized."""

    def __init__(self):
        self.reads = 0

    def start(self, device):
        pass

    def read(self, device):
        self.reads += 1
        return MemoryRecord(allocated=self.reads * MIB)


def test_forward_backward_and_optimizer_are_measured_separately(composed, tmp_path):
    run, steps = train(composed, tmp_path, "fold=none", meter=CountingMeter())
    tags = [f"memory/{p}_peak_allocated_mib" for p in ("forward", "backward", "optimizer")]
    assert [steps[0][tag] for tag in tags] == [1, 2, 3]
    assert steps[0]["memory/step_peak_allocated_mib"] == 3
    assert run.callbacks.memory.first["backward"].allocated == 2 * MIB


def test_a_step_is_one_optimizer_step_with_all_its_micro_batches(composed, tmp_path):
    run, _ = train(
        composed,
        tmp_path,
        "fold=none",
        "trainer.accumulate_grad_batches=2",
        "trainer.max_steps=1",
        meter=CountingMeter(),
    )
    peaks = {phase: record.allocated // MIB for phase, record in run.callbacks.memory.first.items()}
    assert peaks == {"forward": 3, "backward": 4, "optimizer": 5}


def test_first_step_steady_steps_and_validation_are_reported_separately(composed, tmp_path):
    run = build_training(composed("trainer.max_steps=3"), tmp_path)
    run.callbacks.memory.meter = CountingMeter()
    run.trainer.fit(run.module, run.data)
    summary = run.callbacks.memory.summarize()
    assert set(summary) == {"first_step", "steady_step", "validation"}
    assert summary["steady_step"]["allocated"] > summary["first_step"]["allocated"]
    assert set(summary["steady_step"]["phases"]) == {"forward", "backward", "optimizer"}


@pytest.mark.gpu
def test_on_a_gpu_the_step_peak_comes_from_the_allocator(composed, tmp_path):
    run, steps = train(
        composed, tmp_path, "trainer.accelerator=gpu", "trainer.max_steps=3", "fold=none"
    )
    assert steps[2]["memory/step_peak_allocated_mib"] > 0
    peak = run.callbacks.memory.summarize()["steady_step"]
    assert peak["reserved"] >= peak["allocated"]
    assert isinstance(run.callbacks.memory, StepMemory)
