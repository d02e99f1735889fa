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


def train(composed, tmp_path, *overrides, meter=None):
    run = build_training(composed(*overrides), tmp_path)
    if meter is not None:
        run.callbacks.memory.meter = meter
    logged = RecordMetrics()
    run.trainer.callbacks.append(logged)
    run.trainer.fit(run.module, run.data.train_loader)
    return run, logged.steps


class CountingMeter(PeakMeter):
    """Return 1, 2, 3, ... MiB, so that each reading is recognized, once after each start."""

    def __init__(self):
        self.reads, self.has_started = 0, False

    def start(self, device):
        self.has_started = True

    def read(self, device):
        assert self.has_started
        self.has_started = False
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
