"""Earlier names of options and keys work on the command line, in files and in saved configs."""

import copy
import json
from pathlib import Path

import pytest
import torch

from unet3d.__main__ import main
from unet3d.checkpoint_file import save_checkpoint
from unet3d.config.keys import compose_api_config
from unet3d.config.names import announce
from unet3d.inference.ensemble import load_ensemble
from unet3d.model.plain_unet import PlainUNet3D
from unet3d.model.unet import UNet3D
from unet3d.training.same_experiment import find_differences, list_compared

RELEASED = Path(__file__).parents[1] / "released" / "1"


@pytest.fixture(autouse=True)
def forget_lines():
    announce.cache_clear()


@pytest.mark.parametrize(
    ("words", "key", "value", "lines"),
    [
        (
            ["experiment=forum_small"],
            "data.patch_size",
            [320, 150, 26],
            ["experiment=forum_small is now called experiment=example_small"],
        ),
        (
            ["model=naive_large"],
            "model._target_",
            "unet3d.model.plain_unet.PlainUNet3D",
            ["model=naive_large is now called model=plain_large"],
        ),
        (
            ["loss=tversky", "loss.batch=false"],
            "loss.batch_dice",
            False,
            ["loss.batch is now called loss.batch_dice"],
        ),
        (
            ["loss=cross_entropy", "loss.weight=[1,2]"],
            "loss.class_weights",
            [1, 2],
            ["loss.weight is now called loss.class_weights"],
        ),
        (["loss=monai", "loss.batch=false"], "loss.batch", False, []),  # MONAI's name
        (["optimizer.fused=null"], "optimizer.fused", True, []),
    ],
)
def test_an_earlier_name_works_with_one_line(words, key, value, lines, capsys):
    for _ in range(2):
        composed = compose_api_config("train", words)
    node = composed.config
    for part in key.split("."):
        node = node[part]
    assert node == value
    assert capsys.readouterr().err.splitlines() == lines
    assert composed.composition.choices["model"] != "naive_large"


def test_an_experiment_of_the_user_may_have_earlier_names(tmp_path, monkeypatch, capsys):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = (
        "# @package _global_\n"
        "defaults: [{override /model: naive_small}, {override /loss: tversky}]\n"
        "model: {encoder: [2, 4], decoder: [2]}\nloss: {batch: false}\noptimizer: {fused: null}\n"
    )
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    words = ["experiment=mine", "data.patch_size=[8,8,8]", "format=json", "output=memory.json"]
    assert main(["memory", *words]) == 0
    assert json.loads(Path("memory.json").read_text())["parameters"] < 2000
    assert capsys.readouterr().err.splitlines()[:2] == [
        "model=naive_small is now called model=plain_small",
        "loss.batch is now called loss.batch_dice",
    ]


def test_a_checkpoint_of_a_network_with_an_earlier_name_loads(tmp_path):
    network = {
        "_target_": "unet3d.model.plain_unet.PlainUNet3D",
        **{"in_channels": 1, "num_classes": 4, "encoder": [2, 4], "decoder": [2]},
    }
    content = torch.load(RELEASED / "best.ckpt", weights_only=True)
    earlier = "unet3d.model.naive_unet.NaiveUNet3D"
    content["unet3d"]["config"]["model"] = network | {"_target_": earlier}
    weights = PlainUNet3D(**{k: v for k, v in network.items() if k != "_target_"}).state_dict()
    content["state_dict"] = {f"model.{name}": value for name, value in weights.items()}
    save_checkpoint(content, tmp_path / "best.ckpt")
    assert isinstance(load_ensemble([tmp_path / "best.ckpt"]).networks[0], PlainUNet3D)


def test_deep_supervision_of_an_earlier_network_of_two_levels_loads_and_resumes(tmp_path):
    content = torch.load(RELEASED / "best.ckpt", weights_only=True)
    present = {"config": copy.deepcopy(content["unet3d"]["config"])}
    content["unet3d"]["config"]["model"]["deep_supervision"] = True
    save_checkpoint(content, tmp_path / "best.ckpt")
    network = load_ensemble([tmp_path / "best.ckpt"]).networks[0]
    assert isinstance(network, UNet3D)
    saved, now = (list_compared(c, {"cases": {}}) for c in (content["unet3d"], present))
    assert not [line for line in find_differences(saved, now) if "deep_supervision" in line]


def test_a_run_resumes_whose_config_has_earlier_names():
    present = {
        "loss": {"_target_": "unet3d.loss.overlap.Tversky", "batch_dice": True},
        "optimizer": {"fused": True},
        "model": {"_target_": "unet3d.model.plain_unet.PlainUNet3D"},
    }
    earlier = {
        "loss": {"_target_": "unet3d.loss.overlap.Tversky", "batch": True},
        "optimizer": {"fused": None},
        "model": {"_target_": "unet3d.model.naive_unet.NaiveUNet3D"},
    }
    saved, now = (list_compared({"config": c}, {"cases": {}}) for c in (earlier, present))
    assert find_differences(saved, now) == []
