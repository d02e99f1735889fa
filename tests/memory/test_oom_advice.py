"""What a run says where memory does not suffice: before it, and when it runs out."""

import json

import pytest
import torch

from unet3d.config.compose import format_overrides
from unet3d.errors import DoesNotFitError
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.memory import oom_advice
from unet3d.memory.estimate import add_context_bytes
from unet3d.memory.fit import estimate_configured_step
from unet3d.memory.oom_advice import check_memory, find_fixes
from unet3d.training.module import SegmentationModule


@pytest.mark.slow
def test_a_run_estimated_to_run_out_of_memory_is_warned_of_with_fixes_that_fit(
    composed, monkeypatch
):
    words = ("model.width=16", "model.depth=2", "data.patch_size=[32,32,32]")
    step, device = composed(*words, "trainer.accelerator=auto").step, torch.device("cuda")
    estimate = estimate_configured_step(step)
    needed = estimate.run_peak.reserved + CUDA_CONTEXT_BYTES

    def check(available, if_too_large):
        monkeypatch.setattr(oom_advice, "get_available_bytes", lambda device: available)
        return check_memory(estimate, step, device, if_too_large=if_too_large, sweeping=False)

    lines, fixes = check(needed - 1, "warn"), find_fixes(step, needed - 1)
    assert lines[0].startswith("estimated to run out of memory")
    assert len(fixes) == 3
    for (changes, reserved), line in zip(fixes, lines[2:], strict=True):
        assert format_overrides(changes) in line
        assert reserved + CUDA_CONTEXT_BYTES < needed
    with pytest.raises(DoesNotFitError, match="estimated to run out of memory"):
        check(needed - 1, "error")
    assert check(needed - 1, "ignore") == check(needed, "warn") == []


def test_validation_that_needs_more_than_a_step_is_warned_of(composed):
    words = ("data.in_channels=64", "model.width=2", "model.depth=2", "data.patch_size=[8,16,16]")
    step, volume = composed(*words, "trainer.accelerator=cpu").step, (8, 48, 48)
    estimate = estimate_configured_step(step, volume)
    available = add_context_bytes(estimate.peak)
    lines = oom_advice.format_oom_warning(estimate, step, available, volume)
    assert lines[0].startswith("estimated to run out of memory: validation needs ")
    assert lines[1:] == [
        "no change of batch, precision, checkpointing or patch is estimated to fit"
    ]


@pytest.mark.slow
def test_out_of_memory_prints_a_report_and_no_traceback(unet3d, tmp_path, capsys, monkeypatch):
    """It is raised in the third forward of training, when there is a checkpoint to resume from."""
    from unet3d.model.unet import DecoderLevel

    original, calls = DecoderLevel.forward, []

    def fails(self, *inputs):
        if self.training:
            calls.append(1)
            if len(calls) == 5:  # the estimate made two
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(self, *inputs)

    monkeypatch.setattr(DecoderLevel, "forward", fails)
    words = ["trainer.max_steps=9", "memory.estimate=true", "model.depth=2"]
    assert unet3d(*words, "model.convs_per_level=1") == 3
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "out of GPU memory in the forward, in module decoder" in error
    assert "estimated to hold the most at the peak" in error
    assert f" checkpointing=skips output='{tmp_path / 'run'}' resume=auto" in error
    last = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] >= 1


@pytest.mark.slow
def test_auto_goes_on_with_the_next_strategy_that_needs_less_where_memory_runs_out(
    unet3d, tmp_path, capsys, monkeypatch
):
    """Memory runs out in the third step, and again in the one after it."""
    original, calls = SegmentationModule.training_step, []

    def fails(self, batch, batch_idx):
        calls.append(1)
        if len(calls) in (3, 5):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(SegmentationModule, "training_step", fails)
    options = ("checkpointing=auto", "trainer.max_steps=8", "save_every_seconds=0", "fold=none")
    sizes = ("data.patch_size=[48,48,48]", "data.batch_size=1", "model.width=2", "model.depth=3")
    assert unet3d(*options, "data.patches_per_case=2", *sizes) == 0
    shown = capsys.readouterr().out
    assert shown.count("out of GPU memory") == 2
    assert "continuing from step 2 with checkpointing=skips" in shown
    assert "continuing from step 3 with checkpointing=lean" in shown
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["steps"] == 8
    assert report["choices"]["checkpointing"] == "lean"
