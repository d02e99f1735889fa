"""What an estimate says of a step, and `unet3d memory`."""

import gc

import pytest
import torch

from unet3d.__main__ import main
from unet3d.commands.memory import list_changes
from unet3d.config.compose import compose_config
from unet3d.memory.fit import estimate_configured_step, estimate_with_savings, measure_step
from unet3d.memory.report import compute_kinds_over_time, format_measured, plot_layers
from unet3d.peak_memory import MemoryRecord
from unet3d.text import MIB
from unet3d.training.config import parse_train_config


@pytest.fixture(scope="module")
def forum():
    return estimate_configured_step(
        parse_train_config(
            compose_config(["experiment=example_small", "memory.estimate=false"], "train")
        ).step
    )


def test_the_first_convolution_adds_what_the_forum_measured_and_the_first_level_holds_most(forum):
    first = forum.layers[0]
    assert (first.type, first.phase, first.change) == ("Conv3d", "forward", 319_488_000)
    phases = [layer.phase for layer in forum.layers]
    assert phases == sorted(phases, key=["forward", "backward"].index)
    assert forum.without_workspaces < forum.curve[forum.peak_event] < 2 * forum.without_workspaces
    assert 0.6 < forum.levels[0] / sum(forum.levels.values()) < 0.8


@pytest.mark.slow
def test_savings_are_ranked_by_size(composed):
    words = ["data.patch_size=[32,32,32]", "model.width=32", "model.depth=2"]
    request = composed("trainer.accelerator=auto", *words)
    estimate, savings = estimate_with_savings(request.step)
    assert estimate.peak == estimate_configured_step(request.step).peak
    assert {override for override, _ in savings} == {"checkpointing=leanest", "precision=bf16"}
    assert savings[0][1] >= savings[1][1] > 0


def test_the_kinds_of_the_timeline_add_up_to_the_curve_and_layers_are_named(forum):
    start, stop = forum.steady_step
    stacked = sum(compute_kinds_over_time(forum).values())
    assert (stacked == forum.curve[start:stop]).all()
    (axes,) = plot_layers(forum, "a step").axes
    names = {label.get_text() for label in axes.get_yticklabels()}
    assert names <= {f"{layer.name}  {layer.type}  {layer.phase}" for layer in forum.layers}


def test_each_phase_that_was_measured_is_compared_with_its_estimate(forum):
    estimated = forum.phases["forward"].allocated
    measured = {
        "forward": MemoryRecord(allocated=round(estimated / 1.25)),
        "backward": MemoryRecord(resident=1),
    }
    _, forward, backward = format_measured(forum, measured).splitlines()
    mib = estimated / MIB
    assert forward.split() == ["forward", f"{mib:,.1f}", f"{mib / 1.25:,.1f}", "+25.00%"]
    assert backward.split()[::2] == ["backward", "0.0"]
    assert backward.split()[-1] == "-"


SMALL = ["data.patch_size=[16,16,16]", "model.width=4", "model.depth=2", "model.convs_per_level=1"]
LEANEST = ["checkpointing=leanest", "precision=bf16"]  # nothing else would save memory: one trace


@pytest.mark.slow
def test_a_view_is_printed_or_drawn_and_so_are_variants(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["memory", *SMALL, *LEANEST, "view=layers"]) == 0
    assert "encoder.0" in capsys.readouterr().out
    assert main(["memory", *SMALL, *LEANEST, "view=timeline", "format=png", "output=a b.png"]) == 0
    assert main(["memory", *SMALL, "vary=pool", "format=png", "output=pool.png"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"a b.png", "pool.png"}


def test_the_peak_of_an_optimizer_that_allocates_nothing_is_what_it_begins_with(composed):
    words = ["optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"]
    step = composed(*SMALL, *words, "trainer.gradient_clip_val=null").step
    estimate = estimate_configured_step(step, validates=False)
    batch, weights_and_gradients = 2 * 16**3 * (4 + 1), 2 * 4 * estimate.parameters
    assert estimate.phases["optimizer"].allocated == weights_and_gradients + batch


@pytest.mark.parametrize(
    ("vary", "values"),
    [
        ("resolution", [(8, 8, 8)] * 2 + [(16, 16, 16)] * 3),
        ("batch", [1, 2, 3, 4, 6, 8]),
        ("kernel", [1, 3, 5]),
        ("padding", []),
        ("channels", [1, 2, 4, 6, 8]),
        ("precision", ["32", "16", "bf16", "16-true", "bf16-true"]),
    ],
)
def test_a_setting_varies_over_its_usual_values(vary, values, composed):
    changes = list_changes(composed(*SMALL).step, vary)
    assert [value for change in changes for value in change.values()] == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vary=channels", "model=dynunet"], "model.width"),
        (["model=dynunet", "data.patch_size=[10,10,10]"], "cannot estimate the memory"),
    ],
)
def test_what_cannot_be_estimated_is_an_error_of_one_line(words, message, capsys):
    assert main(["memory", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_only_a_gpu_can_be_measured(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["memory", "vary=batch", "measure=true"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_estimate_is_near_the_measurement_on_a_gpu(composed):
    step = composed("trainer.accelerator=gpu", "data.patch_size=[64,64,64]").step
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    measured = max(record.allocated for record in measure_step(step).values())
    assert estimate_configured_step(step).allocated == pytest.approx(measured - before, rel=0.05)


@pytest.mark.parametrize("command", [["memory"], ["suggest", "budget_gib=8"]])
def test_a_patch_that_no_device_holds_is_not_traced(command, capsys):
    assert main([*command, "data.patch_size=[4096,4096,4096]"]) == 3
    assert "no device has beside the rest of a step: lower" in capsys.readouterr().err


def test_a_volume_of_more_windows_than_can_be_traced_is_refused(capsys):
    assert main(["memory", "volume=[1024,1024,1024]"]) == 2
    error = capsys.readouterr().err
    assert "volume= has 250,047 windows of data.patch_size=[32, 32, 32], and an" in error
