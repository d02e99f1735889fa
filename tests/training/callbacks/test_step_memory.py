from mmap import PAGESIZE, mmap

import lightning.pytorch as pl
import pytest

from unet3d.commands.train import build_training
from unet3d.peak_memory import MemoryRecord, PeakMeter
from unet3d.text import MIB


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
    first, *others = [step["memory/step_peak_resident_mib"] for step in steps]
    assert first - max(others) > 200


class CountingMeter(PeakMeter):
    """Return 1, 2, 3, ... MiB, so that each reading is recognized."""

    def __init__(self):
        self.reads = 0

    def start(self, device):
        pass

    def read(self, device):
        self.reads += 1
        return MemoryRecord(allocated=self.reads * MIB)


def test_a_step_has_a_peak_of_each_phase_over_all_of_its_micro_batches(composed, tmp_path):
    options = ("fold=none", "trainer.accumulate_grad_batches=2", "trainer.max_steps=2")
    options = (*options, "data.patches_per_case=2")
    run, steps = train(composed, tmp_path, *options, meter=CountingMeter())
    tags = [f"memory/{p}_peak_allocated_mib" for p in ("forward", "backward", "optimizer", "step")]
    assert [steps[1][tag] for tag in tags] == [3, 4, 5, 5]
    summary = run.callbacks.memory.summarize()
    peaks = {part: record["allocated"] // MIB for part, record in summary.items()}
    assert peaks == {"first_step": 5, "steady_step": 10}


@pytest.mark.gpu
def test_on_a_gpu_the_step_peak_comes_from_the_allocator(composed, tmp_path):
    run, steps = train(
        composed, tmp_path, "trainer.accelerator=gpu", "trainer.max_steps=3", "fold=none"
    )
    assert steps[2]["memory/step_peak_allocated_mib"] > 0
    peak = run.callbacks.memory.summarize()["steady_step"]
    assert peak["reserved"] >= peak["allocated"]
