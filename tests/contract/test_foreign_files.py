"""Checkpoints of strangers run no code."""

import os
import pickle
from socketserver import TCPServer
from threading import Thread

import nibabel
import numpy as np
import pytest
import torch

import unet3d as package
from tests.contract.helpers.components import rewrite_checkpoint


@pytest.fixture(scope="module")
def best(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign") / "run"
    words = [*small, "model.width=2", "model.depth=2", "logger=none"]
    return package.train(words, folder=folder).checkpoint


@pytest.fixture
def scan(tmp_path):
    path = tmp_path / "scan.nii.gz"
    values = np.random.default_rng(0).normal(size=(16, 16, 16)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path)
    return path


TARGETS = [
    {"_target_": "os.system", "command": "touch executed"},
    {"_target_": "subprocess.Popen", "args": ["touch", "executed"]},
    {"_target_": "builtins.open", "file": "executed", "mode": "w"},
    {"_target_": "pathlib.Path.touch", "_args_": ["executed"]},
    {"_target_": "torch.save", "obj": 1, "f": "executed"},
    {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "os.mkdir", "path": "executed"}]},
]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["_target_"])
def test_a_checkpoint_may_not_name_a_class_outside_of_the_allowed_packages(
    target, best, scan, unet3d, tmp_path
):
    def change(content):
        content["unet3d"]["config"]["model"] = target
        content["unet3d"]["config"]["allow_targets"] = ["os", "subprocess", "builtins", "pathlib"]

    path = rewrite_checkpoint(best, tmp_path / "x.ckpt", change)
    ended = unet3d("predict", f"checkpoint={path}", f"input={scan}", "output=out", "device=cpu")
    assert ended.code == 2
    assert "x.ckpt" in ended.err
    assert not (tmp_path / "executed").exists()
    with pytest.raises(ValueError, match=r"x\.ckpt"):
        package.load(path, device="cpu")
    assert not (tmp_path / "executed").exists()


def test_a_network_of_a_checkpoint_fetches_nothing(best, scan, unet3d, tmp_path):
    connections = []
    with TCPServer(("127.0.0.1", 0), lambda *connection: connections.append(connection)) as server:
        Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/weights.pth"
        network = {"_target_": "monai.networks.nets.HoVerNet", "pretrained_url": url}

        def change(content):
            content["unet3d"]["config"]["model"] = network

        path = rewrite_checkpoint(best, tmp_path / "x.ckpt", change)
        ended = unet3d("predict", f"checkpoint={path}", f"input={scan}", "output=out", "device=cpu")
        server.shutdown()
    assert (ended.code, connections) == (2, [])
    assert f"model.pretrained_url is '{url}'" in ended.err


class Executed:
    """Pickled, it creates a folder when it is read."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def save_torch(content, path):
    torch.save(content, path)


def save_pickle(content, path):
    path.write_bytes(pickle.dumps(content))


@pytest.mark.parametrize("save", [save_torch, save_pickle])
@pytest.mark.parametrize("use", ["predict", "resume", "init_from"])
def test_a_pickle_with_code_is_refused_and_does_not_run(
    save, use, best, scan, unet3d, small, tmp_path
):
    content = torch.load(best, weights_only=True)
    content["extra"] = Executed()
    save(content, tmp_path / "x.ckpt")
    words = {
        "predict": ["predict", "checkpoint=x.ckpt", f"input={scan}", "output=out", "device=cpu"],
        "resume": ["train", *small, "resume=x.ckpt", "hydra.run.dir=run"],
        "init_from": ["train", *small, "init_from=x.ckpt", "hydra.run.dir=run"],
    }[use]
    ended = unet3d(*words)
    assert ended.code == 2, ended.err
    assert "x.ckpt" in ended.err
    assert not (tmp_path / "executed").exists()
