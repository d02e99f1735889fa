"""A checkpoint or a bundle of a stranger names networks that are allowed, or is refused."""

import json
from copy import deepcopy

import pytest

from unet3d.checkpoint_file import save_checkpoint
from unet3d.cli.main import main
from unet3d.commands.train import build_training
from unet3d.errors import UsageError
from unet3d.export.bundle import DESCRIPTION_FILE, get_network_path, write_weights
from unet3d.workflows.inference.ensemble import load_ensemble


@pytest.fixture
def content(composed, tmp_path):
    """Return what is read of a checkpoint to predict with it."""
    module = build_training(composed("model.width=2", "model.depth=2"), tmp_path / "run").module
    return {"state_dict": module.state_dict(), "unet3d": deepcopy(module.metadata)}


def write_checkpoint(content, folder):
    save_checkpoint(content, folder / "x.ckpt")
    return folder / "x.ckpt"


def write_bundle(content, folder):
    bundle = folder / "bundle"
    (bundle / "models").mkdir(parents=True)
    weights = {name.removeprefix("model."): w for name, w in content["state_dict"].items()}
    write_weights(weights, get_network_path(bundle, 0, ".safetensors"))
    description = {"format": "unet3d bundle", "format_version": 1, "members": [content["unet3d"]]}
    (bundle / DESCRIPTION_FILE).write_text(json.dumps(description), "utf-8")
    return bundle


@pytest.mark.parametrize("write", [write_checkpoint, write_bundle])
@pytest.mark.parametrize("name", ["os.system", "torch.hub.load", "argparse.Namespace"])
def test_a_network_that_is_not_allowed_is_refused_by_its_name(
    content, tmp_path, capsys, write, name
):
    content["unet3d"]["config"]["model"]["_target_"] = name
    path = write(content, tmp_path)
    (tmp_path / "in").mkdir()
    assert main(["predict", f"checkpoint={path}", f"input={tmp_path}", "output=out"]) == 2
    error = capsys.readouterr().err.strip()
    assert f"{path}: model._target_ names {name}: a checkpoint may only name networks" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("write", [write_checkpoint, write_bundle])
def test_weights_of_another_network_are_refused_by_the_first_that_differs(content, tmp_path, write):
    content["unet3d"]["config"]["model"]["width"] = 3
    with pytest.raises(UsageError, match=r"do not match its network: decoder\S+ should be \[3"):
        load_ensemble([write(content, tmp_path)])


def test_a_checkpoint_without_statistics_of_the_training_cases_is_read(content, tmp_path):
    content["unet3d"]["training_statistics"] = None
    assert load_ensemble([write_checkpoint(content, tmp_path)]).training_statistics == ()
