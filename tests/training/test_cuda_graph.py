"""Replayed steps equal eager ones; on a CPU, a recorder of operations stands for CUDA graphs."""

import gc
import os

import lightning.pytorch as pl
import pytest
import torch
from torch import multiprocessing

from tests.contract.helpers.faults import SpoilImages
from tests.training.helpers.operation_recorder import PEAK, OperationRecorder
from unet3d.commands import train as command
from unet3d.cuda_graphs import WARMUP_BATCHES, CudaGraphs, GraphedPass, find_skipped_code
from unet3d.memory.traced_step import find_cuda_graph_obstacle
from unet3d.text import MIB
from unet3d.training import preflight
from unet3d.training.distributed import CudaGraphStrategy
from unet3d.training.launch import ProcessRank

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
        pytest.param(("model.norm=batch", "precision=bf16"), marks=pytest.mark.slow),
        (
            *("checkpointing=lean", "model.deep_supervision=true", "model.depth=4"),
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
    assert replayed.module.step.graphed_pass.recording is not None
    assert not replayed.module.step.graphed_pass.trusted
    assert_equal(replayed, eager)


@pytest.mark.slow
def test_a_replayed_batch_with_a_non_finite_loss_is_skipped(composed, tmp_path, monkeypatch):
    options = ("max_skipped_steps=1", "model.norm=batch")
    runs = [
        train(composed, tmp_path / str(r), monkeypatch, *options, recorder=r, callbacks=[spoil])
        for r, spoil in ((None, SpoilImages(5)), (OperationRecorder(), SpoilImages(5)))
    ]
    assert [run.module.nonfinite_guard.skipped for run in runs] == [1, 1]
    assert_equal(*runs)


def test_a_batch_that_cannot_be_recorded_is_computed_as_before(caplog):
    def read_loss(x, y):
        loss = (x * y[:, None]).mean()
        return loss * (loss.item() < torch.inf)

    recorded = GraphedPass(torch.nn.Conv3d(1, 2, 1), read_loss, OperationRecorder())
    image, label = torch.randn(2, 1, 2, 2, 2), torch.ones(2, 2, 2, 2)
    losses = {recorded(image, label)[0].item() for _ in range(6)}
    assert losses == {read_loss(recorded.model(image), label).item()}
    assert recorded.recording is None
    (line,) = [r.getMessage() for r in caplog.records if "CUDA graphs" in r.getMessage()]
    assert line.endswith("without CUDA graphs: operation not permitted when stream is capturing")


def test_auto_does_not_record_hooks_and_code_of_users():
    hooked = torch.nn.Sequential(torch.nn.Conv3d(1, 2, 1))
    assert find_skipped_code(hooked) is None
    hooked[0].register_full_backward_hook(lambda *_: None)
    assert find_skipped_code(hooked) == "a hook of Conv3d"

    class Counter(torch.nn.Conv3d):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    outputs = {}
    for trusted in (False, True):
        model, loss = Counter(1, 2, 1), torch.nn.CrossEntropyLoss()
        recorded = GraphedPass(model, loss, OperationRecorder(), trusted=trusted)
        for _ in range(6):
            recorded(torch.ones(2, 1, 2, 2, 2), torch.ones(2, 2, 2, 2, dtype=torch.long))
        outputs[trusted] = model.calls
    assert outputs == {False: 6, True: WARMUP_BATCHES + 1}


@pytest.mark.slow
def test_auto_does_not_record_where_the_memory_of_graphs_does_not_fit(
    composed, tmp_path, monkeypatch
):
    monkeypatch.setattr(preflight, "get_available_bytes", lambda device: 2**20)
    monkeypatch.setattr(command, "choose_graphs", lambda *_: (OperationRecorder(), []))
    note = "steps run without CUDA graphs, whose memory does not fit"
    for choice in ("auto", "true"):
        words = ["model.depth=2", "memory.estimate=true", f"trainer.cuda_graph={choice}"]
        run = command.build_training(composed(*words), tmp_path)
        assert (run.module.step.graphed_pass is None) == (note in run.notes) == (choice == "auto")


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


def test_after_warmup_peaks_and_the_memory_of_validation_are_those_of_the_recording(
    composed, tmp_path, monkeypatch
):
    """The allocator does not see what is allocated within a graph."""
    recorder = OperationRecorder()
    run = train(composed, tmp_path, monkeypatch, recorder=recorder, validate=True)
    steady = run.callbacks.memory.summarize()["steady_step"]["phases"]
    assert {p: r.get("allocated") for p, r in steady.items()} == {
        "forward": PEAK.allocated,
        "backward": PEAK.allocated,
        "optimizer": None,
    }
    volumes, validations = len(run.data.val_loader), run.trainer.current_epoch
    assert recorder.borrowed == volumes * validations > 0  # not before there is a recording


def test_what_cannot_be_recorded_is_known_before(composed):
    def find(*words):
        return find_cuda_graph_obstacle(composed(*words).step, "cuda")

    assert find() is None
    for word in ("compile=true", "checkpointing=offload"):
        assert find(word).startswith(word)


def train_rank(rank, init_file, settings, folder):
    """Train as one of two ranks, eagerly and replayed; save both states."""
    torch.set_num_threads(1)
    process = ProcessRank(rank=rank, local_rank=rank, world_size=2, local_world_size=2)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ |= dict(zip(names, map(str, (rank, rank, 2, 2, "localhost", 0)), strict=True))
    torch.distributed.init_process_group("gloo", init_method=init_file, rank=rank, world_size=2)
    for name, recorder in {"eager": None, "replayed": OperationRecorder()}.items():
        command.choose_graphs = lambda *_, recorder=recorder: (recorder, [])
        run = command.build_training(settings, folder / name, process=process)
        if recorder is not None:
            recorder.buffers = list(run.module.model.buffers())
        run.trainer.fit(run.module, run.data)  # validation gives all the statistics of rank 0
        if recorder is not None:
            assert run.module.step.graphed_pass.recording is not None
            assert isinstance(run.trainer.strategy, CudaGraphStrategy)
        torch.save(get_state(run), folder / f"{name}-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [("model.norm=batch",), ("trainer.accumulate_grad_batches=2",)], ids=str
)
def test_ranks_that_replay_take_the_steps_of_ranks_that_do_not(composed, tmp_path, overrides):
    settings = composed(*OPTIONS, "trainer.launch=torchrun", "trainer.devices=2", *overrides)
    init_file = f"file://{tmp_path / 'init'}"
    multiprocessing.spawn(train_rank, (init_file, settings, tmp_path), nprocs=2)
    states = [torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("*.pt"))]
    assert len(states) == 4
    for state in states:
        assert not [name for name, value in state.items() if not value.equal(states[0][name])]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("precision=16", "model.norm=batch", "ema_decay=0.9"),
        (
            *("precision=bf16", "checkpointing=lean", "model.deep_supervision=true"),
            "model.depth=4",
        ),
        ("checkpointing=leanest", "trainer.accumulate_grad_batches=2"),
        (
            *("precision=16", "pool=strided", "model.residual_blocks=[1,2,2]"),
            "model.stochastic_depth=0.3",
        ),
        # Gradients of plain float32 convolutions and of trilinear upsampling are not deterministic.
        ("checkpointing=none", "pool=median", "precision=16", "model.upsampling=transposed"),
        ("checkpointing=blocks", "precision=16", "model.upsampling=transposed"),
        ("model=dynunet", "model.filters=[2,4,4]", "precision=16"),
    ],
    ids=str,
)
def test_on_a_gpu_replayed_steps_equal_eager_steps(composed, tmp_path, monkeypatch, overrides):
    options = ("trainer.accelerator=gpu", "trainer.max_steps=8", *overrides)
    eager, replayed = (
        train(composed, tmp_path / str(n), monkeypatch, *options, recorder=graphs, validate=True)
        for n, graphs in enumerate((None, CudaGraphs(torch.device("cuda", 0))))
    )
    assert replayed.module.step.graphed_pass.recording is not None
    assert_equal(replayed, eager)


class BreakRecording(pl.Callback):
    """Let the batch that is recorded read a value, or find no memory."""

    def __init__(self, way):
        self.way = way

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == WARMUP_BATCHES and self.way == "read":
            pl_module.loss.register_forward_hook(lambda module, args, loss: loss.item() and None)
        if trainer.global_step == WARMUP_BATCHES and self.way == "memory":
            gc.collect()
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            limit = torch.cuda.memory_reserved() + 8 * MIB
            torch.cuda.set_per_process_memory_fraction(limit / total)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("way", "reason"), [("read", "during capture"), ("memory", "out of memory")]
)
def test_on_a_gpu_a_step_that_cannot_be_recorded_runs_without(
    composed, tmp_path, monkeypatch, caplog, way, reason
):
    options = ("trainer.accelerator=gpu", "trainer.max_steps=8", "trainer.cuda_graph=true")
    device = torch.device("cuda", 0)
    eager, broken = (
        train(composed, tmp_path / str(n), monkeypatch, *options, recorder=graphs, callbacks=extra)
        for n, (graphs, extra) in enumerate(
            [(None, []), (CudaGraphs(device), [BreakRecording(way)])]
        )
    )
    assert broken.module.step.graphed_pass.recording is None
    (line,) = [r.getMessage() for r in caplog.records if "CUDA graphs" in r.getMessage()]
    assert reason in line
    assert_equal(broken, eager)


def test_a_network_that_has_changed_is_recorded_again(caplog):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv3d(1, 2, 1), torch.nn.Dropout(0.0))
    recorded = GraphedPass(model, lambda x, y: (x * y[:, None]).mean(), OperationRecorder())
    image, label = torch.randn(2, 1, 2, 2, 2), torch.ones(2, 2, 2, 2)

    def assert_right(steps):
        for _ in range(steps):
            loss, _ = recorded(image, label)
            model.zero_grad()
            loss.backward()
            used = [p for p in model.parameters() if p.requires_grad]
            expected = torch.autograd.grad(model(image).mean(), used)
            assert all(p.grad.equal(g) for p, g in zip(used, expected, strict=True))

    model[0].weight.requires_grad_(False)
    assert_right(WARMUP_BATCHES + 2)
    for change in (
        lambda: model[0].weight.requires_grad_(),
        lambda: setattr(model[0].bias, "data", torch.ones(2)),
        lambda: model[1].eval(),
    ):
        assert recorded.recording is not None
        change()
        assert_right(1)
        assert recorded.recording is None
        assert_right(WARMUP_BATCHES + 1)
    assert len([r for r in caplog.records if "recorded again" in r.getMessage()]) == 3
