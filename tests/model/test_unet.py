import pytest
import torch
from torch import nn

from unet3d.config.instantiate import Factory, read_option
from unet3d.errors import UsageError
from unet3d.model.plain_unet import PlainUNet3D
from unet3d.model.unet import UNet3D
from unet3d.types import has_blocks


def make_unet(**options):
    return UNet3D(**{"in_channels": 1, "num_classes": 5, "pool": nn.MaxPool3d, **options})


def test_unet_small_computes_what_the_plain_network_computes():
    plain = PlainUNet3D(in_channels=1, num_classes=5, encoder=[4, 8, 16, 16], decoder=[16, 8, 4])
    unet = make_unet(channels=[4, 8, 16, 16])
    plain, unet = plain.double(), unet.double()
    unet.load_state_dict(dict(zip(unet.state_dict(), plain.state_dict().values(), strict=True)))
    x = torch.randn(2, 1, 17, 15, 13, dtype=torch.float64)
    torch.testing.assert_close(unet(x), plain(x), rtol=0, atol=1e-12)
    unet(x).square().sum().backward()
    plain(x).square().sum().backward()
    for a, b in zip(unet.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


def test_blocks_yields_every_level_twice_except_the_coarsest():
    plain = PlainUNet3D(in_channels=1, num_classes=2, encoder=[2, 4, 8], decoder=[4, 2])
    for network in (make_unet(depth=3, width=2), plain):
        assert has_blocks(network)
        assert [level for level, _ in network.blocks()] == [0, 1, 2, 1, 0]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"in_channels": 0}, "in_channels"),
        ({"depth": 1}, "depth"),
        ({"width": 0}, "width"),
        ({"width": 33, "max_width": 32}, "width=33 is above max_width=32"),
        ({"channels": [4]}, "channels"),
        ({"kernel_size": 2}, "kernel_size"),
        ({"kernel_size": [3, 3]}, "kernel_size"),
        ({"pool_kernel": [[1, 2, 2]]}, "pool_kernel"),
        ({"norm": "layer"}, "norm"),
        ({"activation": "gelu"}, "activation"),
        ({"upsampling": "cubic"}, "upsampling"),
        ({"decoder_channels": [1]}, "decoder_channels"),
        ({"convs_per_level": [2]}, "convs_per_level"),
        ({"residual_blocks": 0}, "residual_blocks"),
        ({"stochastic_depth": 1.0}, "stochastic_depth"),
        ({"stochastic_depth": 0.9}, "stochastic_depth"),
        ({"deep_supervision": True, "depth": 3}, "deep_supervision"),
        ({"negative_slope": -0.2, "activation": "leaky_relu"}, "negative_slope"),
        ({"depth": 2.5}, "depth"),
        ({"width": 4.0}, "width"),
        ({"max_width": True}, "max_width"),
        ({"pool": "mean"}, "pool"),
    ],
)
def test_an_invalid_argument_is_named_as_in_python_and_by_its_key_in_a_config(options, key):
    with pytest.raises(UsageError, match=f"^{key}"):
        make_unet(**options)
    factory = Factory("model", {"_target_": "unet3d.model.unet.UNet3D", **options})
    with pytest.raises(UsageError, match=rf"^model\.{key}"):
        factory(in_channels=1, num_classes=2) if key != "in_channels" else factory(num_classes=2)


def test_a_layer_in_place_of_a_function_that_makes_one_is_named():
    with pytest.raises(UsageError, match=r"^pool must be .* the layer MaxPool3d.*: use MaxPool3d"):
        make_unet(pool=nn.MaxPool3d(2))


def test_strided_convolutions_have_a_name_as_in_a_config():
    options = {"depth": 3, "residual_blocks": 1}
    by_name = make_unet(pool="strided", **options)
    assert str(by_name) == str(make_unet(pool=read_option("pool", "strided")(), **options))
    assert by_name.encoder[1].convs[0].conv1.conv.stride == (2, 2, 2)
