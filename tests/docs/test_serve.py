"""The files of docs/how-to/serve.md, with a stand-in for Triton Inference Server."""

import json
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import nibabel
import numpy as np
import onnxruntime
import pytest

import unet3d
from tests.commands.helpers.checkpoints import checkpoints
from tests.docs.helpers.pages import ROOT, read_blocks

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "how-to" / "serve.md"
FILES = {block.file: block.content for block in read_blocks(PAGE) if block.file}


@pytest.fixture(scope="module")
def bundle(small, tmp_path_factory):
    """Return a bundle of the classes and windows of the page."""
    folder = tmp_path_factory.mktemp("bundle")
    words = [*small, "data.patch_size=[32,32,32]", "model.width=4", "model.depth=2"]
    checkpoint = checkpoints(folder, words)("shapes")
    return unet3d.load(checkpoint, device="cpu").save(folder / "bundle")


@contextmanager
def serve(model):
    """Run an ONNX file as Triton does: the v2 protocol with binary data."""
    session = onnxruntime.InferenceSession(model)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v2/models/shapes/infer"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            length = int(self.headers["Inference-Header-Content-Length"])
            asked = json.loads(body[:length])
            (image,) = asked["inputs"]
            assert image["datatype"] == "FP32"
            assert image["parameters"]["binary_data_size"] == len(body) - length
            patch = np.frombuffer(body[length:], np.float32).reshape(image["shape"])
            (logits,) = session.run([asked["outputs"][0]["name"]], {image["name"]: patch})
            output = {"name": "logits", "datatype": "FP32", "shape": list(logits.shape)}
            text = json.dumps({"model_name": "shapes", "outputs": [output]}).encode()
            self.send_response(200)
            self.send_header("Inference-Header-Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text + logits.tobytes())

        def log_message(self, *_):
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_client_gives_the_labels_of_predict(bundle, tmp_path):
    scan, script = tmp_path / "scan.nii.gz", tmp_path / "segment_with_triton.py"
    voxels = np.random.default_rng(0).normal(size=(40, 36, 32)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(voxels, np.diag([1, 1, 1.25, 1])), scan)
    script.write_text(FILES["segment_with_triton.py"])
    with serve(bundle / "models" / "network_0.onnx") as address:
        words = [bundle, address, scan, tmp_path / "labels.nii.gz"]
        subprocess.run([sys.executable, script, *map(str, words)], check=True, timeout=60)
    labels = np.asarray(nibabel.load(tmp_path / "labels.nii.gz").dataobj)
    expected = unet3d.load(bundle, device="cpu").predict(voxels, spacing_mm=(1, 1, 1.25))
    assert len(np.unique(expected)) > 1
    assert (labels != expected).mean() < 1e-4


def test_the_config_names_the_inputs_and_outputs_of_the_network(bundle):
    session = onnxruntime.InferenceSession(bundle / "models" / "network_0.onnx")
    (config,) = [text for file, text in FILES.items() if file.endswith("config.pbtxt")]
    for kind, (value,) in (("input", session.get_inputs()), ("output", session.get_outputs())):
        found = re.search(rf'{kind} \[\s*{{ name: "(\w+)", .*dims: (\[.*?\])', config)
        assert found is not None
        assert [found[1], json.loads(found[2])] == [value.name, value.shape[1:]]
