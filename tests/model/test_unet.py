import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.errors import UsageError
from unet3d.model.unet import UNet3D
from unet3d.model.unet_reference import ForumUNet3D
from unet3d.types import HasBlocks


def unet(**choices):
    return UNet3D(**{"in_channels": 1, "num_classes": 5, "pool": nn.MaxPool3d, **choices})


def parameters(network, kinds=nn.Module):
    found = {p for m in network.modules() if isinstance(m, kinds) for p in m.parameters()}
    return sum(p.numel() for p in found)


SMALL = {"depth": 4, "width": 64, "max_width": 256}
LARGE = {"depth": 5, "width": 64, "max_width": 512, "decoder_channels": "above"}
PAPER = {
    "in_channels": 3,
    "num_classes": 3,
    "depth": 4,
    "width": 64,
    "max_width": 512,
    "narrow_first": True,
    "upsampling": "transposed_wide",
}


def test_the_forums_networks_have_exactly_the_forums_parameters():
    with torch.device("meta"):
        assert parameters(unet(**SMALL)) == 14_496_517
        assert parameters(unet(**LARGE)) == 40_158_853
        forum = ForumUNet3D(
            in_channels=1, num_classes=5, encoder=[64, 128, 256, 256], decoder=[256, 128, 64]
        )
        assert parameters(forum) == 14_496_517


def test_the_papers_network_has_exactly_the_papers_convolution_parameters():
    with torch.device("meta"):
        network = unet(**PAPER)
    assert parameters(network, (nn.Conv3d, nn.ConvTranspose3d)) == 19_069_955


@pytest.mark.parametrize("option", ["unet_small", "unet_large", "unet_cicek2016"])
def test_the_configs_say_the_same_networks(composed, option):
    from unet3d.config.instantiate import build_network

    request = composed(f"model={option}", "data.num_classes=5")
    expected = {"unet_small": SMALL, "unet_large": LARGE, "unet_cicek2016": PAPER}[option]
    with torch.device("meta"):
        made = build_network(request)
        wanted = unet(**{**expected, "in_channels": 1, "num_classes": 5})
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (made, wanted)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("size", [(16, 16, 16), (17, 15, 13), (20, 9, 8)])
def test_our_network_computes_what_the_forums_code_computes(size):
    forum = ForumUNet3D(in_channels=1, num_classes=5, encoder=[4, 8, 16, 16], decoder=[16, 8, 4])
    ours = unet(channels=[4, 8, 16, 16])
    forum, ours = forum.double(), ours.double()
    ours.load_state_dict(dict(zip(ours.state_dict(), forum.state_dict().values(), strict=True)))
    x = torch.randn(2, 1, *size, dtype=torch.float64)
    torch.testing.assert_close(ours(x), forum(x), rtol=0, atol=1e-12)
    ours(x).square().sum().backward()
    forum(x).square().sum().backward()
    for a, b in zip(ours.parameters(), forum.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("upsampling", ["trilinear", "nearest", "transposed", "transposed_wide"])
def test_logits_have_the_volumes_size_however_it_halves(upsampling):
    network = unet(depth=4, width=2, upsampling=upsampling, norm="group")
    assert network(torch.randn(1, 1, 32, 15, 11)).shape == (1, 5, 32, 15, 11)


def test_the_forums_volume_goes_through_four_halvings():
    with FakeTensorMode():
        network = unet(depth=5, width=2)
        assert network(torch.empty(2, 1, 320, 150, 26)).shape == (2, 5, 320, 150, 26)


def test_kernel_and_window_may_differ_per_level():
    network = unet(depth=3, width=2, kernel_size=[[1, 3, 3], 3, 3], pool_kernel=[[1, 2, 2], 2])
    assert network.encoder[0].convs[0].conv.kernel_size == (1, 3, 3)
    assert network(torch.randn(1, 1, 6, 16, 16)).shape == (1, 5, 6, 16, 16)


def test_deep_supervision_gives_a_list_in_training_and_one_tensor_in_evaluation():
    network = unet(depth=4, width=2, deep_supervision=True)
    x = torch.randn(2, 1, 16, 16, 16)
    assert [y.shape[-1] for y in network(x)] == [16, 8]
    assert network.eval()(x).shape == (2, 5, 16, 16, 16)


def test_the_pooling_that_is_handed_in_is_the_one_that_runs():
    made = []

    def pool(window):
        made.append(nn.AvgPool3d(window))
        return made[-1]

    network = unet(depth=3, width=2, pool=pool)
    assert made == [m for m in network.modules() if isinstance(m, nn.AvgPool3d)]
    assert len(made) == 2


def test_blocks_name_every_level_twice_but_the_coarsest():
    network = unet(depth=3, width=2)
    assert isinstance(network, HasBlocks)
    assert [level for level, _ in network.blocks()] == [0, 1, 2, 1, 0]


@pytest.mark.parametrize("autocast_to", [torch.bfloat16])
def test_upsampling_keeps_half_precision_under_autocast(autocast_to):
    network = unet(depth=2, width=2)
    network.keep = None  # plain modules, which hooks see
    seen = []
    network.decoder[0].up.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    with torch.autocast("cpu", dtype=autocast_to):
        network(torch.randn(2, 1, 8, 8, 8))
    assert seen == [autocast_to]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"depth": 1}, "model.depth"),
        ({"width": 0}, "model.width"),
        ({"channels": [4]}, "model.channels"),
        ({"kernel_size": 2}, "model.kernel_size"),
        ({"kernel_size": [3, 3]}, "model.kernel_size"),
        ({"pool_kernel": [[1, 2, 2]]}, "model.pool_kernel"),
        ({"norm": "layer"}, "model.norm"),
        ({"activation": "gelu"}, "model.activation"),
        ({"upsampling": "cubic"}, "model.upsampling"),
        ({"decoder_channels": [1]}, "model.decoder_channels"),
        ({"convs_per_level": [2]}, "model.convs_per_level"),
    ],
)
def test_a_bad_choice_is_answered_in_the_users_words(choices, said):
    with pytest.raises(UsageError, match=said):
        unet(**choices)


def test_a_volume_too_small_for_the_levels_is_answered_in_the_users_words():
    with pytest.raises(UsageError, match=r"data\.patch_size"):
        unet(depth=5, width=2)(torch.randn(2, 1, 8, 8, 8))
