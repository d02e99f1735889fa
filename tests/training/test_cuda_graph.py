"""Replayed steps equal eager ones; on a CPU, a recorder of operations stands for CUDA graphs."""

import lightning.pytorch as pl
import pytest
import torch

from tests.training.helpers.operation_recorder import PEAK, OperationRecorder
from unet3d.commands import train as command
from unet3d.memory.step.training_step import find_cuda_graph_obstacle
from unet3d.training.cuda_graph import WARMUP_BATCHES, CudaGraphs, GraphedPass

OPTIONS = ("fold=0", "model=unet_tiny", "trainer.max_steps=7", "data.patches_per_case=8")


def train(composed, folder, monkeypatch, *overrides, recorder=None, callbacks=(), validate=False):
    with monkeypatch.context() as patch:
        patch.setattr(command, "choose_graphs", lambda *_: (recorder, []))
        run = command.build_training(composed(*OPTIONS, *overrides), folder)
    if recorder is not None:
        recorder.buffers = list(run.module.model.buffers())
    run.trainer.callbacks += callbacks
    run.trainer.fit(run.module, run.data if validate else run.data.train_loader)
    return run


def get_state(run):
    state = dict(run.module.state_dict())
    for index, moments in enumerate(run.trainer.optimizers[0].state.values()):
        state |= {f"{index}.{name}": value for name, value in moments.items()}
    return state


def assert_equal(run, other):
    state, expected = get_state(run), get_state(other)
    assert state.keys() == expected.keys()
    assert not [name for name, value in state.items() if not value.equal(expected[name])]


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.norm=batch", "precision=bf16"),
        (
            "checkpointing=lean",
            "model.deep_supervision=true",
            "trainer.accumulate_grad_batches=2",
        ),
        ("model=dynunet", "model.filters=[2,4,4]", "model.norm_name=batch"),
    ],
    ids=str,
)
def test_replayed_steps_equal_eager_steps_bit_for_bit(composed, tmp_path, monkeypatch, overrides):
    recorder = OperationRecorder()
    eager = train(composed, tmp_path / "a", monkeypatch, *overrides)
    replayed = train(composed, tmp_path / "b", monkeypatch, *overrides, recorder=recorder)
    assert replayed.module.graphed_pass.recording is not None
    assert_equal(replayed, eager)


class SpoilImage(pl.Callback):
    """Put NaN into the image of one batch."""

    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.batch and not pl_module.nonfinite_guard.skipped:
            batch["image"].fill_(torch.nan)


def test_a_replayed_batch_with_a_non_finite_loss_is_skipped(composed, tmp_path, monkeypatch):
    options = ("max_skipped_steps=1", "model.norm=batch")
    runs = [
        train(composed, tmp_path / str(r), monkeypatch, *options, recorder=r, callbacks=[spoil])
        for r, spoil in ((None, SpoilImage(5)), (OperationRecorder(), SpoilImage(5)))
    ]
    assert [run.module.nonfinite_guard.skipped for run in runs] == [1, 1]
    assert_equal(*runs)


def test_a_step_that_cannot_be_recorded_is_launched_as_before(
    composed, tmp_path, monkeypatch, caplog
):
    class ReadLoss(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            pl_module.loss.register_forward_hook(lambda module, args, loss: loss.item() and None)

    recorder = OperationRecorder()
    run = train(composed, tmp_path / "a", monkeypatch, recorder=recorder, callbacks=[ReadLoss()])
    assert run.module.graphed_pass.recording is None
    (line,) = [r.getMessage() for r in caplog.records if "trainer.cuda_graph" in r.getMessage()]
    assert line.endswith("runs without: operation not permitted when stream is capturing")
    assert_equal(run, train(composed, tmp_path / "b", monkeypatch))


def test_a_batch_of_another_size_is_not_replayed():
    torch.manual_seed(0)
    model = torch.nn.Conv3d(1, 2, 1)
    recorded = GraphedPass(model, lambda x, y: (x * y[:, None]).mean(), OperationRecorder())
    batches = [(torch.randn(n, 1, 2, 2, 2), torch.ones(n, 2, 2, 2)) for n in (2, 2, 2, 2, 2, 1)]
    for image, label in batches:
        loss, outputs = recorded(image, label)
        model.zero_grad()
        loss.backward()
        expected = torch.autograd.grad(model(image).mean(), list(model.parameters()))
        assert all(p.grad.equal(g) for p, g in zip(model.parameters(), expected, strict=True))
    assert outputs is not None  # of the last batch, which ran without the recording


def test_after_warmup_no_batch_calls_the_network_and_peaks_are_those_of_the_recording(
    composed, tmp_path, monkeypatch
):
    """The allocator does not see what is allocated within a graph."""
    calls = []

    class CountForwards(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            pl_module.model.register_forward_hook(lambda *_: calls.append(1))

    options = {"recorder": OperationRecorder(), "callbacks": [CountForwards()]}
    run = train(composed, tmp_path, monkeypatch, **options)
    assert len(calls) == WARMUP_BATCHES + 1  # the last one is recorded
    steady = run.callbacks.memory.summarize()["steady_step"]["phases"]
    assert {p: r.get("allocated") for p, r in steady.items()} == {
        "forward": PEAK.allocated,
        "backward": PEAK.allocated,
        "optimizer": None,
    }


def test_validation_uses_the_memory_of_the_recording(composed, tmp_path, monkeypatch):
    recorder = OperationRecorder()
    run = train(composed, tmp_path, monkeypatch, recorder=recorder, validate=True)
    volumes, validations = len(run.data.val_loader), run.trainer.current_epoch
    assert recorder.borrowed == volumes * validations > 0  # not before there is a recording


@pytest.mark.parametrize(
    ("overrides", "several_processes", "reason"),
    [
        ((), True, "several processes"),
        (("compile=true",), False, "compile=true"),
        (("checkpointing=offload",), False, "checkpointing=offload"),
        ((), False, None),
    ],
)
def test_what_cannot_be_recorded_is_known_before(composed, overrides, several_processes, reason):
    config = composed(*overrides).step
    obstacle = find_cuda_graph_obstacle(config, "cuda", several_processes=several_processes)
    assert obstacle is None if reason is None else obstacle.startswith(reason)


def test_a_run_says_why_it_does_not_record(composed, tmp_path):
    run = command.build_training(composed("trainer.cuda_graph=true"), tmp_path)
    assert "trainer.cuda_graph=true has no effect: a cpu device has no CUDA graphs" in run.notes
    assert run.module.graphed_pass is None


@pytest.mark.gpu
def test_on_a_gpu_replayed_steps_equal_eager_steps(composed, tmp_path, monkeypatch):
    options = ("trainer.accelerator=gpu", "trainer.max_steps=8")
    eager, replayed = (
        train(composed, tmp_path / str(n), monkeypatch, *options, recorder=graphs, validate=True)
        for n, graphs in enumerate((None, CudaGraphs(torch.device("cuda", 0))))
    )
    assert replayed.module.graphed_pass.recording is not None
    assert_equal(replayed, eager)
