"""A checkpoint may only name networks of ours, of MONAI's and of packages that the user names."""

import pytest

from unet3d.config.instantiate import check_saved_config
from unet3d.errors import UsageError


def check(values, *allow_targets):
    check_saved_config(values, "model", allow_targets)


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "torch.nn",  # a module
        "torch.nn.modules.module.torch.hub.load",
        "torchevil.nn.Linear",
        "unet3d.__main__.main",
        "unet3d.model.unet.partial",  # imported there
        "monai.networks.nets.resnet10",
        None,
        {"_target_": "os.system"},
    ],
)
def test_other_code_is_refused_however_it_is_reached(name):
    with pytest.raises(UsageError, match=r"^model\._target_ names .*may only name classes of un"):
        check({"_target_": name})
    with pytest.raises(UsageError, match=r"^model\.a\.0\.b\._target_ names"):
        check({"_target_": "torch.nn.ReLU", "a": [{"b": {"_target_": name}}]})


def test_networks_and_their_parts_are_accepted():
    check({"_target_": "unet3d.model.unet.UNet3D", "pool": {"_target_": "torch.nn.MaxPool3d"}})
    check({"_target_": "monai.networks.nets.DynUNet"})
    with pytest.raises(UsageError, match=r"names unet3d\.data\.layouts\.pairs\.Pairs"):
        check({"_target_": "unet3d.data.layouts.pairs.Pairs"})


def test_text_that_hydra_would_resolve_is_refused():
    with pytest.raises(UsageError, match=r"^model\.a\.0 is '\$\{oc\.create:.*must not hold"):
        check({"_target_": "torch.nn.ReLU", "a": ["${oc.create:{_target_: os.getcwd}}"]})


def test_a_package_of_the_users_is_added_but_not_what_it_imports(tmp_path, monkeypatch):
    source = "import os\nclass Network: pass\ndef make_one(): return 1\n"
    (tmp_path / "my_networks.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    check({"_target_": "my_networks.Network", "a": {"_target_": "torch.nn.ReLU"}}, "my_networks")
    check({"_target_": "my_networks.make_one"}, "my_networks")
    with pytest.raises(UsageError, match=r"my_networks\.os\.getcwd \(defined in posix\)"):
        check({"_target_": "my_networks.os.getcwd"}, "my_networks")
    with pytest.raises(UsageError, match=r"cannot import my_networks\.Net: .* no attribute 'Net'"):
        check({"_target_": "my_networks.Net"}, "my_networks")
    with pytest.raises(UsageError, match=r"allow_targets=\[my_package\] adds a package"):
        check({"_target_": "my_networks.Network"})


@pytest.mark.parametrize(
    ("network", "argument"),
    [
        ({"_target_": "DenseNet121", "pretrained": True}, "pretrained is True"),
        ({"_target_": "FlexibleUNet", "_args_": [1, 2, "resnet10", True]}, "pretrained is True"),
        ({"_target_": "EfficientNetBN", "model_name": "efficientnet-b0"}, "pretrained is True"),
        ({"_target_": "TorchVisionFCModel", "weights": "DEFAULT"}, "weights is 'DEFAULT'"),
        ({"_target_": "EfficientNetBN", "pretrained": False}, None),
        ({"_target_": "HoVerNet", "pretrained_url": None}, None),
        ({"_target_": "SwinUNETR", "dropout_path_rate": 0.1, "use_checkpoint": True}, None),
    ],
)
def test_a_network_that_fetches_weights_or_reads_a_file_is_refused(network, argument):
    target = f"monai.networks.nets.{network['_target_']}"
    check({**network, "_target_": target}, target)  # of a file that the user trusts
    if argument is None:
        check({**network, "_target_": target})
    else:
        with pytest.raises(UsageError, match=rf"^model\.{argument}: .*allow_targets=\[{target}\]"):
            check({**network, "_target_": target})
