"""nnU-Net's networks with fused blocks against the same networks without."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unet3d.errors import UsageError
from unet3d.nnunet.fused_network import use_fused_blocks

unet = pytest.importorskip("dynamic_network_architectures.architectures.unet")

ROOT = Path(__file__).resolve().parents[2]
CHANNELS, STRIDES, KERNELS = [4, 8, 12, 12], [1, 2, [1, 2, 2], 2], [[1, 3, 3], 3, 3, 3]


def make_network(kind, norm=nn.InstanceNorm3d, strides=STRIDES, **options):
    torch.manual_seed(0)
    convs, decoder = ([1, 2, 2, 2], 1) if kind == "ResidualEncoderUNet" else (2, 2)
    arguments = (2, 4, CHANNELS, nn.Conv3d, KERNELS, strides, convs, 3, decoder)
    defaults = {"conv_bias": True, "deep_supervision": True}
    defaults |= {"norm_op": norm, "norm_op_kwargs": {"affine": True, "eps": 1e-5}}
    defaults |= {"nonlin": nn.LeakyReLU, "nonlin_kwargs": {"inplace": True}}
    network = getattr(unet, kind)(*arguments, **(defaults | options)).double()
    for p in network.parameters():
        if p.dim() == 1:
            nn.init.uniform_(p, 0.5, 1.5)
    return network


def run_two_steps(network, x):
    """Return what two steps with deep supervision change."""
    optimizer, results = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9), []
    for _ in range(2):
        optimizer.zero_grad()
        outputs = network(x)
        sum(output.square().mean() for output in outputs).backward()
        results += [*outputs, *(p.grad for p in network.parameters())]
        optimizer.step()
    return results, network.state_dict()


@pytest.mark.parametrize(
    ("kind", "norm", "strategy"),
    [
        ("ResidualEncoderUNet", nn.InstanceNorm3d, "fused"),
        ("ResidualEncoderUNet", nn.BatchNorm3d, "lean"),
        ("PlainConvUNet", nn.InstanceNorm3d, "leanest"),
        ("PlainConvUNet", nn.BatchNorm3d, "none"),
    ],
)
def test_a_step_has_the_results_of_nnunets_network(kind, norm, strategy):
    plain = make_network(kind, norm)
    fused = copy.deepcopy(plain)
    use_fused_blocks(fused, strategy)
    x = torch.randn(2, 2, 16, 32, 32, dtype=torch.float64)
    (expected, state), (results, fused_state) = (run_two_steps(n, x) for n in (plain, fused))
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert list(fused_state) == list(state)
    for name, value in state.items():
        torch.testing.assert_close(fused_state[name], value, rtol=1e-9, atol=1e-12)


def train_rank(rank, images, init_file, output):
    """Train one volume per rank, wrapped as nnU-Net's trainer does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_file, rank=rank, world_size=2)
    network = make_network("ResidualEncoderUNet")
    use_fused_blocks(network, "lean")
    network = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(network))
    _, state = run_two_steps(network, images[rank : rank + 1])
    if rank == 0:
        torch.save(state, output)
    dist.barrier()  # a rank that leaves early aborts the other
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_as_nnunets_network_does_with_the_whole_batch(tmp_path):
    images = torch.randn(2, 2, 16, 32, 32, dtype=torch.float64)
    output, init_file = tmp_path / "state.pt", f"file://{tmp_path / 'init'}"
    mp.spawn(train_rank, (images, init_file, output), nprocs=2)
    _, expected = run_two_steps(make_network("ResidualEncoderUNet"), images)
    state = torch.load(output, weights_only=True)
    for name, value in expected.items():
        torch.testing.assert_close(state[f"module.{name}"], value, rtol=1e-9, atol=1e-12)


def test_deep_supervision_is_switched_as_in_nnunet():
    network = make_network("ResidualEncoderUNet")
    use_fused_blocks(network)
    x = torch.randn(1, 2, 16, 32, 32, dtype=torch.float64)
    for training in (True, False):
        network.train(training)
        network.decoder.deep_supervision = True
        assert [y.shape[2:] for y in network(x)] == [(16, 32, 32), (8, 16, 16), (8, 8, 8)]
        network.decoder.deep_supervision = False
        assert network(x).shape == (1, 3, 16, 32, 32)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"norm_op": None, "norm_op_kwargs": None}, "instance or batch norm"),
        ({"nonlin_first": True}, "convolution, norm"),
    ],
)
def test_what_is_not_supported_is_an_error(options, reason):
    with pytest.raises(UsageError, match=reason):
        use_fused_blocks(make_network("PlainConvUNet", **options))


@pytest.mark.parametrize("stem_channels", [3, 6])
def test_a_stem_of_other_channels_is_an_error(stem_channels):
    with pytest.raises(UsageError, match="without stem_channels"):
        use_fused_blocks(make_network("ResidualEncoderUNet", stem_channels=stem_channels))


def test_a_stride_in_the_first_stage_of_residual_blocks_is_an_error():
    strides = [[1, 2, 2], *STRIDES[1:]]
    with pytest.raises(UsageError, match="a first stage of residual blocks with a stride of 1"):
        use_fused_blocks(make_network("ResidualEncoderUNet", strides=strides))


@pytest.mark.parametrize("kind", ["ResidualEncoderUNet", "PlainConvUNet"])
def test_frozen_norms_and_replaced_parts_are_those_of_the_network(kind):
    plain, x = make_network(kind, nn.BatchNorm3d), torch.randn(2, 2, 8, 16, 16).double()
    fused = copy.deepcopy(plain)
    use_fused_blocks(fused, "lean")
    fused(x)
    head = nn.Conv3d(CHANNELS[0], 4, 1).double()
    for network in (plain, fused):
        network.load_state_dict(make_network(kind, nn.BatchNorm3d).state_dict())
        network.decoder.seg_layers[-1] = copy.deepcopy(head)
        network.train()
        for module in network.encoder.modules():
            if isinstance(module, nn.BatchNorm3d):
                module.eval()
    results = [network(x) for network in (plain, fused)]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    for got, expected in zip(fused.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(got, expected)
    assert [m.training for m in fused.modules()] == [m.training for m in plain.modules()]


@pytest.mark.long
def test_nnunet_trains_resumes_and_predicts_with_both_trainers(tmp_path):
    pytest.importorskip("nnunetv2")
    program = Path(__file__).parent / "helpers" / "train.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program), str(tmp_path)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, encoding="utf-8", timeout=300
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    starts = ("network", "predicts", "equal", "exit", "chooses", "logs")
    assert [line for line in ended.stdout.splitlines() if line.startswith(starts)] == [
        "network: FusedResidualEncoderUNet epochs: 1",
        "logs to W&B: 1",
        "network: ResidualEncoderUNet epochs: 2",
        "network: FusedResidualEncoderUNet epochs: 3",
        "equal when replayed: True",
        "equal estimate: True",
        "equal augmentation: True",
        "chooses: ['fused', 'leanest']",
        "network of two parents: FusedResidualEncoderUNet BatchNorm3d, "
        "ResidualEncoderUNet BatchNorm3d",
        "network of 2D slices: ResidualEncoderUNet",
        "predicts with: FusedResidualEncoderUNet",
        "predicts with: ResidualEncoderUNet",
        "equal labels: True foreground: True",
        "exit codes: [0, 0, 0]",
        "predicts with: ResidualEncoderUNet",
        "equal after export: True foreground: True",
    ]
