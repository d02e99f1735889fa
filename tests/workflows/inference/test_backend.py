import subprocess
import sys

import nibabel
import numpy as np
import pytest
import torch
from torch import nn

from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import RunError, UsageError
from unet3d.machine import Precision, has_fast_bf16
from unet3d.model.unet import UNet3D
from unet3d.pool.max import MaxPool3d
from unet3d.workflows.inference.backend import open_network, resolve_backend_precision
from unet3d.workflows.inference.ensemble import Ensemble
from unet3d.workflows.inference.predictor import Predictor, ScanTask

PATCH = (16, 12, 8)
FLOAT = Precision("32", "32")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ensemble():
    torch.manual_seed(0)
    network = UNet3D(
        in_channels=1, num_classes=3, depth=2, width=4, norm="instance", pool=MaxPool3d
    )
    return Ensemble(
        networks=(network.eval().requires_grad_(False),),
        channels=("MR",),
        classes=("background", "a", "b"),
        regions=None,
        keep_largest_component=(),
        preprocessing=Preprocessing(num_classes=3),
        patch_size=PATCH,
        precision="32",
    )


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scan")
    voxels = np.random.default_rng(0).normal(0, 1, (20, 17, 9)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / "in.nii")
    scan = ScanFiles(name="in", files=(folder / "in.nii",))
    return ScanTask(scan=scan, labels=folder / "out.nii", probabilities=None)


def segment(ensemble, task, backend):
    """Return the labels, and the predictor that found them."""
    predictor = Predictor(
        ensemble,
        device=CPU,
        precision=FLOAT,
        overlap=0.5,
        batch_size=5,  # the last batch is smaller
        backend=backend,
    )
    prepared = predictor.prepare(task)
    return predictor.segment(prepared, on_windows=lambda n: None, log=print), predictor


@pytest.mark.parametrize("backend", ["onnx", "openvino"])
def test_every_backend_finds_the_same_labels(ensemble, task, backend):
    expected, _ = segment(ensemble, task, "torch")
    labels, predictor = segment(ensemble, task, backend)
    assert len(np.unique(expected)) > 1
    np.testing.assert_array_equal(labels, expected)
    windows = torch.randn(2, 1, *PATCH)
    with torch.inference_mode():
        logits = ensemble.networks[0](windows)
    torch.testing.assert_close(predictor.networks[0](windows), logits, rtol=1e-4, atol=1e-4)


def test_openvino_computes_in_float32_unless_bf16_is_asked_for(ensemble):
    # Without bf16 instructions it falls back to float32, as resolve_precision does before it.
    mixed = "bf16" if has_fast_bf16() else "f32"
    used = []
    for precision in ("32", "bf16"):
        network = open_network(
            *(ensemble.networks[0], "openvino", Precision(precision, precision), CPU),
            channels=1,
            patch=PATCH,
        )
        used.append(network.model.get_property("INFERENCE_PRECISION_HINT").get_type_name())
    assert used == ["f32", mixed]


def test_a_backend_for_cpus_is_refused_on_a_gpu():
    with pytest.raises(UsageError, match=r"^backend=onnx computes on the CPU: add device=cpu$"):
        resolve_backend_precision("onnx", "cuda", FLOAT)


def test_onnx_says_that_it_computes_in_float32():
    precision = resolve_backend_precision("onnx", "cpu", Precision("bf16", "bf16"))
    assert (precision.used, precision.reason) == ("32", "backend=onnx computes in float32")


def test_a_network_that_cannot_be_traced_is_named():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(RunError, match=r"^Branching cannot be traced by torch.export: .*"):
        open_network(Branching(), "openvino", FLOAT, CPU, channels=1, patch=PATCH)


def test_signals_are_handled_after_several_openvino_networks_are_freed():
    # In a process of its own: a second Core would end it.
    code = (
        "import faulthandler, signal, torch\n"
        "from unet3d.export.openvino_session import OpenVinoSession\n"
        "faulthandler.enable()\n"
        "program = torch.export.export(torch.nn.ReLU(), (torch.ones(1, 1, 4, 4, 4),))\n"
        "first, second = OpenVinoSession(program), OpenVinoSession(program)\n"
        "del first\n"
        "del second\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('handled'))\n"
        "signal.raise_signal(signal.SIGUSR1)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "handled\n"
