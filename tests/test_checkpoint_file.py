import random
import subprocess
import sys
import zipfile

import pytest
import torch

from unet3d.checkpoint_file import (
    extract_weights,
    load_checkpoint,
    save_checkpoint,
    update_metadata,
)
from unet3d.errors import UsageError


def imported_packages(module):
    """Return the top-level packages that a fresh process has after an import."""
    script = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_reading_a_checkpoint_needs_torch_alone():
    packages = imported_packages("unet3d.checkpoint_file")
    assert "torch" in packages
    assert not packages & {"lightning", "pytorch_lightning", "monai", "hydra", "omegaconf"}


@pytest.mark.parametrize(
    "module", ["inference.predictor", "export.export_checkpoint", "doctor", "dataset_check"]
)
def test_a_workflow_that_trains_nothing_does_not_import_lightning(module):
    packages = imported_packages(f"unet3d.workflows.{module}")
    assert not packages & {"lightning", "pytorch_lightning"}


def test_every_flipped_bit_that_changes_the_content_is_detected(tmp_path):
    path = tmp_path / "x.ckpt"
    content = {"weights": torch.arange(50.0), "name": "a network"}
    save_checkpoint(content, path)
    intact = path.read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        flipped = bytearray(intact)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            loaded = load_checkpoint(path)
        except UsageError:
            continue
        assert loaded["weights"].equal(content["weights"])
        assert loaded["name"] == content["name"]


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", [1, 2]])
def test_a_file_that_is_not_a_checkpoint_is_rejected_by_name(tmp_path, content):
    path = tmp_path / "x.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UsageError, match=r"x\.ckpt"):
        load_checkpoint(path)


def test_a_file_whose_content_is_empty_is_rejected_by_name(tmp_path):
    path = tmp_path / "x.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/version", "3")
        archive.writestr("x/data.pkl", "")  # torch raises an EOFError without a message
    with pytest.raises(UsageError, match=r"x\.ckpt cannot be read as a checkpoint: EOFError"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "weight", [torch.tensor([1.0, float("nan")]), torch.zeros(2, dtype=torch.complex64), "x", 5]
)
def test_weights_that_are_not_finite_real_tensors_are_rejected(tmp_path, weight):
    with pytest.raises(UsageError, match=r"x\.ckpt"):
        extract_weights(tmp_path / "x.ckpt", {"state_dict": {"a": torch.ones(2), "b": weight}})


def test_metadata_is_added_and_the_weights_are_unchanged(tmp_path):
    path = tmp_path / "x.ckpt"
    save_checkpoint({"unet3d": {"a": 1}, "state_dict": {"w": torch.arange(3.0)}}, path)
    update_metadata(path, {"b": [2]})
    content = load_checkpoint(path)
    assert content["unet3d"] == {"a": 1, "b": [2]}
    assert content["state_dict"]["w"].tolist() == [0, 1, 2]
