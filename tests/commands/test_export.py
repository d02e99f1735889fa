"""`unet3d export` of small checkpoints, and its files in other programs."""

import json
from pathlib import Path

import nibabel
import numpy as np
import onnxruntime
import pytest
import torch

from tests.contract.helpers.datasets import save
from unet3d.__main__ import main
from unet3d.commands.export import load_sample_patches
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.export import formats

pytestmark = pytest.mark.slow

TINY = ["model.width=4", "model.depth=2", "pool=median"]


@pytest.fixture(scope="module")
def scan(tmp_path_factory):
    """Return a scan to compare outputs on."""
    path = tmp_path_factory.mktemp("scans") / "a.nii"
    voxels = np.random.default_rng(0).normal(100, 30, (20, 14, 18)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)
    return path


def export(capsys, **words: object) -> tuple[int, str, str]:
    """Run `unet3d export`; return the exit code, standard output and standard error."""
    code = main(["export", *(f"{key}={value}" for key, value in words.items())])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_an_onnx_file_describes_its_inputs_and_outputs(checkpoint, scan, tmp_path, capsys):
    regions = "data.regions={whole:[1,2,3],core:[2,3],inner:[3]}"
    path = checkpoint("regions", regions, "data.spacing_mm=[1,1,1]", "precision=bf16-true")
    code, *_ = export(capsys, checkpoint=path, output=tmp_path / "net.onnx", input=scan)
    assert code == 0
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    held = session.get_modelmeta().custom_metadata_map
    facts = {key: json.loads(value) for key, value in held.items()}
    expected = {
        "classes": ["background", "ball", "tube", "box"],
        "outputs": ["whole", "core", "inner"],
        "activation": "sigmoid",
        "regions": {"whole": [1, 2, 3], "core": [2, 3], "inner": [3]},
        "labels": [1, 2, 3],
        "channels": ["synthetic"],
        "normalize": ["zscore"],
        "patch_size": [16, 16, 16],
        "spacing_mm": [1, 1, 1],
        "orientation": "RAS",
        "trained_precision": "bf16-true",
    }
    assert facts | expected == facts


def test_without_input_patches_of_noise_are_compared(checkpoint, tmp_path, capsys):
    words = {"checkpoint": checkpoint("one"), "format": "torch_export"}
    output = tmp_path / "new" / "folder" / "net.pt2"
    code, message, _ = export(capsys, **words, output=output, patch_size="[8,32,10]")
    assert code == 0
    assert "on 3 patches of noise logits differ" in message
    assert "(batch, 1, 8, 32, 10) -> (batch, 4, 8, 32, 10)" in message


def test_patches_that_vary_are_compared(tmp_path):
    """In a constant patch a norm divides by almost nothing, and rounding reaches the logits."""
    voxels = np.zeros((24, 24, 24), np.float32)
    voxels[:10, :10, :10] = np.random.default_rng(0).normal(100, 1, (10, 10, 10))
    scan = save(tmp_path / "a.nii", voxels, np.eye(4))
    raw = Preprocessing(num_classes=2, normalize=("none",), crop="none")
    metadata = {"channels": ["T1"], "preprocessing": raw.to_dict()}
    images, _ = load_sample_patches(scan, metadata, (12, 12, 12))
    assert [image.shape for image in images] == [(1, 12, 12, 12)] * 3
    assert all(image.std() > 0 for image in images)


def test_a_file_with_other_outputs_is_removed(checkpoint, scan, tmp_path, capsys, monkeypatch):
    def other(network):
        copy = exportable(network)
        copy.heads[0].bias = torch.nn.Parameter(copy.heads[0].bias + 0.1)
        return copy

    exportable = formats.to_plain_operators
    monkeypatch.setattr(formats, "to_plain_operators", other)
    words = {"checkpoint": checkpoint("one"), "format": "torch_export", "input": scan}
    (tmp_path / "net.pt2").write_text("as it was")
    code, message, error = export(capsys, **words, output=tmp_path / "net.pt2")
    assert (code, message) == (4, "")
    assert "does not match the checkpoint; the file was removed" in error
    assert [file.name for file in tmp_path.iterdir()] == ["net.pt2"]
    assert (tmp_path / "net.pt2").read_text() == "as it was"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"checkpoint": "one,one"}, "a file holds one network"),
        ({"output": "folder", "format": "nnunet"}, "folder exists: name a new folder"),
        ({"patch_size": "[16,16,1]"}, "use larger patches (data.patch_size)"),
        ({"input": "two.nii"}, "two.nii has 2 channels, but the network takes 1"),
    ],
    ids=str,
)
def test_a_usage_error_is_one_line_with_exit_code_2(
    checkpoint, tmp_path, capsys, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    nibabel.save(nibabel.Nifti1Image(np.ones((8, 8, 8, 2), np.float32), np.eye(4)), "two.nii")
    words = {"checkpoint": "one", "output": "net.onnx"} | words
    asked = words["checkpoint"].replace("one", str(checkpoint("one")))
    capsys.readouterr()
    code, out, error = export(capsys, **words | {"checkpoint": asked})
    assert (code, out) == (2, "")
    assert message in error
    assert not Path("net.onnx").exists()
