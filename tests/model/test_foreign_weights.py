"""Weights of nnU-Net's and MONAI's networks in ours, against the networks that they come from."""

import re
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch
from monai.networks.nets.basic_unet import BasicUNet
from monai.networks.nets.dynunet import DynUNet
from torch import nn

from tests.contract.test_nnunet import make_network, swap
from unet3d.checkpoint_file import load_checkpoint
from unet3d.errors import UsageError
from unet3d.model.blocks import Strided
from unet3d.model.foreign_weights import adapt_input_channels, is_first_convolution, rename_weights
from unet3d.model.unet import UNet3D
from unet3d.pool.avg import AvgPool3d
from unet3d.pool.max import MaxPool3d
from unet3d.training.pretrained import find_pretrained, load_pretrained

CHANNELS, STRIDES = [4, 8, 12, 12], [1, 2, [2, 2, 1], 2]
NNUNET = {
    "n_stages": 4,
    "features_per_stage": CHANNELS,
    "kernel_sizes": [[3, 3, 1], 3, 3, 3],
    "strides": STRIDES,
    "n_conv_per_stage": [2] * 4,
    "n_conv_per_stage_decoder": [2] * 3,
}


def strided(kernel_size):
    return Strided(kernel_size, skip_pool=AvgPool3d)


OURS = {
    "in_channels": 2,
    "num_classes": 3,
    "channels": CHANNELS,
    "kernel_size": [[1, 3, 3], 3, 3, 3],  # nnU-Net's axes are in the reverse order
    "pool_kernel": [2, [1, 2, 2], 2],
    "norm": "instance",
    "activation": "leaky_relu",
    "upsampling": "transposed",
    "pool": strided,
}


def make_dynunet(norm):
    # Its decoders have the kernel of the next coarser level.
    sizes = ([3] * 4, STRIDES, STRIDES[1:])
    return DynUNet(3, 2, 3, *sizes, filters=CHANNELS, norm_name=norm)


MONAI = {**OURS, "kernel_size": 3, "pool_kernel": STRIDES[1:]}
BASIC = {"channels": [4, 4, 8, 16, 32], "pool_kernel": 2, "negative_slope": 0.1, "pool": MaxPool3d}
NETWORKS = {
    "DynUNet": (partial(make_dynunet, ("instance", {"affine": True})), MONAI),
    "DynUNet, batch norm": (partial(make_dynunet, "batch"), {**MONAI, "norm": "batch"}),
    "BasicUNet": (
        partial(BasicUNet, 3, 2, 3, features=(4, 4, 8, 16, 32, 4)),
        {**OURS, "kernel_size": 3, **BASIC},
    ),
}


def randomize(network):
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape)
            tensor.data.copy_(noise + 0.5 if tensor.dim() == 1 else 0.4 * (noise - 0.5))
    return network


def load(theirs, options):
    ours = UNet3D(**options)
    renamed, project = rename_weights(theirs.state_dict(), ours.state_dict())
    ours.load_state_dict(renamed)
    assert project.endswith(f"'s {type(theirs).__name__}")
    return ours


@pytest.mark.parametrize("network", NETWORKS)
def test_weights_of_other_networks_give_the_same_logits(network):
    make, options = NETWORKS[network]
    theirs = randomize(make()).eval()
    ours = load(theirs, options).eval()
    x = torch.randn(2, 2, 16, 16, 32)
    with torch.no_grad():
        expected, logits = theirs(x), ours(x)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_deep_supervision_of_nnunet_gives_the_same_logits():
    pytest.importorskip("dynamic_network_architectures")
    theirs = make_network(channels=2, **NNUNET)
    theirs.decoder.deep_supervision = True
    ours = load(theirs, {**OURS, "deep_supervision": True})
    x = torch.randn(2, 2, 16, 16, 32)
    with torch.no_grad():
        expected, outputs = [swap(y) for y in theirs(swap(x))], ours(x)
    assert len(outputs) == 2
    for a, b in zip(outputs, expected, strict=False):  # nnU-Net does not weight the coarsest one
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_weights_keep_their_names_in_a_network_that_has_them():
    for network in (UNet3D(**OURS), make_dynunet("batch")):
        weights = network.state_dict()
        assert rename_weights(weights, weights) == (weights, None)


@pytest.mark.parametrize(("given", "channels"), [(1, 3), (4, 1), (2, 3)])
def test_a_first_convolution_responds_alike_to_another_number_of_equal_channels(given, channels):
    weight = torch.randn(4, given, 3, 3, 3)
    adapted = adapt_input_channels(weight, channels)
    x = torch.randn(1, 1, 8, 8, 8)
    expected, result = (
        nn.functional.conv3d(x.expand(-1, n, -1, -1, -1), w)
        for n, w in ((given, weight), (channels, adapted))
    )
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert is_first_convolution(adapted, weight)
    assert not is_first_convolution(weight, weight)


RESENC = {**OURS, "residual_blocks": [1, 2, 2], "convs_per_level": 1, "channels": [4, 8, 8]}
RESENC |= {"kernel_size": [[3, 3, 1], 3, 3], "pool_kernel": [[2, 2, 1], 2]}


def make_pretrained(folder, encoder):
    """Save a residual encoder with the names and the plan of nnssl; return its weights."""
    pytest.importorskip("dynamic_network_architectures")
    weights = make_network("ResidualEncoderUNet", classes=1).state_dict()
    plan = {
        "key_to_encoder": f"{encoder}.stages",
        "key_to_stem": f"{encoder}.stem",
        "keys_to_in_proj": [
            f"{encoder}.stem.convs.0.conv",
            f"{encoder}.stem.convs.0.all_modules.0",
        ],
        "pretrain_num_input_channels": 1,
    }
    named = {re.sub("^encoder", encoder, name): weight for name, weight in weights.items()}
    content = {"network_weights": named, "nnssl_adaptation_plan": plan, "citations": ["a", "b"]}
    torch.save(content, folder / "checkpoint_final.pth")
    return weights


@pytest.mark.parametrize("encoder", ["encoder", "online_network.encoder"])
def test_an_encoder_that_nnssl_pretrained_is_loaded_from_the_hub(encoder, tmp_path, monkeypatch):
    weights = make_pretrained(tmp_path, encoder)
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    ours = UNet3D(**RESENC)
    path = find_pretrained(Path("hf://lab/resenc@v2"))
    message = load_pretrained(ours, path, load_checkpoint(path))
    options = {"revision": "v2", "allow_patterns": ["checkpoint_final.pth"]}
    assert asked == [("lab/resenc", options)]
    assert "weights of nnU-Net's ResidualEncoderUNet" in message
    assert "adapted encoder.0.convs.0.conv.weight from 1 to 2 input channels" in message
    assert message.endswith("randomly initialized: heads.0.bias, heads.0.weight")
    first = weights["encoder.stem.convs.0.conv.weight"]
    adapted = ours.get_parameter("encoder.0.convs.0.conv.weight")
    torch.testing.assert_close(adapted.detach(), swap(first).expand_as(adapted) / 2)
    (tmp_path / "checkpoint_final.pth").unlink()
    with pytest.raises(UsageError, match="it has no checkpoint_final"):
        find_pretrained(Path("hf://lab/resenc@v2"))
