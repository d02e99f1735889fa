"""unet3d.estimate_memory of networks with several outputs, devices and attributes of their own."""

import pytest
import torch
from torch import nn

import unet3d
from unet3d.errors import UsageError
from unet3d.memory.any_network import sum_means

CUBE = (1, 1, 16, 16, 16)


def small():
    return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 2, 1))


def test_every_output_contributes_to_the_default_loss():
    outputs = [torch.ones(2, requires_grad=True), {"coarse": torch.ones(3, requires_grad=True)}]
    sum_means(outputs).backward()
    assert outputs[0].grad.all()
    assert outputs[1]["coarse"].grad.all()


def test_devices_have_the_names_that_torch_gives_them_and_others_are_refused():
    def estimate(device):
        return unet3d.estimate_memory(small(), (2, 1, 16, 16, 16), device=device)

    assert estimate("auto").peak == estimate("cuda:0").peak == estimate("cuda").peak
    on_cpu = estimate(torch.device("cpu"))
    assert on_cpu.peak == estimate("cpu").peak != estimate("cuda").peak
    for device in ("tpu", "mps"):
        with pytest.raises(UsageError, match=f"must be auto, cpu, cuda or cuda:N, got '{device}'"):
            estimate(device)
    with pytest.raises(UsageError, match="largest_batch is for GPUs"):
        on_cpu.largest_batch(8)
    assert estimate("cuda").largest_batch(0.5) == 0


def test_an_attribute_blocks_of_another_network_is_not_called():
    """It has another meaning in timm and MONAI."""
    network = nn.Sequential(nn.Conv3d(1, 2, 1))
    network.blocks = nn.Sequential(nn.Identity())
    estimate = unet3d.estimate_memory(network, CUBE, device="cpu")
    assert estimate.peak > 16**3 * 4
    assert estimate.details.levels == {}


@pytest.mark.parametrize("way", [pytest.param("torch.compile", marks=pytest.mark.slow), "compile"])
def test_a_compiled_network_is_estimated_as_plain_modules(way):
    def make_network(**options):
        return unet3d.UNet3D(in_channels=1, num_classes=2, depth=2, width=4, **options)

    network = make_network()
    if way == "compile":
        network.compile(backend="aot_eager")
    else:
        network = torch.compile(network, backend="aot_eager")
    shape = (1, 1, 16, 16, 16)
    plain = unet3d.estimate_memory(make_network(fused=False), shape).peak
    assert unet3d.estimate_memory(network, shape).peak == plain
    assert unet3d.estimate_memory(make_network(), shape).peak != plain
