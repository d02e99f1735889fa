"""Every network and pooling becomes both formats, and gives there what it gives here."""

import json
import zipfile

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from tests.pool.helpers.volumes import WINDOWS
from tests.test_conf import CONF, SHRUNK
from unet3d.config.instantiate import build_network
from unet3d.errors import RunError
from unet3d.export import onnx_format, torch_export_format
from unet3d.export.parity import compare_outputs
from unet3d.export.program import export_program, quiet
from unet3d.inference.write_labels import argmax_labels
from unet3d.pool import export_modules
from unet3d.pool.approx_median import ApproxMedianPool3d
from unet3d.pool.avg import AvgPool3d
from unet3d.pool.max import MaxPool3d
from unet3d.pool.median import MedianPool3d
from unet3d.workflows.export.export_checkpoint import FORMATS, to_plain_operators

VARIED = {
    "unet_tiny": ["pool=median", "model.pool_kernel=[[1,2,2],[2,2,1]]"],
    "unet_small": ["pool=approx_median", "model.depth=2"],
    "unet_large": ["pool=median", "model.depth=2", "model.norm=group", "model.pool_kernel=[1,3,1]"],
    "unet_cicek2016": ["pool=avg", "model.depth=3", "model.norm=none", "model.upsampling=nearest"],
    "unet_nnunet": ["pool=max", "model.depth=3", "model.kernel_size=[[1,3,3],3,3]"],
}
MODELS = sorted(path.stem for path in CONF.glob("model/[!_]*.yaml"))


def lived_in(model: nn.Module) -> nn.Module:
    """With statistics and weights of norms that are not those of a beginning."""
    for module in model.modules():
        for name in ("weight", "bias", "running_mean"):
            values = getattr(module, name, None)
            if "Norm" in type(module).__name__ and values is not None:
                nn.init.normal_(values, 1.0, 0.5)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("option", MODELS)
def test_every_network_is_equal_in_both_formats(composed, tmp_path, option):
    odd = (16, 16, 16) if option == "dynunet" else (17, 16, 19)
    own = VARIED.get(option, [])
    keys = {word.split("=")[0] for word in own}
    words = [w for w in SHRUNK.get(option, []) if w.split("=")[0] not in keys] + own
    model = lived_in(build_network(composed(f"model={option}", *words, "data.in_channels=2")))
    program = export_program(to_plain_operators(model), 2, odd)
    batches = [torch.randn(1, 2, *odd), torch.randn(3, 2, *odd)]
    for format in FORMATS.values():
        path = tmp_path / f"net{format.ENDING}"
        format.write(program, path, {"unet3d": "1"})
        with torch.inference_mode():
            found = compare_outputs(model, format.Opened(path), batches, argmax_labels)
        assert found.difference < 2e-5 * found.largest
        assert found.same > 0.999


class Poolings(nn.Module):
    """Each kind of graph that a pooling can have, their values in one row."""

    def __init__(self) -> None:
        super().__init__()
        padded = WINDOWS["3x2x2 padding 1,1,0"]
        self.pools = nn.ModuleList(
            [
                *(kind(*padded) for kind in (MaxPool3d, AvgPool3d, MedianPool3d)),
                *(MedianPool3d(*w) for w in (((1, 1, 3), 1), ((1, 2, 3), 2))),
                *(ApproxMedianPool3d(*w) for w in (((1, 2, 2), 1), ((1, 3, 2), 1, (0, 1, 1)))),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([pool(x).flatten(1) for pool in self.pools], 1)


def test_every_kind_of_pooling_is_equal_in_both_formats(tmp_path, monkeypatch):
    monkeypatch.setattr(
        export_modules, "MOST_COMPARED", 5
    )  # what is sorted has a long graph otherwise
    pools = Poolings()
    program = export_program(to_plain_operators(pools), 2, (7, 8, 9))
    batches = (torch.randn(1, 2, 7, 8, 9), torch.randn(2, 2, 7, 8, 9).relu().round(decimals=1))
    for format in FORMATS.values():
        path = tmp_path / f"pools{format.ENDING}"
        format.write(program, path, {"unet3d": "1"})
        found = format.Opened(path)
        for batch in batches:
            torch.testing.assert_close(found(batch), pools(batch), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def convolution():
    return export_program(nn.Conv3d(1, 2, 3, padding=1).eval().requires_grad_(False), 1, (6, 5, 4))


FACTS = {"unet3d": "1", "classes": ["a", "b: c"], "spacing_mm": None}


@pytest.fixture(scope="module")
def files(convolution, tmp_path_factory):
    """The folder of a net.onnx and a net.pt2."""
    folder = tmp_path_factory.mktemp("files")
    for format in FORMATS.values():
        format.write(convolution, folder / f"net{format.ENDING}", FACTS)
    return folder


def test_what_is_known_of_the_network_is_in_the_files(files):
    session = onnxruntime.InferenceSession(files / "net.onnx")
    held = session.get_modelmeta().custom_metadata_map
    assert {key: json.loads(value) for key, value in held.items()} == FACTS
    extra = {torch_export_format.FACTS: ""}
    with quiet():
        torch.export.load(files / "net.pt2", extra_files=extra)
    assert json.loads(extra[torch_export_format.FACTS]) == FACTS


def test_no_file_tells_of_the_machine_that_wrote_it(files):
    with zipfile.ZipFile(files / "net.pt2") as archive:
        parts = [archive.read(name) for name in archive.namelist()]
    for text in ((files / "net.onnx").read_bytes(), *parts):
        assert b"site-packages" not in text
        assert b"conv.py" not in text


def test_inputs_and_outputs_have_plain_names(files):
    session = onnxruntime.InferenceSession(files / "net.onnx")
    (image,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (image.name, image.shape) == ("image", ["batch", 1, 6, 5, 4])
    assert (logits.name, logits.shape) == ("logits", ["batch", 2, 6, 5, 4])
    assert session.get_modelmeta().producer_name == "unet3d"


def test_weights_that_no_single_file_can_hold_lie_beside_it(convolution, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_format, "MOST_INSIDE", 100)
    monkeypatch.setattr(onnx_format, "LEAST_BESIDE", 0)
    onnx_format.write_onnx(convolution, tmp_path / "net.onnx", {"unet3d": "1"})
    assert {file.name for file in tmp_path.iterdir()} == {"net.onnx", "net.onnx.data"}
    assert (tmp_path / "net.onnx.data").stat().st_size >= 27 * 2 * 4
    batch = torch.randn(1, 1, 6, 5, 4)
    found = onnx_format.OnnxSession(tmp_path / "net.onnx")(batch)
    with quiet():
        np.testing.assert_allclose(found, convolution.module()(batch), rtol=1e-5, atol=1e-6)
    onnx.checker.check_model(tmp_path / "net.onnx")


def test_an_operator_that_torch_has_not_is_named():
    with pytest.raises(RunError, match=r"unet3d\.median_pool3d"):
        export_program(nn.Sequential(MedianPool3d(2)), 1, (4, 4, 4))


def test_a_network_that_looks_at_values_is_a_fault_of_one_line(capfd):
    class Choosing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(RunError, match="Choosing cannot be traced") as caught:
        export_program(Choosing(), 1, (4, 4, 4))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")  # torch prints the graph that it has made so far


def test_a_difference_counts_and_is_not_lost_in_nan():
    own = torch.randn(2, 3, 4, 4, 4)
    batches = [torch.zeros(2, 1, 4, 4, 4)]

    def held(other: Tensor) -> bool:
        return compare_outputs(lambda batch: own, lambda batch: other, batches, argmax_labels).holds

    assert held(own)
    assert held(own + 1e-5)
    assert not held(own + 0.01)
    assert not held(own.masked_fill(own > 1, torch.nan))


def test_the_share_of_equal_voxels_is_not_rounded_up():
    own = torch.zeros(1, 2, 100, 100, 100)
    other = own.clone()
    other[0, 1, 0, 0, 0] = 1
    found = compare_outputs(lambda batch: own, lambda batch: other, [own], argmax_labels)
    assert "99.9999 % of voxels" in str(found)
