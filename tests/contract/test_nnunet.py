"""nnU-Net's weights, plans and trainer."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
import yaml
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from tests.contract.conftest import ROOT

NAME = "Dataset004_Small"


def make_architecture(**options):
    """Return the arguments of a network as nnU-Net's plans have them, in nnU-Net's axes."""
    return {
        "n_stages": 3,
        "features_per_stage": [4, 8, 8],
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
        "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
        "n_conv_per_stage": [2, 2, 2],
        "n_conv_per_stage_decoder": [2, 2],
        "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
        **options,
    }


def make_network(kind="PlainConvUNet", channels=1, classes=3, **options):
    """Build nnU-Net's own network."""
    from dynamic_network_architectures.architectures import unet

    arguments = make_architecture(**options)
    if kind == "ResidualEncoderUNet":
        arguments["n_blocks_per_stage"] = [1, 2, 2]
        arguments["n_conv_per_stage_decoder"] = [1, 1]
        del arguments["n_conv_per_stage"]
    arguments |= {"conv_op": nn.Conv3d, "norm_op": nn.InstanceNorm3d, "nonlin": nn.LeakyReLU}
    torch.manual_seed(0)
    network = getattr(unet, kind)(
        input_channels=channels, num_classes=classes, deep_supervision=False, **arguments
    )
    for p in network.parameters():
        nn.init.uniform_(p, 0.5, 1.5) if p.dim() == 1 else nn.init.normal_(p, std=0.1)
    return network


def swap(x):
    """Exchange nnU-Net's order of axes and ours."""
    return x.permute(0, 1, 4, 3, 2)


def write_dataset(root, channels=2):
    """Write five cases in nnU-Net's layout."""
    for n in range(5):
        rng = np.random.default_rng(n)
        label = rng.integers(0, 3, (12, 16, 8)).astype(np.uint8)
        files = {f"labelsTr/case_{n}": label}
        for c in range(channels):
            image = (label + rng.normal(0, 1, label.shape)).astype(np.float32)
            files[f"imagesTr/case_{n}_{c:04d}"] = image
        for name, array in files.items():
            path = root / f"{name}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array, np.diag([2.0, 1.0, 3.0, 1.0])), path)
    content = {
        "channel_names": {str(n): f"T{n}" for n in range(channels)},
        "labels": {"background": 0, "front": 1, "back": 2},
        "file_ending": ".nii.gz",
        "numTraining": 5,
    }
    (root / "dataset.json").write_text(json.dumps(content))
    return content


WEIGHTS = {
    "PlainConvUNet": ["model=unet_nnunet"],
    "ResidualEncoderUNet": ["model=unet_resenc", "model.residual_blocks=[1,2,2]"],
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_of_nnunet_give_its_logits(kind, unet3d, tmp_path):
    """The weights do not move: the learning rate is too low."""
    write_dataset(tmp_path / "data", channels=1)
    theirs = make_network(kind).eval()
    content = {"network_weights": theirs.state_dict(), "trainer_name": "nnUNetTrainer"}
    content |= {"init_args": {"plans": {}, "fold": 0}, "logging": {"lrs": [np.float64(0.01)]}}
    torch.save(content, tmp_path / "checkpoint_final.pth")
    words = [*WEIGHTS[kind], "pool=strided", "model.channels=[4,8,8]", "optimizer=sgd"]
    words += ["model.kernel_size=[[3,3,1],3,3]", "model.pool_kernel=[[2,2,1],2]"]
    words += ["model.deep_supervision=false", "model.prior_bias=false", "data=nnunet"]
    words += ["data.root=data", "data.patch_size=[12,16,8]", "data.num_workers=0"]
    words += ["trainer.max_steps=1", "trainer.accelerator=cpu", "optimizer.lr=1e-30"]
    words += ["optimizer.weight_decay=0", "evaluation.enabled=false", "memory.estimate=false"]
    ended = unet3d("train", *words, "init_from=checkpoint_final.pth", "hydra.run.dir=run")
    assert ended.code == 0, ended.err
    config = OmegaConf.load(tmp_path / "run" / "config.yaml")
    options = {k: v for k, v in config["model"].items() if k != "prior_bias"}
    ours = instantiate(options, pool=instantiate(config["pool"])).eval()
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    state = {name.removeprefix("model."): value for name, value in saved["state_dict"].items()}
    ours.load_state_dict(state)
    x = torch.randn(2, 1, 16, 24, 8)
    with torch.no_grad():
        expected, logits = swap(theirs(swap(x))), ours(x)
    assert expected.std() > 0.01
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def plans(tmp_path):
    """Write the folders of a dataset that nnU-Net has planned; return its plans."""
    dataset = write_dataset(tmp_path / "nnUNet_raw" / NAME)
    folder = tmp_path / "nnUNet_preprocessed" / NAME
    folder.mkdir(parents=True)
    (folder / "dataset.json").write_text(json.dumps(dataset))
    architecture = "dynamic_network_architectures.architectures.unet.PlainConvUNet"
    sizes = {
        "batch_size": 3,
        "patch_size": [8, 16, 12],
        "spacing": [3.0, 1.0, 2.0],
        "normalization_schemes": ["ZScoreNormalization", "CTNormalization"],
        "use_mask_for_norm": [False, False],
        "architecture": {
            "network_class_name": architecture,
            "arch_kwargs": make_architecture(),
            "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
        },
        "batch_dice": True,
    }
    lowres = {"inherits_from": "3d_fullres", "spacing": [6.0, 2.0, 4.0]}
    content = {
        "dataset_name": NAME,
        "transpose_forward": [0, 1, 2],
        "configurations": {"2d": {}, "3d_fullres": sizes, "3d_lowres": lowres},
    }
    names = [f"case_{n}" for n in range(5)]
    splits = [{"train": names[:3], "val": names[3:]}]
    (folder / "splits_final.json").write_text(json.dumps(splits))
    (folder / "nnUNetPlans.json").write_text(json.dumps(content))
    return folder / "nnUNetPlans.json"


def test_a_run_follows_the_plans_of_nnunet(plans, unet3d, tmp_path):
    words = ["trainer.max_steps=1", "data.patches_per_case=1", "trainer.accelerator=cpu"]
    words += ["trainer.check_val_every_n_epoch=1", "evaluation.enabled=false", "logger=none"]
    ended = unet3d("train", f"experiment={plans}", *words, "hydra.run.dir=run")
    assert ended.code == 0, ended.err
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    data, model = config["data"], config["model"]
    assert data["patch_size"] == [12, 16, 8]  # nnU-Net's axes are in the reverse order
    assert data["spacing_mm"] == [2.0, 1.0, 3.0]
    assert (data["batch_size"], data["in_channels"], data["num_classes"]) == (3, 2, 3)
    assert data["normalize"] == ["zscore", "ct"]
    assert Path(data["root"]) == tmp_path / "nnUNet_raw" / NAME
    assert model["pool_kernel"] == [[2, 2, 1], [2, 2, 2]]
    assert model["kernel_size"][0] == [3, 3, 1]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    unused = 3 * 8 + 3  # nnU-Net's head of the coarsest decoder level
    expected = sum(p.numel() for p in make_network(channels=2).parameters()) - unused
    assert report["parameters"] == expected


def test_another_configuration_and_the_command_line_win_over_the_plans(plans, unet3d):
    ended = unet3d(
        *("memory", f"experiment={plans}:3d_lowres", "data.batch_size=2", "format=json"),
        *("checkpointing=leanest", "precision=16"),
    )
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["peak_allocated_bytes"] > 0
    ended = unet3d("memory", f"experiment={plans}:2d", "format=json")
    assert ended.code == 2


def test_nnunet_finds_the_trainer_in_the_folder_that_the_documented_command_prints(
    plans, tmp_path, monkeypatch
):
    """Its network has nnU-Net's modules and weights, and the gradients of nnU-Net's network."""
    page = (ROOT / "docs" / "how-to" / "nnunet.md").read_text()
    module = re.search(r"export nnUNet_extTrainer=\$\(python -m ([\w.]+)\)", page)[1]
    command = [sys.executable, "-m", module]
    folder = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
    from nnunetv2.utilities.find_class_by_name import recursive_find_python_class
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    trainer = recursive_find_python_class(
        folder.strip(), "nnUNetTrainerLean", None, base_folder=folder.strip()
    )
    assert issubclass(trainer, nnUNetTrainer)
    manager = PlansManager(str(plans))
    arguments = (manager, manager.get_configuration("3d_fullres"), 2, 3, True)
    theirs = nnUNetTrainer.build_network_architecture(*arguments).double()
    lean = trainer.build_network_architecture(*arguments).double()
    assert list(lean.state_dict()) == list(theirs.state_dict())
    lean.load_state_dict(copy.deepcopy(theirs.state_dict()))
    x = torch.randn(2, 2, 8, 16, 16, dtype=torch.float64)
    losses = []
    for network in (theirs, lean):
        outputs = network(x)
        losses.append(sum(output.square().mean() for output in outputs))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
    for (name, a), b in zip(theirs.named_parameters(), lean.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-8, atol=1e-11, msg=name)
