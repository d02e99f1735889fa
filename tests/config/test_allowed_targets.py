import pytest
import torch
from omegaconf import OmegaConf

from unet3d.config.allowed_targets import iter_targets, resolve_target
from unet3d.config.compose import get_config_dir
from unet3d.config.instantiate import build_network_from_metadata, instantiate
from unet3d.errors import UsageError
from unet3d.workflows.inference.ensemble import load_ensemble
from unet3d.workflows.training.build import build_training


def node(content, **root):
    return OmegaConf.create({**root, "model": content}).model


@pytest.mark.parametrize("file", sorted(get_config_dir().rglob("*.yaml")), ids=lambda f: f.stem)
def test_every_target_of_the_configs_may_be_named(file):
    for key, name in iter_targets(OmegaConf.to_container(OmegaConf.load(file)), file.stem):
        if name != "auto":
            assert isinstance(resolve_target(key, name, added=[]), type)


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "torch.load",
        "torch.hub.load",
        "torch",
        "builtins.eval",
        "torch.nn",  # a module
        "torch.nn.modules.module.torch.hub.load",
        "torch.nn.modules.module.torch.load",
        "torch.nn.Module.__class__",
        "torch.nn.Linear.load_state_dict",
        "torch.nn.functional.relu",  # a function
        "torch.optim.sys.modules",
        "torch.optim.optimizer.functools.partial",
        "torchevil.nn.Linear",
        "unet3d.cli.train.torch.load",
        "unet3d.cli.main.main",
        "unet3d.workflows.training.build.build_training",
        "unet3d.report.run_report.write_report",
        "unet3d.data.layouts.download.download",
        "unet3d.data.layouts.download.shutil.rmtree",
        "unet3d.data.preprocessing.cache.ThreadPoolExecutor",
        "unet3d.data.nifti.reader.Path",
        "lightning.pytorch.cli.LightningCLI",
        "lightning.pytorch.trainer.trainer.torch.load",
        "monai.losses.PerceptualLoss",
        "monai.networks.nets.HoVerNet",
        "monai.networks.nets.resnet10",
        "monai.bundle.ConfigParser",
        "",
        7,
        None,
        ["os.system"],
    ],
)
def test_other_code_is_refused_whatever_way_leads_to_it(name):
    with pytest.raises(UsageError, match=r"model\._target_.*(may only name|there is no)"):
        instantiate(node({"_target_": name}))


def test_what_is_not_on_the_list_is_not_even_imported(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("import pathlib; pathlib.Path('done').touch()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"names evil\.Network"):
        instantiate(node({"_target_": "evil.Network"}))
    assert not (tmp_path / "done").exists()


def test_a_target_deep_within_a_node_or_behind_an_interpolation_is_refused_too():
    deep = {"_target_": "torch.nn.ReLU", "a": [{"b": {"_target_": "os.getcwd"}}]}
    with pytest.raises(UsageError, match=r"model\.a\.0\.b\._target_ names os\.getcwd"):
        instantiate(node(deep))
    pointed = {"_target_": "torch.nn.ReLU", "inplace": "${other}"}
    with pytest.raises(UsageError, match=r"model\.inplace\._target_ names os\.getcwd"):
        instantiate(node(pointed, other={"_target_": "os.getcwd"}))


def test_allow_targets_adds_a_package_but_not_what_that_imports(tmp_path, monkeypatch):
    source = (
        "import os\nfrom torch import nn\nclass Network(nn.Module): pass\ndef made(): return 1\n"
    )
    (tmp_path / "my_package_of_networks.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"allow_targets": ["my_package_of_networks"]}
    assert isinstance(
        instantiate(node({"_target_": "my_package_of_networks.Network"}, **own)), torch.nn.Module
    )
    assert instantiate(node({"_target_": "my_package_of_networks.made"}, **own)) == 1
    with pytest.raises(UsageError, match=r"which is posix\.getcwd"):
        instantiate(node({"_target_": "my_package_of_networks.os.getcwd"}, **own))
    with pytest.raises(UsageError, match=r"allow_targets=\[my_package\]"):
        instantiate(node({"_target_": "my_package_of_networks.Network"}))


@pytest.mark.parametrize("bad", ["my_package", [1], ["a-b"], [""], {"a": 1}])
def test_allow_targets_must_be_a_list_of_packages(bad):
    with pytest.raises(UsageError, match="allow_targets must be a list of packages"):
        instantiate(node({"_target_": "torch.nn.ReLU"}, allow_targets=bad))


def test_a_checkpoint_has_no_say_in_what_it_may_name(composed, tmp_path):
    card = build_training(composed(), tmp_path).task.card
    config = {**card["config"], "allow_targets": ["argparse", "posix"]}
    evil = {**config, "model": {"_target_": "argparse.Namespace"}}
    with pytest.raises(UsageError, match=r"model\._target_ names argparse\.Namespace"):
        build_network_from_metadata({"config": evil})
    assert build_network_from_metadata({"config": evil}, ["argparse"])  # who predicts may say so
    evil = {**config, "pool": {"_target_": "posix.getcwd"}}
    path = tmp_path / "evil.ckpt"
    torch.save({"unet3d": {**card, "config": evil}, "state_dict": {}}, path)
    with pytest.raises(UsageError, match=r"pool\._target_ names posix\.getcwd"):
        load_ensemble([path])


def test_the_command_line_answers_in_one_line(unet3d, capsys):
    assert unet3d("model._target_=evil.Network") == 2
    assert "model._target_ names evil.Network" in capsys.readouterr().err
    assert unet3d("allow_targets=evil") == 2
    assert "allow_targets must be a list" in capsys.readouterr().err
