"""The files of docs/how-to/share.md, with a stand-in for Triton Inference Server."""

import io
import json
import re
import runpy
import sys

import nibabel
import numpy as np
import onnxruntime
import pytest

import unet3d
from tests.commands.helpers.checkpoints import checkpoints
from tests.docs.helpers.pages import ROOT, read_blocks

pytestmark = pytest.mark.slow

BLOCKS = read_blocks(ROOT / "docs" / "how-to" / "share.md")
CONFIG, CLIENT = (block.content for block in BLOCKS if block.file)


class Answer(io.BytesIO):
    """What `urlopen` returns."""

    def __init__(self, content: bytes, headers: dict[str, str]):
        super().__init__(content)
        self.headers = headers


def run_onnx(session, request):
    """Answer a request as Triton does: the v2 protocol with binary data."""
    assert request.full_url == "http://triton/v2/models/shapes/infer"
    length = int(request.get_header("Inference-header-content-length"))
    asked, patch = json.loads(request.data[:length]), request.data[length:]
    (image,) = asked["inputs"]
    assert (image["datatype"], image["parameters"]["binary_data_size"]) == ("FP32", len(patch))
    patch = np.frombuffer(patch, np.float32).reshape(image["shape"])
    (logits,) = session.run([asked["outputs"][0]["name"]], {image["name"]: patch})
    text = json.dumps({"outputs": [{"name": "logits", "shape": logits.shape}]}).encode()
    return Answer(text + logits.tobytes(), {"Inference-Header-Content-Length": str(len(text))})


def test_the_client_gives_the_labels_of_predict_by_the_files_of_the_page(
    small, tmp_path, monkeypatch
):
    words = [*small, "data.patch_size=[32,32,32]", "model.width=4", "model.depth=2"]
    checkpoint = checkpoints(tmp_path, words)("shapes")
    bundle = unet3d.load(checkpoint, device="cpu").save(tmp_path / "bundle")
    session = onnxruntime.InferenceSession(bundle / "models" / "network_0.onnx")
    for kind, (value,) in (("input", session.get_inputs()), ("output", session.get_outputs())):
        found = re.search(rf'{kind} \[\s*{{ name: "(\w+)", .*dims: (\[.*?\])', CONFIG)
        assert found is not None
        assert [found[1], json.loads(found[2])] == [value.name, value.shape[1:]]

    scan, script = tmp_path / "scan.nii.gz", tmp_path / "segment_with_triton.py"
    voxels = np.random.default_rng(0).normal(size=(40, 36, 32)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(voxels, np.diag([1, 1, 1.25, 1])), scan)
    script.write_text(CLIENT)
    words = [script, bundle, "http://triton", scan, tmp_path / "labels.nii.gz"]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("urllib.request.urlopen", lambda request: run_onnx(session, request))
    runpy.run_path(str(script), run_name="__main__")
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]  # the bundle's
    labels = np.asarray(nibabel.load(tmp_path / "labels.nii.gz").dataobj)
    expected = unet3d.load(bundle, device="cpu").predict(voxels, spacing_mm=(1, 1, 1.25))
    assert len(np.unique(expected)) > 1
    assert (labels != expected).mean() < 1e-4
