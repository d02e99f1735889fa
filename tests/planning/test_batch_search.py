import json
from types import SimpleNamespace

import pytest
import torch

from unet3d.__main__ import main
from unet3d.config.compose import format_overrides
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.memory import oom_advice
from unet3d.memory.estimate import BatchExtrapolation
from unet3d.memory.from_config import estimate_memory
from unet3d.memory.oom_advice import (
    find_failing_module,
    find_fixes,
    format_oom_report,
    format_oom_warning,
)
from unet3d.planning import suggest
from unet3d.planning.suggest import count_flops
from unet3d.training.module import SegmentationModule

GIB = 2**30


@pytest.fixture
def request_(composed):
    words = "model.width=16", "model.depth=2", "data.patch_size=[32,32,32]"
    return composed(*words, "trainer.accelerator=auto").step


@pytest.mark.parametrize("precision", ["32", "16"])
def test_two_traces_determine_every_batch_size(composed, precision):
    request = composed(f"precision={precision}", "model.depth=2", "trainer.accelerator=auto").step
    extrapolation = BatchExtrapolation(
        *(estimate_memory(request.vary({"data.batch_size": n})) for n in (2, 3))
    )
    assert extrapolation.affine
    for batch in (5, 11):
        traced = estimate_memory(request.vary({"data.batch_size": batch}))
        peak = extrapolation.peak(batch)
        assert peak == traced.peak


def test_a_search_limited_to_a_batch_of_two_tries_one_where_two_do_not_fit(request_):
    peaks = [estimate_memory(request_.vary({"data.batch_size": n})).peak for n in (1, 2)]
    for peak, limit, expected in (
        (peaks[1], 2, (2, peaks[1])),
        (peaks[1], 1, (1, peaks[0])),
        (peaks[0], 2, (1, peaks[0])),
    ):
        budget = peak.reserved + CUDA_CONTEXT_BYTES
        assert suggest.find_largest_batch(request_, budget, limit=limit) == expected
    assert suggest.find_largest_batch(request_, CUDA_CONTEXT_BYTES, limit=2) is None


def test_a_budget_is_given_in_gib_and_holds_more_than_the_cuda_context(monkeypatch):
    assert suggest.get_budget_bytes(1.5) == 1536 * 2**20
    with pytest.raises(DoesNotFitError, match=r"=0\.5 is too small: the CUDA context alone takes"):
        suggest.get_budget_bytes(0.5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="finds no GPU"):
        suggest.get_budget_bytes(None)


@pytest.mark.slow
def test_suggest_says_when_nothing_fits(capsys):
    words = ["data.patch_size=[16,16,16]", "model.depth=2", "precisions=[32]", "strategies=[fused]"]
    assert main(["suggest", "budget_gib=0.586", *words]) == 3
    assert "nothing fits 0.586 GiB: try a smaller data.patch_size" in capsys.readouterr().err


def test_recomputing_every_block_costs_a_third_more_work(request_):
    plain, recomputed = (count_flops(request_, s) for s in ("none", "blocks"))
    assert 0.25 < recomputed / plain - 1 < 0.36


def test_suggest_keeps_the_overrides_of_the_command_line(capsys):
    words = ["precision=16", "checkpointing=none", "data.batch_size=3", "model.depth=2"]
    assert main(["suggest", "budget_gib=2", "data.patch_size=[16,16,16]", *words]) == 0
    shown = capsys.readouterr()
    assert "1/1" in shown.err
    assert "batch 3" in shown.err


def test_a_batch_that_cannot_be_extrapolated_is_an_error_that_says_what_to_do(
    request_, monkeypatch
):
    monkeypatch.setattr(suggest, "estimate_cached", lambda settings: None)
    monkeypatch.setattr(suggest, "BatchExtrapolation", lambda *_: SimpleNamespace(affine=False))
    with pytest.raises(UsageError, match="differently at batch sizes 2 and 3; try sizes one by on"):
        suggest.find_largest_batch(request_, GIB)


def test_a_run_estimated_to_run_out_of_memory_is_warned_of_with_fixes_that_fit(request_):
    estimate = estimate_memory(request_)
    total = estimate.peak.reserved + CUDA_CONTEXT_BYTES - 1
    lines = format_oom_warning(estimate, request_, total)
    assert lines[0].startswith("estimated to run out of memory")
    fixes = find_fixes(request_, total)
    assert len(fixes) == 3
    for (changes, reserved), line in zip(fixes, lines[2:], strict=True):
        assert format_overrides(changes) in line
        assert reserved + CUDA_CONTEXT_BYTES <= total
    assert format_oom_warning(estimate, request_, total + 1) == []


@pytest.mark.slow
def test_a_cpu_run_estimated_to_run_out_of_memory_warns_or_stops_if_configured(
    composed, monkeypatch
):
    monkeypatch.setattr(oom_advice, "get_available_bytes", lambda device: CUDA_CONTEXT_BYTES)
    step = composed("model.depth=2", "model.convs_per_level=1").step
    estimate = estimate_memory(step)

    def check(if_too_large):
        options = {"if_too_large": if_too_large, "sweeping": False}
        return oom_advice.check_memory(estimate, step, torch.device("cpu"), **options)

    assert check("warn")[0].startswith("estimated to run out of memory")
    assert check("ignore") == []
    with pytest.raises(DoesNotFitError, match="estimated to run out of memory"):
        check("error")


def test_the_module_that_ran_out_is_named(request_):
    from unet3d.memory.step.build import build_network

    model = build_network(request_)

    def fails(module, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.retention = None  # plain modules: fused blocks do not call their modules
    model.decoder[0].convs[0].norm.register_forward_pre_hook(fails)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.randn(2, 1, 8, 8, 8))
    assert find_failing_module(caught.value.__traceback__, model) == "decoder.0.convs.0.norm"


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
    assert "estimated to fit:" in error
    last = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] >= 1


@pytest.mark.slow
def test_auto_goes_on_with_the_next_strategy_where_memory_runs_out(
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
    options = ("checkpointing=auto", "trainer.max_steps=8", "data.patches_per_case=4")
    assert unet3d(*options, "save_every_seconds=0", "fold=none", "model.depth=2") == 0
    shown = capsys.readouterr().out
    assert shown.count("out of GPU memory") == 2
    assert "continuing from step 2 with checkpointing=skips" in shown
    assert "continuing from step 3 with checkpointing=lean" in shown
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["steps"] == 8
    assert report["choices"]["checkpointing"] == "lean"


@pytest.fixture
def gpu(monkeypatch):
    """Return a device with 24 GiB, most of which are in use."""

    class Properties:
        total_memory = 24 * GIB

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 23 * GIB)
    monkeypatch.setattr(oom_advice, "get_available_bytes", lambda device: 24 * GIB)
    return torch.device("cuda")


@pytest.mark.parametrize("strategy", ["fused", "none"])
def test_the_command_to_resume_changes_how_a_step_is_computed_but_no_result(
    composed, tmp_path, gpu, strategy
):
    """With other blocks a step rounds differently: such a run is not resumed."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    settings = composed("model.depth=2", f"checkpointing={strategy}")
    message = format_oom_report(
        torch.OutOfMemoryError("x"),
        config=settings.step,
        composition=settings.composition,
        model=torch.nn.Identity(),
        phase="backward",
        device=gpu,
        estimate=None,
        folder=tmp_path,
    )
    sizes = "20.0 GiB allocated, 23.0 GiB reserved of 24.0 GiB; 3.0 GiB reserved but unused"
    assert sizes in message
    assert message.count(" reserved)") == 3
    commands = [line for line in message.splitlines() if "resume=auto" in line]
    if strategy == "none":
        assert commands == []
    else:
        assert commands[0].endswith(f" checkpointing=skips hydra.run.dir='{tmp_path}' resume=auto")
