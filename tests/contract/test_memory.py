"""The memory of a step is estimated before it runs: to the byte on a CPU, and near an H100's."""

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

import unet3d as package
from tests.contract.conftest import call
from tests.contract.helpers.allocated import AllocatedBytes
from tests.contract.helpers.components import compose

GPU = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "nvidia-h100-80gb-hbm3.json").read_text()
)["parts"]
MIB = 2**20


def train(network, compute_loss, optimizer, make_batch, micro_batches=None, clip_norm=None):
    """Run a step as most loops write it; as Lightning does, with a number of micro-batches."""
    batch = make_batch()
    loss = compute_loss(network, *batch)
    if micro_batches is None:
        loss.backward()
    else:
        (loss / micro_batches).backward()
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(network.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()


def measure(network, *step, **options):
    """Return the largest size of all tensors in the second step, which later ones are like."""
    with AllocatedBytes([*network.parameters(), *network.buffers()]) as allocated:
        train(network, *step, **options)
        allocated.peak = allocated.current
        train(network, *step, **options)
    return allocated.peak


@pytest.fixture
def estimate(unet3d):
    """Return what `unet3d memory format=json` says."""

    def run(*words: str) -> dict:
        ended = unet3d("memory", *words, "format=json")
        assert ended.code == 0, ended.err
        return json.loads(ended.out)

    return run


NETWORKS = {
    "foreign": lambda: nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1),
        nn.BatchNorm3d(8),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(8, 8, 3, padding=1),
        nn.Upsample(scale_factor=2),
        nn.Conv3d(8, 2, 1),
    ),
    "dense": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4096, 100), nn.Tanh()),
    "plain": lambda: package.UNet3D(in_channels=1, num_classes=3, depth=2, width=4, fused=False),
    "fused": lambda: package.UNet3D(in_channels=1, num_classes=3, depth=3, width=4, pool="median"),
}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_estimate_of_any_network_is_the_peak_of_a_real_step_to_the_byte(name, optimizer):
    network, make_optimizer = NETWORKS[name](), partial(optimizer, lr=0.1)
    shape = (2, 1, 16, 16, 16)
    estimated = package.estimate_memory(
        network, shape, device="cpu", optimizer=make_optimizer, loss=lambda y: y.square().mean()
    )
    measured = measure(
        network,
        lambda model, x: model(x).square().mean(),
        make_optimizer(network.parameters()),
        lambda: (torch.zeros(shape),),
    )
    assert estimated.peak == measured
    assert estimated.reserved == 0


STEP = [
    *("model.width=4", "model.depth=4", "model.deep_supervision=true", "model.norm=batch"),
    *("pool=median", "data.patch_size=[18,17,16]", "data.batch_size=2"),
    *("data.num_classes=4", "data.in_channels=1", "trainer.accelerator=cpu"),
]


@pytest.fixture(scope="module")
def by_strategy():
    """Return the estimates of a configured step, by checkpointing strategy."""
    ended = call("memory", *STEP, "vary=checkpointing", "format=json")
    assert ended.code == 0, ended.err
    rows = json.loads(ended.out)
    return {row["value"].removeprefix("checkpointing="): row for row in rows}


@pytest.mark.parametrize("strategy", ["none", "fused", "skips", "lean", "leanest", "blocks"])
def test_the_estimate_of_a_run_is_the_peak_of_its_real_step_to_the_byte(strategy, by_strategy):
    config = compose(*STEP, f"checkpointing={strategy}")
    options = {k: v for k, v in config["model"].items() if k != "prior_bias"}
    network = instantiate(options, pool=instantiate(config["pool"]))
    instantiate(config["checkpointing"]).apply(network)
    loss = instantiate(config["loss"])
    measured = measure(
        network,
        lambda model, x, y: loss(model(x), y),
        torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True),
        lambda: (torch.zeros(2, 1, 18, 17, 16), torch.zeros(2, 18, 17, 16, dtype=torch.uint8)),
        micro_batches=1,
        clip_norm=12.0,
    )
    assert by_strategy[strategy]["peak_allocated_bytes"] == measured


@pytest.mark.parametrize(
    "words",
    [
        ("checkpointing=none", "trainer.accumulate_grad_batches=2"),
        ("checkpointing=fused", "ema_decay=0.9", "trainer.gradient_clip_val=null"),
        ("checkpointing=leanest", "model.norm=batch"),
    ],
    ids=" ".join,
)
def test_the_estimate_of_a_run_is_the_peak_of_the_steps_that_lightning_runs(
    words, unet3d, tmp_path
):
    counter = ["_target_=tests.contract.helpers.allocated.StepPeaks", "file=peak.txt"]
    ended = unet3d(
        *("train", "output=run", "data.patch_size=[16,16,16]", "trainer.max_steps=4", *words),
        *("data.batch_size=2", "data.layout.num_cases=4", "fold=none", "logger=none"),
        *(f"+callbacks.peaks.{word}" for word in counter),
    )
    assert ended.code == 0, ended.err
    estimated = json.loads((tmp_path / "run" / "report.json").read_text())["memory"]["estimated"]
    measured = int((tmp_path / "peak.txt").read_text())
    # Beside the step, a run holds norms of gradients, statistics to restore, and logged numbers.
    assert abs(measured - estimated["allocated"]) < 2000


def test_the_estimate_names_the_phases_kinds_and_layers_of_its_peak(by_strategy):
    network = package.UNet3D(
        in_channels=1, num_classes=4, depth=4, width=4, deep_supervision=True, norm="batch"
    )
    weights = [*network.parameters(), *network.buffers()]
    for row in by_strategy.values():
        phases = {name: phase["allocated_bytes"] for name, phase in row["phases"].items()}
        assert set(phases) == {"forward", "backward", "optimizer", "validation"}
        assert row["peak_allocated_bytes"] == max(phases.values())
        assert row["parameters"] == sum(p.numel() for p in network.parameters())
        kinds = {"parameters", "optimizer state", "input"}
        assert kinds <= set(row["kinds"])
        assert row["kinds"]["parameters"] == sum(tensor.nbytes for tensor in weights)
        assert sum(row["kinds"].values()) == row["peak_allocated_bytes"]
        names = [layer["name"] for layer in row["layers"] if layer["phase"] == "forward"]
        levels = dict.fromkeys(".".join(name.split(".")[:2]) for name in names)
        coders = [level for level in levels if level.startswith(("encoder", "decoder"))]
        assert coders == [f"encoder.{n}" for n in range(4)] + [f"decoder.{n}" for n in range(3)]


PATCH = "data.patch_size=[64,64,64]"


def test_an_estimate_is_within_half_a_percent_of_what_an_h100_measured(estimate, monkeypatch):
    row = f"precision=bf16 checkpointing=leanest model=unet_nnunet optimizer=sgd {PATCH}"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # 32 MiB, an H100's own
    estimated = estimate(*row.split(), "data.num_classes=5", "trainer.accelerator=gpu")
    measured = GPU["predict"]["rows"][row]["measured"]
    assert estimated["peak_allocated_bytes"] == pytest.approx(measured["allocated"], rel=0.005)
    assert estimated["peak_reserved_bytes"] == pytest.approx(measured["reserved"], rel=0.005)


def test_each_strategy_takes_less_than_the_one_before_and_what_an_h100_measured(
    estimate, monkeypatch
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    words = ["precision=16", "model=unet_small", "optimizer=adamw", PATCH, "data.num_classes=5"]
    rows = estimate(*words, "trainer.accelerator=gpu", "vary=checkpointing")
    peaks = {
        row["value"].removeprefix("checkpointing="): row["peak_allocated_bytes"] for row in rows
    }
    for strategy in ("fused", "leanest"):
        row = f"precision=16 checkpointing={strategy} model=unet_small optimizer=adamw {PATCH}"
        measured = GPU["predict"]["rows"][row]["measured"]["allocated"]
        assert peaks[strategy] == pytest.approx(measured, rel=0.005), strategy
    order = ["leanest", "lean", "skips", "fused", "blocks", "none"]
    assert [peaks[name] for name in order] == sorted({peaks[name] for name in order})
    assert peaks["fused"] < peaks["none"] / 2
    assert peaks["offload"] < peaks["blocks"]


def test_the_estimate_follows_batch_precision_and_pooling():
    network = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.MaxPool3d(2), nn.Conv3d(8, 2, 1))
    before = copy.deepcopy(network.state_dict())
    peaks = [
        package.estimate_memory(network, (batch, 1, 32, 32, 32)).peak for batch in (1, 2, 3, 4)
    ]
    assert peaks[3] - peaks[2] == peaks[2] - peaks[1] > 0
    assert peaks[1] > peaks[0]
    shape = (2, 1, 32, 32, 32)
    for precision in (16, "16", "bf16", "16-mixed"):
        assert package.estimate_memory(network, shape, precision=precision).peak < peaks[1]
    shape = (1, 1, 64, 64, 64)
    with_torch = package.estimate_memory(network, shape, precision=16)
    replaced = copy.deepcopy(network)
    assert package.replace_pooling(replaced) == 1
    assert package.estimate_memory(replaced, shape, precision=16).peak < with_torch.peak
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_an_estimate_is_a_table_a_line_and_the_largest_batch():
    estimate = package.estimate_memory(NETWORKS["fused"](), (2, 1, 64, 64, 64), precision=16)
    assert estimate.reserved >= estimate.peak > MIB
    largest = estimate.largest_batch(budget_gib=2)
    fits, exceeds = (
        package.estimate_memory(NETWORKS["fused"](), (n, 1, 64, 64, 64), precision=16).reserved
        for n in (largest, largest + 1)
    )
    assert fits <= 2 * 1024 * MIB - 600 * MIB < exceeds
    assert "backward" in estimate.table()
    assert "MiB" in repr(estimate)
    assert estimate.timeline().axes


def test_a_network_that_cannot_be_traced_is_one_line():
    class DataDependent(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(1, 1, 1)

        def forward(self, x):
            return self.conv(x)[x > 0]

    with pytest.raises(ValueError) as caught:
        package.estimate_memory(DataDependent(), (1, 1, 4, 4, 4))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="precision"):
        package.estimate_memory(nn.Conv3d(1, 1, 1), (1, 1, 4, 4, 4), precision="8")
