import subprocess
import sys
import zipfile
from collections import Counter

import numpy as np
import pytest
import torch

from unet3d.checkpoint_file import (
    extract_weights,
    load_checkpoint,
    save_checkpoint,
)
from unet3d.errors import UsageError


def test_reading_a_checkpoint_needs_torch_alone_and_other_commands_than_train_no_lightning():
    script = (
        "import sys, unet3d.checkpoint_file\n"
        "assert not {'lightning', 'monai', 'hydra', 'omegaconf'} & {*sys.modules}\n"
        "import unet3d.commands.doctor\n"
        "assert not {'lightning', 'pytorch_lightning'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_a_file_that_is_not_a_checkpoint_is_rejected_by_name(tmp_path, content):
    path = tmp_path / "x.ckpt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.ckpt"):
        load_checkpoint(path)


def test_what_holds_no_weights_is_refused_by_its_name(tmp_path):
    with pytest.raises(
        UsageError, match=r"x\.ckpt holds no weights .*: epoch is not a tensor but a int"
    ):
        extract_weights(tmp_path / "x.ckpt", {"a": torch.ones(2), "epoch": 5})


def test_the_error_of_a_signal_while_a_file_is_saved_is_not_called_the_contents(
    tmp_path, monkeypatch
):
    died = [RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")]
    load = torch.load

    def load_while_a_worker_dies(*args, **kwargs):
        if died:
            raise died.pop()
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", load_while_a_worker_dies)
    with pytest.raises(RuntimeError, match=r"^DataLoader worker \(pid 7\)"):
        save_checkpoint({"epoch": 5}, tmp_path / "x.ckpt")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("numpy", ["numpy._core", "numpy.core"], ids=["numpy 2", "numpy 1"])
def test_what_checkpoints_of_other_projects_hold_is_read(tmp_path, numpy):
    content = {
        "score": np.float64(0.5),
        "device": torch.device("cuda", 1),
        "milestones": Counter([3, 3, 5]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(content, tmp_path / "saved.pth")
    with (
        zipfile.ZipFile(tmp_path / "saved.pth") as saved,
        zipfile.ZipFile(tmp_path / "x.pth", "w") as renamed,
    ):
        for name in saved.namelist():
            data = saved.read(name)
            renamed.writestr(name, data.replace(b"numpy._core", numpy.encode()))
    loaded = load_checkpoint(tmp_path / "x.pth")
    assert loaded["parameter"].equal(content["parameter"])
    plain = ("score", "device", "milestones")
    assert [loaded[key] for key in plain] == [content[key] for key in plain]
