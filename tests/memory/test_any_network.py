"""unet3d.estimate_memory on networks of other projects, against their real steps on a CPU."""

import copy

import pytest
import torch
from torch import nn

import unet3d
from tests.memory.helpers.oracle import measure
from unet3d.errors import UsageError
from unet3d.memory.any_network import make_loop, sum_means
from unet3d.memory.script import ScriptStep

CUBE = (1, 1, 16, 16, 16)


def make_nnunet(conv, norm, *, residual=False, deep=False):
    from dynamic_network_architectures.architectures import unet

    make = unet.ResidualEncoderUNet if residual else unet.PlainConvUNet
    return make(
        *(1, 3, [4, 8, 16], conv, 3, [1, 2, 2], [1, 2, 2], 3, [1, 1]),
        conv_bias=True,
        norm_op=norm,
        norm_op_kwargs={"affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=deep,
    )


def make_wolny():
    from pytorch3dunet.unet3d import model

    options = {"f_maps": 8, "num_groups": 4, "num_levels": 3, "is_segmentation": False}
    return model.ResidualUNetSE3D(1, 3, final_sigmoid=False, **options)


NETWORKS = {
    "nnU-Net plain, 2D": (
        lambda: make_nnunet(nn.Conv2d, nn.InstanceNorm2d),
        (2, 1, 64, 64),
    ),
    "nnU-Net residual, deep supervision": (
        lambda: make_nnunet(nn.Conv3d, nn.InstanceNorm3d, residual=True, deep=True),
        CUBE,
    ),
    "pytorch-3dunet ResidualUNetSE3D": (make_wolny, CUBE),
}


def small():
    return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 2, 1))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_peak_of_a_cpu_step_is_estimated_to_the_byte(name):
    make, shape = NETWORKS[name]
    network = make()

    def make_step():
        model = copy.deepcopy(network).train()
        optimizer = torch.optim.AdamW(model.parameters())
        return ScriptStep(model, [], make_loop(model, shape, sum_means, optimizer, None))

    assert unet3d.estimate_memory(network, shape, device="cpu").peak == measure(make_step).peak


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
    with pytest.raises(UsageError, match="budget_gib must be above 0, got -1"):
        estimate("cuda").largest_batch(-1)
    with pytest.raises(UsageError, match="budget_gib must be above 0, got 8"):
        estimate("cuda").largest_batch("8")
    with pytest.raises(UsageError, match=r"optimizer must make one, such as .*, got 'adam'"):
        unet3d.estimate_memory(nn.Linear(4, 4), (2, 4), optimizer="adam")


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        ("foo", CUBE, r"model must be a torch.nn.Module, got 'foo'"),
        (nn.ReLU(), (1, 1, -16, 16, 16), r"must be sizes of at least 1, got \(1, 1, -16"),
        (nn.ReLU(), "1,1,8,8,8", "must be sizes of at least 1, got '1,1,8"),
        (nn.ReLU(), 8, "must be sizes of at least 1, got 8"),
    ],
)
def test_what_cannot_be_estimated_is_named(model, shape, message):
    with pytest.raises(UsageError, match=message):
        unet3d.estimate_memory(model, shape)


def test_an_attribute_blocks_of_another_network_is_not_called():
    """It has another meaning in timm and MONAI."""
    network = nn.Sequential(nn.Conv3d(1, 2, 1))
    network.blocks = nn.Sequential(nn.Identity())
    estimate = unet3d.estimate_memory(network, CUBE, device="cpu")
    assert estimate.peak > 16**3 * 4
    assert estimate.details.levels == {}


@pytest.mark.parametrize("way", ["torch.compile", "compile"])
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


def test_parts_of_a_network_may_be_in_evaluation():
    network = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.Dropout(0.5), nn.Conv3d(8, 1, 1))
    peaks = []
    for is_training in (True, False):
        network[1].train(is_training)
        peaks.append(unet3d.estimate_memory(network, (1, 1, 16, 16, 16), device="cpu").peak)
    peaks.append(unet3d.estimate_memory(network.eval(), (1, 1, 16, 16, 16), device="cpu").peak)
    assert peaks[0] == peaks[2] > peaks[1] + 8 * 16**3
