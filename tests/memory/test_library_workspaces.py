import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.memory.estimate import simulate_cuda_step
from unet3d.memory.library_workspaces import get_cublas_bytes
from unet3d.memory.trace import Trace
from unet3d.units import MIB

HALF = {"dtype": torch.float16}


def trace(make, shape, *, channels_last=False, change=None):
    """Trace forward and backward of a module in half precision."""
    with FakeTensorMode(), simulate_cuda_step():
        module = make()
        x = torch.empty(shape, dtype=torch.float16)
        if channels_last:
            format = torch.channels_last_3d
            module.weight.data = module.weight.data.contiguous(memory_format=format)
            x = x.contiguous(memory_format=format)
        x.requires_grad_()
        result = Trace(cuda=True)
        with result.record(module):
            result.begin_phase("forward")
            y = module(x)
            result.begin_phase("backward")
            y.backward(torch.empty_like(y) if change is None else change(y))
    return result


def list_workspaces(result):
    return [block.nbytes for block in result.blocks if block.op == "cuDNN" and block.nbytes]


def test_contiguous_tensors_are_copied_with_channels_that_fill_vectors():
    result = trace(lambda: nn.Conv3d(12, 16, 3, padding=1, **HALF), (2, 12, 8, 8, 8))
    x, y, weight = 2 * 16 * 512 * 2, 2 * 16 * 512 * 2, 16 * 16 * 27 * 2
    assert list_workspaces(result) == 3 * [x + y + weight]


def test_channels_last_tensors_are_read_as_they_are():
    shape = (2, 16, 8, 8, 8)
    assert not list_workspaces(
        trace(lambda: nn.Conv3d(16, 16, 3, **HALF), shape, channels_last=True)
    )


def test_depthwise_convolutions_have_no_workspace():
    assert not list_workspaces(
        trace(lambda: nn.Conv3d(16, 16, 3, groups=16, **HALF), (2, 16, 8, 8, 8))
    )


def test_a_gradient_with_gaps_is_copied_for_the_whole_backward():
    def take_half(y):
        return torch.empty(2, 32, *y.shape[2:], dtype=y.dtype)[:, :16]

    result = trace(
        lambda: nn.Conv3d(16, 16, 3, padding=1, **HALF), (2, 16, 8, 8, 8), change=take_half
    )
    (copy,) = [b for b in result.blocks if b.op == "convolution_backward: contiguous copy"]
    during = [b for b in result.blocks if b.op == "cuDNN" and b.phase == "backward"]
    assert copy.nbytes == 2 * 16 * 512 * 2
    assert all(copy.allocated_at < b.allocated_at < copy.freed_at for b in during)


def test_each_thread_that_multiplies_matrices_keeps_a_workspace_of_cublas():
    result = trace(lambda: nn.Linear(8, 8, **HALF), (4, 8))
    kept = [b.nbytes for b in result.blocks if b.op == "cuBLAS"]
    assert kept == [get_cublas_bytes(), MIB, get_cublas_bytes()]
    assert all(b.freed_at is None for b in result.blocks if b.op == "cuBLAS")


@pytest.mark.parametrize(
    ("config", "capability", "nbytes"),
    [
        ("", None, 8_519_680),
        ("", (8, 6), 8_519_680),
        ("", (9, 0), 32 * MIB),
        (":4096:2:16:8", (9, 0), 8_519_680),
        (":16:8", None, 128 * 1024),
    ],
)
def test_the_workspace_of_cublas(config, capability, nbytes, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert get_cublas_bytes() == nbytes
