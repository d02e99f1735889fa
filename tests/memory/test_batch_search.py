import json

import pytest
import torch

from unet3d.cli.main import main
from unet3d.errors import DoesNotFitError
from unet3d.lit.callbacks.step_memory import StepMemory
from unet3d.memory.batch_search import CONTEXT, BatchExtrapolation, search_largest_batch
from unet3d.workflows.memory.estimate import estimate_memory, with_batch
from unet3d.workflows.memory.oom_advice import (
    find_failing_module,
    find_remedies,
    format_oom_report,
    format_oom_warning,
)
from unet3d.workflows.memory.suggest import measure_extra_compute

GIB = 2**30


@pytest.fixture
def request_(composed):
    return composed(
        "model=unet_small",
        "model.width=16",
        "model.depth=3",
        "model.convs_per_level=1",
        "data.patch_size=[32,32,32]",
        "trainer.accelerator=auto",
    )


@pytest.mark.parametrize("precision", ["32", "16"])
def test_two_traces_give_every_batch_exactly(composed, precision):
    request = composed(
        f"precision={precision}", "data.patch_size=[24,24,24]", "trainer.accelerator=auto"
    )
    any_batch = BatchExtrapolation(*(estimate_memory(with_batch(request, n)) for n in (2, 3)))
    assert any_batch.affine
    for batch in (2, 5, 11):
        traced = estimate_memory(with_batch(request, batch))
        peak = any_batch.peak(batch)
        assert peak == traced.peak


def test_the_largest_batch_fits_and_one_more_does_not(request_):
    any_batch = BatchExtrapolation(*(estimate_memory(with_batch(request_, n)) for n in (2, 3)))
    budget = 2 * GIB
    best = search_largest_batch(any_batch, budget)
    assert any_batch.peak(best).reserved + CONTEXT <= budget
    assert any_batch.peak(best + 1).reserved + CONTEXT > budget


def test_recomputing_every_block_costs_a_third_more_work(request_):
    assert measure_extra_compute(request_, ("checkpointing=none",)) == 0
    assert 0.25 < measure_extra_compute(request_, ("checkpointing=blocks",)) < 0.36


TINY = [
    "model.width=4",
    "model.depth=2",
    "model.convs_per_level=1",
    "data.patch_size=[16,16,16]",
    "precisions=[bf16,32]",
    "strategies=[fused,blocks]",
]


def test_fit_prints_override_lines_that_fit(capsys):
    assert main(["suggest", "budget_gib=1", *TINY, "format=json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert 0 < len(found) <= 4
    assert set(found[0]) == {
        "overrides",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "extra_compute",
    }
    assert all(f["peak_reserved_bytes"] + CONTEXT <= GIB for f in found)
    assert any(word.startswith("data.batch_size=") for word in found[0]["overrides"])
    assert "4/4" in said.err


def test_a_data_set_tells_what_the_config_leaves_open(decathlon_folder, capsys):
    data = ["data=decathlon", f"data.root={decathlon_folder}", "data.patch_size=[8,8,8]"]
    words = ["data.batch_size=1", "model.width=2", "precision=32", "strategies=[lean]"]
    assert main(["suggest", "budget_gib=4", *data, *words]) == 0
    assert "checkpointing=lean" in capsys.readouterr().out


def test_what_is_given_is_pinned(capsys):
    words = ["precision=16", "checkpointing=none", "data.batch_size=3"]
    assert main(["suggest", "budget_gib=2", "data.patch_size=[16,16,16]", *words]) == 0
    shown = capsys.readouterr()
    assert "1/1" in shown.err
    assert "batch 3" in shown.err


def test_fit_says_plainly_when_nothing_fits(capsys):
    assert main(["suggest", "budget_gib=0.586", *TINY]) == 3
    assert "nothing fits 0.586 GiB" in capsys.readouterr().err
    assert main(["suggest", "budget_gib=0.5", *TINY]) == 3
    assert "CUDA's context alone takes about 600 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "budget_gib must be given"),
        (["budget_gib=0"], "above 0"),
        (["budget_gib=much"], "above 0 or auto"),
        (["budget_gib=1", "format=png"], "table or json"),
        (["budget_gib=1", "patches=[0]"], "shares of data.patch_size"),
    ],
)
def test_bad_input_is_answered_in_one_line(words, said, capsys):
    assert main(["suggest", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_budget_read_from_a_card_that_is_not_there_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["suggest", "budget_gib=auto"]) == 2
    assert "finds no GPU" in capsys.readouterr().err


def test_a_run_predicted_not_to_fit_warns_or_stops_with_what_would(request_):
    prediction = estimate_memory(request_)
    total = prediction.peak.reserved + CONTEXT - 1
    lines = format_oom_warning(prediction, request_, total, stop=False)
    assert lines[0].startswith("predicted not to fit")
    assert any("checkpointing=" in line for line in lines)
    with pytest.raises(DoesNotFitError, match="predicted not to fit"):
        format_oom_warning(prediction, request_, total, stop=True)
    assert format_oom_warning(prediction, request_, total + 1, stop=True) == []


def test_remedies_are_predicted_to_fit(request_):
    total = estimate_memory(request_).peak.reserved + CONTEXT - 1
    found = find_remedies(request_, total)
    assert len(found) == 3
    assert all(r.reserved + CONTEXT <= total for r in found)


def test_the_module_that_ran_out_is_named(request_):
    from unet3d.config.instantiate import build_network

    model = build_network(request_)

    def fails(module, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.keep = None  # plain modules; lean blocks call no others
    model.decoder[1].convs[0].norm.register_forward_pre_hook(fails)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.randn(2, 1, 8, 8, 8))
    assert find_failing_module(caught.value.__traceback__, model) == "decoder.1.convs.0.norm"


def test_out_of_memory_is_a_report_and_not_a_trace(unet3d, tmp_path, capsys, monkeypatch):
    """Raised in the third forward of training: a checkpoint is there, and the way on is printed."""
    from unet3d.model.unet import DecoderLevel

    original, calls = DecoderLevel.forward, []

    def fails(self, *inputs):
        if self.training:
            calls.append(1)
            if len(calls) == 5:  # the prediction had two
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(self, *inputs)

    monkeypatch.setattr(DecoderLevel, "forward", fails)
    assert (
        unet3d(
            "trainer.max_steps=9",
            "memory.estimate=true",
            "model.depth=2",
            "model.convs_per_level=1",
        )
        == 3
    )
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "out of GPU memory in the forward, at module decoder" in error
    assert "predicted largest holders" in error
    assert "resume=auto" in error
    last = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] >= 1


def test_the_report_of_a_gpu_says_how_much_was_reserved_in_vain(request_, tmp_path, monkeypatch):
    class Properties:
        total_memory = 24 * GIB

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 23 * GIB)
    said = format_oom_report(
        torch.OutOfMemoryError("x"),
        request=request_,
        model=torch.nn.Identity(),
        phase="backward",
        device=torch.device("cuda"),
        prediction=None,
        folder=tmp_path,
    )
    assert "20.0 GiB allocated, 23.0 GiB reserved of 24.0 GiB; 3.0 GiB reserved but" in said
    assert said.count(" reserved)") == 3


def test_a_run_says_its_prediction_first_and_sets_it_beside_the_measured(unet3d, tmp_path, capsys):
    assert unet3d("memory.estimate=true") == 0
    shown = capsys.readouterr().out
    assert shown.index("predicted: ") < shown.index("Dice, mean")
    assert "MiB of tensors" in shown
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["memory"]["predicted"]["allocated"] > 0


def test_a_cpu_run_that_would_fill_the_memory_warns_as_well(composed, monkeypatch):
    from unet3d.workflows.memory import oom_advice

    request = composed("model.depth=2", "model.convs_per_level=1")
    monkeypatch.setattr(oom_advice, "get_available_bytes", lambda device: CONTEXT)
    lines = oom_advice.check_memory(estimate_memory(request), request, torch.device("cpu"))
    assert lines[0].startswith("predicted not to fit")


def test_a_bad_choice_for_misfits_is_refused(composed, tmp_path):
    from unet3d.errors import UsageError
    from unet3d.workflows.memory.oom_advice import check_memory

    request = composed("memory.if_too_large=hope")
    with pytest.raises(UsageError, match="warn, stop or ignore"):
        check_memory(estimate_memory(request), request, torch.device("cpu"))


def test_tensorboard_has_the_prediction_beside_every_step():
    from unet3d.memory.peak import PeakMeter
    from unet3d.memory.record import MemoryRecord

    memory = StepMemory(PeakMeter(), MemoryRecord(allocated=5))
    assert memory.summary()["predicted"] == {"allocated": 5}
