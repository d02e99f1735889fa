"""What the meter says of the forum's networks and of small ones."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unet3d.checkpointing.recompute import RecomputeBlocks
from unet3d.cli.main import main
from unet3d.memory.estimate import KINDS, estimate_step
from unet3d.memory.plots import kinds_over_time, layer_bars, timeline
from unet3d.model.half_precision import cast_to_half
from unet3d.model.unet_reference import ForumUNet3D
from unet3d.units import MIB
from unet3d.workflows.memory.estimate import estimate_memory, rank_savings, with_overrides

FORUM = {
    "small": {"encoder": [64, 128, 256, 256], "decoder": [256, 128, 64]},
    "large": {"encoder": [64, 128, 256, 512, 512], "decoder": [256, 128, 64, 64]},
}
# MiB at 2 x 1 x 320 x 150 x 26, cross-entropy, SGD without momentum, no workspace: traced before
# this project began, by other code.
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
    """A step as a user's own loop has it: cross-entropy, SGD, zero_grad at the end."""

    def __init__(self, network, precision, checkpointing):
        self.model = ForumUNet3D(in_channels=1, num_classes=5, **FORUM[network])
        self.half = precision == "16-true"
        self.mixed = precision == "16"
        if self.half:
            cast_to_half(self.model, torch.float16)
            for module in self.model.modules():  # the known figures have norms in half as well
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
def test_the_forums_table_is_reproduced_within_a_hundredth(network, precision, checkpointing):
    made = estimate_step(lambda: PlainStep(network, precision, checkpointing), cuda=True)
    known = KNOWN[network, precision, checkpointing]
    assert made.peak.allocated / MIB == pytest.approx(known, rel=0.01)


@pytest.fixture
def forum(composed):
    return estimate_memory(composed("experiment=forum_small", "memory.estimate=false", base=[]))


def test_the_forums_first_convolution_adds_what_the_forum_saw(forum):
    first = forum.layers[0]
    assert (first.type, first.phase, first.change) == ("Conv3d", "forward", 319_488_000)


def test_layers_go_down_the_network_and_back_up(forum):
    phases = [layer.phase for layer in forum.layers]
    assert phases == sorted(phases, key=["forward", "backward"].index)
    names = [layer.name for layer in forum.layers if layer.phase == "forward"]
    modules = [
        name
        for name, module in ForumUNet3D(
            in_channels=1, num_classes=5, encoder=[1, 1, 1, 1], decoder=[1, 1, 1]
        ).named_modules()
        if not list(module.children())
    ]
    assert names == modules


def test_kinds_add_up_to_the_peak_and_phases_reach_it(forum):
    assert set(forum.kinds) <= set(KINDS)
    total = sum(forum.kinds.values())
    assert total == int(forum.curve[forum.peak_at])
    assert max(r.allocated for p, r in forum.phases.items() if p != "validation") >= total
    assert forum.peak.reserved >= forum.peak.allocated


def test_the_interval_begins_at_the_prediction_and_allows_for_cudnn(forum):
    least, most = forum.interval
    assert least == int(forum.curve[forum.peak_at])
    assert least < most < 2 * least


def test_the_forums_question_is_answered_full_resolution_holds_most(forum):
    assert 0.6 < forum.levels[0] / sum(forum.levels.values()) < 0.8


def test_gradients_of_a_step_do_not_live_through_the_next_forward(composed):
    made = estimate_memory(
        composed("model.width=32", "data.patch_size=[8,8,8]", "data.batch_size=1")
    )
    phases = {p.phase: p for p in made.trace.phases}
    alive = {
        phase: sum(b.nbytes for b in made.alive(mark.begun + 2) if made.kind(b) == "gradients")
        for phase, mark in phases.items()
    }
    assert alive["forward"] == 0
    assert alive["optimizer"] == 4 * made.parameters


def test_accumulation_clipping_and_momentum_are_part_of_the_step(composed):
    plain = estimate_memory(
        composed("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false")
    )
    assert "optimizer state" not in plain.kinds
    twice = estimate_memory(composed("trainer.accumulate_grad_batches=2"))
    forwards = [p for p in twice.trace.phases if p.phase == "forward"]
    assert len(forwards) == 4  # two micro-batches in each of two steps


def test_checkpointing_and_half_precision_are_seen(composed):
    big = ["data.patch_size=[64,64,64]", "model.width=32"]
    peaks = [
        estimate_memory(composed(*big, *extra)).peak.allocated
        for extra in ([], ["checkpointing=leanest"], ["precision=bf16"])
    ]
    assert peaks[1] < 0.8 * peaks[0]
    assert peaks[2] < 0.7 * peaks[0]


def test_a_cpu_is_predicted_when_it_is_asked_for(composed):
    request = composed("trainer.accelerator=cpu")
    assert estimate_memory(request).peak.reserved is None
    assert (
        estimate_memory(with_overrides(request, "trainer.accelerator=auto")).peak.reserved
        is not None
    )


def test_savings_name_what_helps_most_first(composed):
    words = ["data.patch_size=[64,64,64]", "model.width=32"]
    request = composed("trainer.accelerator=auto", *words)
    found = rank_savings(request, estimate_memory(request))
    rungs = {f"checkpointing={rung}" for rung in ("skips", "lean", "leanest")}
    assert {override for override, _ in found} == rungs | {"precision=bf16"}
    assert found[0][1] >= found[1][1] > 0


def test_the_timelines_kinds_are_stacked_to_the_curve(forum, tmp_path):
    begun, ended = forum.steady
    stacked = sum(kinds_over_time(forum).values())
    assert (stacked == forum.curve[begun:ended]).all()
    for draw in (timeline, layer_bars):
        draw(forum, "a step").savefig(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"


def command(*words):
    return main(["memory", *words])


SMALL = ["data.patch_size=[16,16,16]", "model.width=4", "model.depth=2", "model.convs_per_level=1"]


def test_json_on_standard_output_is_one_object(capsys):
    assert command(*SMALL, "format=json") == 0
    said = capsys.readouterr()
    content = json.loads(said.out)
    assert {
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "parameters",
        "phases",
        "kinds",
        "layers",
        "interval",
    } == set(content)
    assert set(content["layers"][0]) == {
        "name",
        "type",
        "phase",
        "allocated_bytes",
        "change_bytes",
        "reserved_bytes",
    }
    assert "saves" in said.err


def test_every_view_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command(*SMALL) == 0
    assert "predicted peak of a step" in capsys.readouterr().out
    assert command(*SMALL, "view=layers") == 0
    assert "encoder.0" in capsys.readouterr().out
    assert command(*SMALL, "view=timeline", "format=png", "output=a b.png") == 0
    assert [p.name for p in tmp_path.iterdir()] == ["a b.png"]


@pytest.mark.parametrize(
    "what",
    ["resolution", "batch", "padding", "kernel", "channels", "pool", "precision", "checkpointing"],
)
def test_every_study_sweeps_its_thing(what, tmp_path, capsys):
    words = ["data.patch_size=[16,16,16]", "model=unet_tiny", "model.depth=2"]
    assert command(*words, f"sweep={what}", "format=json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) >= 2
    peaks = {row["peak_allocated_bytes"] for row in rows}
    assert len(peaks) >= 2 or what == "pool"  # poolings cost nothing at the peak
    picture = tmp_path / "sweep.png"
    if what == "pool":
        assert command(*words, f"sweep={what}", "format=png", f"output={picture}") == 0
        assert picture.is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["view=side"], "view must be one of"),
        (["format=xml"], "format must be one of"),
        (["sweep=weather"], "sweep must be one of"),
        (["view=timeline"], "format=png"),
        (["format=png"], "view=timeline"),
        (["view=timeline", "format=png"], "output=FILE.png"),
        (["sweep=channels", "model=dynunet"], "model.width"),
        (["model.depth=9"], "data.patch_size"),
        (["measure=true"], "needs a GPU"),
        (["sweep=batch", "measure=true"], "needs a GPU"),
        (["model=dynunet", "data.patch_size=[10,10,10]"], "cannot be traced"),
        (["precision=12"], "precision must be one of"),
        (["data=decathlon", "data.root=/no/such"], "no dataset.json"),
    ],
)
def test_bad_input_is_answered_in_one_line(words, said, capsys):
    assert command(*words) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error


def test_a_reader_that_stops_early_is_no_error():
    """`unet3d memory view=layers | head -1`"""
    code = "import sys; from unet3d.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen(
        [sys.executable, "-c", code, "memory", *SMALL, "view=layers"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
