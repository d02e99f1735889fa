"""Memory estimates of the networks of the forum and of small ones, and `unet3d memory`."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unet3d.__main__ import main
from unet3d.checkpointing.recompute import RecomputeBlocks
from unet3d.config.compose import compose_config
from unet3d.config.settings.training import parse_training
from unet3d.memory.estimate import estimate_step
from unet3d.memory.plots import compute_kinds_over_time, plot_layers
from unet3d.memory.record import MemoryRecord
from unet3d.memory.tables import format_measured
from unet3d.model.half_precision import cast_to_half
from unet3d.model.naive_unet import NaiveUNet3D
from unet3d.units import MIB
from unet3d.workflows.memory.estimate import estimate_memory, estimate_with_savings

FORUM = {
    "small": {"encoder": [64, 128, 256, 256], "decoder": [256, 128, 64]},
    "large": {"encoder": [64, 128, 256, 512, 512], "decoder": [256, 128, 64, 64]},
}
# MiB at 2 x 1 x 320 x 150 x 26, cross-entropy, SGD without momentum, no workspace: traced by other
# code.
KNOWN = {
    ("small", "32", "none"): 10386,
    ("small", "32", "blocks"): 7213,
    ("small", "16", "none"): 7779,
    ("small", "16", "blocks"): 6087,
    ("small", "16-true", "none"): 5300,
    ("small", "16-true", "blocks"): 3616,
    ("large", "32", "none"): 9404,
    ("large", "32", "blocks"): 6008,
    ("large", "16", "none"): 6168,
    ("large", "16", "blocks"): 4619,
    ("large", "16-true", "none"): 4810,
    ("large", "16-true", "blocks"): 3013,
}


class PlainStep:
    """A step of a plain training loop: cross-entropy, SGD, zero_grad at the end."""

    repeats = True

    def __init__(self, network, precision, checkpointing):
        self.model = NaiveUNet3D(in_channels=1, num_classes=5, **FORUM[network])
        self.half = precision == "16-true"
        self.mixed = precision == "16"
        if self.half:
            cast_to_half(self.model, torch.float16)
            for module in self.model.modules():  # the known figures have norms in half too
                if isinstance(module, nn.BatchNorm3d):
                    for name, p in module._parameters.items():
                        module._parameters[name] = nn.Parameter(p.detach().half())
        if checkpointing == "blocks":
            RecomputeBlocks().apply(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, foreach=True)

    def train(self, trace):
        trace.begin_phase("forward")
        image = torch.empty(2, 1, 320, 150, 26, dtype=torch.float16 if self.half else None)
        label = torch.zeros(2, 320, 150, 26, dtype=torch.long)
        trace.label([image, label], "input")
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.mixed):
            logits = self.model(image)
            loss = F.cross_entropy(logits, label)
        trace.begin_phase("backward")
        loss.backward()
        trace.begin_phase("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def validate(self, trace):
        pass


@pytest.mark.parametrize(("network", "precision", "checkpointing"), KNOWN)
def test_estimates_are_within_one_percent_of_known_figures(network, precision, checkpointing):
    estimate = estimate_step(lambda: PlainStep(network, precision, checkpointing), cuda=True)
    known = KNOWN[network, precision, checkpointing]
    assert estimate.without_workspaces / MIB == pytest.approx(known, rel=0.01)


@pytest.fixture(scope="module")
def forum():
    return estimate_memory(
        parse_training(compose_config(["experiment=forum_small", "memory.estimate=false"], "train"))
    )


def test_the_first_convolution_adds_what_the_forum_measured(forum):
    first = forum.layers[0]
    assert (first.type, first.phase, first.change) == ("Conv3d", "forward", 319_488_000)
    phases = [layer.phase for layer in forum.layers]
    assert phases == sorted(phases, key=["forward", "backward"].index)


def test_the_peak_includes_workspaces_and_most_activations_are_at_full_resolution(forum):
    peak = int(forum.curve[forum.peak_event])
    assert forum.without_workspaces < peak < 2 * forum.without_workspaces
    assert sum(forum.kinds.values()) == peak <= forum.peak.reserved
    assert 0.6 < forum.levels[0] / sum(forum.levels.values()) < 0.8


def test_gradients_are_freed_before_the_next_forward(composed):
    words = "model.width=32", "data.patch_size=[8,8,8]", "data.batch_size=1"
    estimate = estimate_memory(composed(*words))
    phases = {p.phase: p for p in estimate.trace.phases}
    gradient_bytes = {
        phase: sum(
            block.nbytes
            for block in estimate.find_live_blocks(span.start + 2)
            if estimate.get_kind(block) == "gradients"
        )
        for phase, span in phases.items()
    }
    assert gradient_bytes["forward"] == 0
    assert gradient_bytes["optimizer"] == 4 * estimate.parameters


def test_accumulation_clipping_and_momentum_are_part_of_the_step(composed):
    sgd = "optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"
    assert "optimizer state" not in estimate_memory(composed(*sgd)).kinds
    twice = estimate_memory(composed("trainer.accumulate_grad_batches=2"))
    forwards = [p for p in twice.trace.phases if p.phase == "forward"]
    assert len(forwards) == 4  # two micro-batches in each of two steps


def test_accelerator_cpu_gives_an_estimate_for_a_cpu(composed):
    for accelerator, has_allocator in (("cpu", False), ("auto", True)):
        peak = estimate_memory(composed(f"trainer.accelerator={accelerator}")).peak
        assert (peak.reserved is not None) is has_allocator


def test_savings_are_ranked_by_size(composed):
    words = ["data.patch_size=[64,160,160]", "model.width=32", "model.depth=2"]
    request = composed("trainer.accelerator=auto", *words)
    estimate, savings = estimate_with_savings(request)
    assert estimate.peak == estimate_memory(request).peak
    strategies = {f"checkpointing={name}" for name in ("skips", "lean", "leanest")}
    assert {override for override, _ in savings} == strategies | {"precision=bf16"}
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


def test_every_view_is_printed_or_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["memory", *SMALL, *LEANEST]) == 0
    assert "estimated peak of a step" in capsys.readouterr().out
    assert main(["memory", *SMALL, *LEANEST, "view=layers"]) == 0
    assert "encoder.0" in capsys.readouterr().out
    assert main(["memory", *SMALL, *LEANEST, "view=timeline", "format=png", "output=a b.png"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["a b.png"]


@pytest.mark.parametrize(
    "vary",
    ["resolution", "batch", "padding", "kernel", "channels", "pool", "precision", "checkpointing"],
)
def test_every_varied_setting_changes_the_peak(vary, tmp_path, capsys):
    words = ["model=unet_tiny", *SMALL]
    assert main(["memory", *words, f"vary={vary}", "format=json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) >= 2
    peaks = {row["peak_allocated_bytes"] for row in rows}
    assert len(peaks) >= 2 or vary == "pool"  # poolings do not change the peak
    figure = tmp_path / "variants.png"
    if vary == "pool":
        assert main(["memory", *words, f"vary={vary}", "format=png", f"output={figure}"]) == 0
        assert figure.is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vary=weather"], "vary must be one of"),
        (["view=timeline"], "add format=png"),
        (["format=png"], "view=timeline"),
        (["view=timeline", "format=png"], "output=FILE.png"),
        (["vary=channels", "model=dynunet"], "model.width"),
        (["model.depth=9"], "data.patch_size"),
        (["model=dynunet", "data.patch_size=[10,10,10]"], "cannot estimate the memory"),
    ],
)
def test_invalid_options_are_an_error_of_one_line(words, message, capsys):
    assert main(["memory", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize("words", [["measure=true"], ["vary=batch", "measure=true"]])
def test_only_a_gpu_can_be_measured(words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["memory", *words]) == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["memory"], ["suggest", "budget_gib=8"]])
def test_a_patch_that_no_device_holds_is_not_traced(command, capsys):
    assert main([*command, "data.patch_size=[4096,4096,4096]"]) == 3
    assert "no device has beside the rest of a step: lower" in capsys.readouterr().err
