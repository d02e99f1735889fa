"""Backends compute the logits of torch, and the memory of their windows is measured."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.inference.conftest import build_predictor, make_ensemble
from tests.training.helpers.operation_recorder import OperationRecorder
from unet3d import peak_memory as peak
from unet3d.errors import RunError, UsageError
from unet3d.inference import networks
from unet3d.inference.networks import (
    ReplayedNetwork,
    measure_window_memory,
    open_network,
    resolve_computation,
)
from unet3d.machine import Precision, has_fast_bf16
from unet3d.model.unet import UNet3D
from unet3d.pool.max import MaxPool3d

PATCH = (16, 12, 8)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    network = UNet3D(
        in_channels=1, num_classes=3, depth=2, width=4, norm="instance", pool=MaxPool3d
    )
    return make_ensemble(network, PATCH)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "openvino"])
def test_every_backend_finds_the_same_labels(unet, write_scans, backend):
    (task,) = write_scans(shape=(20, 17, 9))
    predictors = [
        build_predictor(unet, batch_size=5, backend=b)  # the last batch is smaller
        for b in ("torch", backend)
    ]
    expected, labels = (p.segment(p.prepare(task)) for p in predictors)
    assert len(np.unique(expected)) > 1
    np.testing.assert_array_equal(labels, expected)
    if backend == "openvino":  # without bf16 instructions it falls back to float32
        (network,), bf16 = unet.networks, Precision("bf16", "bf16")
        opened = open_network(network, backend, bf16, CPU, shape=(1, 1, *PATCH))
        used = [
            session.model.get_property("INFERENCE_PRECISION_HINT").get_type_name()
            for session in (predictors[1].networks[0], opened)
        ]
        assert used == ["f32", "bf16" if has_fast_bf16() else "f32"]


@pytest.mark.parametrize(
    ("requested", "backend", "used", "reason"),
    [
        (None, "torch", "32", "a CPU does not compute in pure fp16"),
        ("bf16-true", "torch", "bf16-true", ""),
        ("bf16-true", "onnx", "32", "backend=onnx computes in float32"),
        ("bf16-true", "openvino", "32", "backend=openvino computes in float32"),
    ],
)
def test_a_backend_computes_in_a_precision_that_it_has(requested, backend, used, reason):
    device, precision = resolve_computation("cpu", requested, backend, "16-true")
    assert (device, precision.used, precision.reason) == (CPU, used, reason)


def test_a_backend_for_cpus_is_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr(networks, "resolve_device", lambda device, key: "cuda")
    with pytest.raises(UsageError, match=r"^backend=onnx computes on the CPU: add device=cpu$"):
        resolve_computation("auto", "32", "onnx", "32")


def test_a_network_that_cannot_be_traced_is_named():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(RunError, match=r"^Branching cannot be traced by torch.export: .*"):
        open_network(Branching(), "onnx", Precision("32", "32"), CPU, shape=(1, 1, *PATCH))


def test_outputs_of_modules_are_counted_where_a_process_cannot_read_its_peak(monkeypatch):
    monkeypatch.setattr(peak, "read_resident_peak", lambda: None)
    network = nn.Sequential(nn.Conv3d(1, 2, 1), nn.ReLU())
    outputs, nbytes = measure_window_memory([network], (1, 1, 4, 4, 4), CPU)
    assert outputs == 2
    assert nbytes == 3 * 2 * 4**3 * 4  # of both layers, and of what holds them


def test_patches_that_a_network_does_not_take_are_refused():
    with pytest.raises(UsageError, match=r"^the network cannot take patches of 4x4x4: "):
        measure_window_memory([nn.Conv3d(2, 3, 1)], (1, 1, 4, 4, 4), CPU)


def test_a_replayed_network_computes_every_batch_up_to_the_recorded_size(unet):
    (network,) = unet.networks
    with torch.no_grad():
        replayed = ReplayedNetwork(network, torch.zeros(2, 1, *PATCH), OperationRecorder())
        for count in (2, 1, 2):
            batch = torch.randn(count, 1, *PATCH)
            torch.testing.assert_close(replayed(batch), network(batch))
