"""Every network and pooling gives the same outputs in both export formats."""

import json
import zipfile

import onnxruntime
import pytest
import torch
from torch import nn

from tests.config.helpers.configs import SHRUNK
from unet3d.commands.export import compare_outputs
from unet3d.config.compose import list_options
from unet3d.errors import RunError
from unet3d.export import formats
from unet3d.export.formats import (
    export_program,
    load_onnx,
    load_torch_export,
    suppress_output,
    to_plain_operators,
    write_onnx,
    write_torch_export,
)
from unet3d.inference.label_writer import argmax_labels
from unet3d.step.build import build_network

FORMATS = {".onnx": (write_onnx, load_onnx), ".pt2": (write_torch_export, load_torch_export)}

VARIED = {
    "unet_tiny": ["pool=median", "model.pool_kernel=[[1,2,2],[2,2,1]]"],
    "unet_small": ["pool=approx_median", "model.depth=2"],
    "unet_large": ["pool=median", "model.depth=2", "model.norm=group", "model.pool_kernel=[1,3,1]"],
    "unet_cicek2016": ["pool=avg", "model.depth=2", "model.norm=none", "model.upsampling=nearest"],
    "unet_nnunet": ["pool=max", "model.depth=4", "model.kernel_size=[[1,3,3],3,3,3]"],
}
SLOW = (*VARIED, "unet_resenc")
"""The others are MONAI's networks and plain twins of ours: what breaks them is a new torch."""

MODELS = [
    pytest.param(option, marks=pytest.mark.slow if option in SLOW else pytest.mark.long)
    for option in list_options("model")
]


def randomize_norms(model: nn.Module) -> nn.Module:
    """Give norms the weights and statistics of a trained network."""
    for module in model.modules():
        for name in ("weight", "bias", "running_mean"):
            values = getattr(module, name, None)
            if "Norm" in type(module).__name__ and values is not None:
                nn.init.normal_(values, 1.0, 0.5)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("option", MODELS)
def test_every_network_has_equal_outputs_in_both_formats(composed, tmp_path, option):
    variation = VARIED.get(option, [])
    keys = {override.split("=")[0] for override in variation}
    shrunk = [o for o in SHRUNK.get(option, []) if o.split("=")[0] not in keys]
    settings = composed(f"model={option}", *shrunk, *variation, "data.in_channels=2")
    takes_any_size = option.startswith(("unet_", "plain_"))
    patch = (17, 16, 19) if takes_any_size else tuple(settings.data.patch_size)
    model = randomize_norms(build_network(settings.step))
    graph = export_program(to_plain_operators(model), (2, *patch))
    batches = [torch.randn(1, 2, *patch), torch.randn(3, 2, *patch)]
    for ending, (write, open_session) in FORMATS.items():
        path = tmp_path / f"net{ending}"
        write(graph, path, {"unet3d": "1"})
        with torch.inference_mode():
            parity = compare_outputs(model, open_session(path), batches, argmax_labels)
        assert parity.max_difference < 2e-5 * parity.max_logit
        assert parity.agreement > 0.999


@pytest.mark.slow
def test_files_have_plain_names_and_the_metadata_and_no_local_paths(tmp_path):
    convolution = nn.Conv3d(1, 2, 3, padding=1).eval().requires_grad_(False)
    graph = export_program(convolution, (1, 6, 5, 4))
    metadata = {"unet3d": "1", "classes": ["a", "b: c"], "spacing_mm": None}
    for ending, (write, _) in FORMATS.items():
        write(graph, tmp_path / f"net{ending}", metadata)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    (image,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (image.name, image.shape) == ("image", ["batch", 1, 6, 5, 4])
    assert (logits.name, logits.shape) == ("logits", ["batch", 2, 6, 5, 4])
    found = session.get_modelmeta()
    assert found.producer_name == "unet3d"
    assert {key: json.loads(v) for key, v in found.custom_metadata_map.items()} == metadata
    extra = {formats.METADATA_FILE: ""}
    with suppress_output():
        torch.export.load(tmp_path / "net.pt2", extra_files=extra)
    assert json.loads(extra[formats.METADATA_FILE]) == metadata
    with zipfile.ZipFile(tmp_path / "net.pt2") as archive:
        parts = [archive.read(name) for name in archive.namelist()]
    for text in ((tmp_path / "net.onnx").read_bytes(), *parts):
        assert b"site-packages" not in text
        assert b"conv.py" not in text


@torch.library.custom_op("tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Double(nn.Module):
    def forward(self, x):
        return double(x)


def test_a_custom_operator_is_an_error_that_names_it():
    double.register_fake(torch.empty_like)
    with pytest.raises(RunError, match=r"tests\.double"):
        export_program(Double(), (1, 4, 4, 4))
