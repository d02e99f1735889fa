"""The modeled time of a training step."""

import pytest
import torch

from scripts.gpu.operations import Operation
from scripts.gpu.step_model import GPUS, model_step_time


def make_operation(name="convolution", *, flops=0, nbytes=0, launches=1, dtype=torch.float16):
    return Operation(name, launches, nbytes, flops, dtype)


def model_gpu_ms(*operations, gpu="h100", tf32=True):
    return model_step_time(operations, GPUS[gpu], tf32=tf32)["gpu_ms"]


def test_an_operation_takes_the_longest_of_its_three_times():
    h100 = GPUS["h100"]
    assert model_gpu_ms(make_operation(flops=10**12)) == pytest.approx(1e3 / (989 * 0.475))
    assert model_gpu_ms(make_operation(nbytes=10**9)) == pytest.approx(1 / (3.35 * 0.8))
    assert model_gpu_ms(make_operation()) == pytest.approx(h100.kernel_us / 1e3)
    assert model_gpu_ms(make_operation(launches=3)) == pytest.approx(3 * h100.kernel_us / 1e3)


def test_float32_convolutions_run_in_tf32_where_that_is_allowed():
    operation = make_operation(flops=10**12, dtype=torch.float32)
    ratio = model_gpu_ms(operation, tf32=False) / model_gpu_ms(operation, tf32=True)
    assert ratio == pytest.approx(495 / 67)


def test_the_host_limits_a_step_of_many_small_kernels():
    small = model_step_time([make_operation("unet3d::normalize")] * 100, GPUS["h100"], tf32=True)
    assert small["step_ms"] == small["host_ms"] > small["gpu_ms"]
    large = model_step_time([make_operation(flops=10**13)], GPUS["h100"], tf32=True)
    assert large["step_ms"] == large["gpu_ms"] > large["host_ms"]
