import pytest
import torch
from omegaconf import OmegaConf

from unet3d.cli.train import build_training
from unet3d.config.allowed_targets import iter_targets, read_allowed_packages, resolve_target
from unet3d.config.compose import get_config_dir
from unet3d.config.instantiate import read_factory
from unet3d.errors import UsageError
from unet3d.workflows.inference.ensemble import load_ensemble
from unet3d.workflows.shared.network import build_saved_network


def build(model, **root):
    """Build the group `model` of a config."""
    return read_factory(OmegaConf.create({**root, "model": model}), "model")()


@pytest.mark.parametrize("file", sorted(get_config_dir().rglob("*.yaml")), ids=lambda f: f.stem)
def test_our_configs_only_name_allowed_classes(file):
    for key, name in iter_targets(OmegaConf.to_container(OmegaConf.load(file)), file.stem):
        if name != "auto":
            key = key.replace("default._target_", "trainer._target_")  # conf/trainer/default.yaml
            assert isinstance(resolve_target(key, name, user_packages=[]), type)


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
        "monai.networks.nets.EfficientNetBN",
        "monai.networks.nets.DenseNet121",
        "monai.networks.nets.Transchex",
        "torch.nn.DataParallel",
        "torch.nn.quantized.Conv3d",
        "torch.optim.Optimizer",
        "lightning.pytorch.Trainer",
        "lightning.pytorch.callbacks.ModelCheckpoint",
        "lightning.pytorch.callbacks.BasePredictionWriter",
        "lightning.pytorch.loggers.WandbLogger",
        "lightning.pytorch.loggers.MLFlowLogger",
        "lightning.pytorch.loggers.csv_logs.ExperimentWriter",
        "unet3d.lit.callbacks.checkpoints.LastCheckpoint",
        "unet3d.lit.loggers.append_only_file.AppendOnlyFile",
        "monai.bundle.ConfigParser",
        "",
        7,
        None,
        ["os.system"],
    ],
)
def test_other_code_is_refused_however_it_is_reached(name):
    with pytest.raises(UsageError, match=r"model\._target_.*(may only name|cannot import)"):
        build({"_target_": name})


def test_a_name_that_is_not_allowed_is_not_even_imported(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("import pathlib; pathlib.Path('done').touch()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"names evil\.Network"):
        build({"_target_": "evil.Network"})
    assert not (tmp_path / "done").exists()


def test_a_nested_or_interpolated_target_is_refused_too():
    nested = {"_target_": "torch.nn.ReLU", "a": [{"b": {"_target_": "os.getcwd"}}]}
    with pytest.raises(UsageError, match=r"model\.a\.0\.b\._target_ names os\.getcwd"):
        build(nested)
    interpolated = {"_target_": "torch.nn.ReLU", "inplace": "${other}"}
    with pytest.raises(UsageError, match=r"model\.inplace\._target_ names os\.getcwd"):
        build(interpolated, other={"_target_": "os.getcwd"})


def test_allow_targets_adds_a_package_but_not_what_it_imports(tmp_path, monkeypatch):
    source = (
        "import os\nfrom torch import nn\n"
        "class Network(nn.Module): pass\ndef make_one(): return 1\n"
    )
    (tmp_path / "my_networks.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    allowed = {"allow_targets": ["my_networks"]}
    assert isinstance(build({"_target_": "my_networks.Network"}, **allowed), torch.nn.Module)
    assert build({"_target_": "my_networks.make_one"}, **allowed) == 1
    with pytest.raises(UsageError, match=r"defined as posix\.getcwd"):
        build({"_target_": "my_networks.os.getcwd"}, **allowed)
    with pytest.raises(UsageError, match=r"allow_targets=\[my_package\]"):
        build({"_target_": "my_networks.Network"})


def test_a_package_that_fails_without_a_message_is_named(tmp_path, monkeypatch):
    source = "def __getattr__(name):\n    raise RuntimeError\n"  # as one that imports on first use
    (tmp_path / "my_lazy_networks.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"cannot import my_lazy_networks\.Net: RuntimeError"):
        build({"_target_": "my_lazy_networks.Net"}, allow_targets=["my_lazy_networks"])


@pytest.mark.parametrize("value", ["my_package", [1], ["a-b"], [""], {"a": 1}])
def test_allow_targets_must_be_a_list_of_packages(value):
    config = OmegaConf.create({"allow_targets": value})
    with pytest.raises(UsageError, match="allow_targets must be a list of packages"):
        read_allowed_packages(config)


def test_a_checkpoint_cannot_extend_what_it_may_name(composed, tmp_path):
    metadata = build_training(composed(), tmp_path).module.metadata
    config = {**metadata["config"], "allow_targets": ["argparse", "posix"]}
    evil = {**config, "model": {"_target_": "argparse.Namespace"}}
    with pytest.raises(UsageError, match=r"model\._target_ names argparse\.Namespace"):
        build_saved_network({"config": evil}, [])
    assert build_saved_network({"config": evil}, ["argparse"])  # the user may
    evil = {**config, "pool": {"_target_": "posix.getcwd"}}
    path = tmp_path / "evil.ckpt"
    torch.save({"unet3d": {**metadata, "config": evil}, "state_dict": {}}, path)
    with pytest.raises(UsageError, match=r"pool\._target_ names posix\.getcwd"):
        load_ensemble([path])


OTHERS = (
    "lightning.pytorch.loggers.CSVLogger",
    "lightning.pytorch.callbacks.ModelSummary",
    "unet3d.lit.loggers.csv.CsvLogger",
    "monai.losses.DiceLoss",
    "torch.optim.SGD",
)


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_names_networks_only_while_a_config_names_more(composed, tmp_path, name):
    assert isinstance(resolve_target("x", name, user_packages=[]), type)
    metadata = build_training(composed(), tmp_path).module.metadata
    evil = {**metadata["config"], "model": {"_target_": name}}
    with pytest.raises(UsageError, match="a checkpoint may only name networks of unet3d"):
        build_saved_network({"config": evil}, [])
    nested = {**metadata["config"]["model"], "pool_kernel": {"_target_": name}}
    with pytest.raises(UsageError, match=r"model\.pool_kernel\._target_ names"):
        build_saved_network({"config": {**metadata["config"], "model": nested}}, [])


def test_the_command_line_refuses_in_one_line(unet3d, capsys):
    assert unet3d("model._target_=evil.Network") == 2
    assert "model._target_ names evil.Network" in capsys.readouterr().err
    assert unet3d("allow_targets=evil") == 2
    assert "allow_targets must be a list" in capsys.readouterr().err


def test_a_saved_network_resolves_no_references(composed, tmp_path, monkeypatch):
    metadata = build_training(composed(), tmp_path).module.metadata
    monkeypatch.chdir(tmp_path)
    write = "${oc.create:{_target_: unet3d.atomic_write.write_text, path: evil, text: evil}}"
    pool = {**metadata["config"]["pool"], "evil": [write]}
    with pytest.raises(UsageError, match=r"pool\.evil\.0 is .*: it must not hold \$\{"):
        build_saved_network({"config": {**metadata["config"], "pool": pool}}, [])
    assert not (tmp_path / "evil").exists()


def test_nothing_but_the_trainer_may_be_a_trainer(unet3d, capsys):
    assert unet3d("+loss.trainer._target_=lightning.pytorch.Trainer") == 2
    assert "loss.trainer._target_ names lightning.pytorch.Trainer" in capsys.readouterr().err


def test_allow_targets_adds_a_class_that_acts(tmp_path):
    trusted = {"allow_targets": ["lightning.pytorch.callbacks"]}
    node = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "dirpath": str(tmp_path)}
    assert build(node, **trusted).dirpath == str(tmp_path)
