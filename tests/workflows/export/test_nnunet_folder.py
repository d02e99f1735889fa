"""Networks that were exported for nnU-Net, run with nnU-Net's modules."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.config.helpers.configs import SHRUNK
from unet3d.components.network import build_network
from unet3d.errors import UsageError
from unet3d.workflows.export.nnunet_folder import CHECKPOINT, NnUnetSession, write_model_folder
from unet3d.workflows.inference.ensemble import TrainedNetwork

pytest.importorskip("dynamic_network_architectures.architectures.unet")

SIZES = ["model.pool_kernel=[[1,2,2],[2,2,1]]", "model.kernel_size=[[3,1,3],3,3]", "pool=strided"]
NETWORKS = {
    "plain": ["model=unet_nnunet", "model.channels=[4,8,12]", *SIZES],
    "no deep supervision": [
        *("model=unet_nnunet", "model.channels=[4,8,12]", "model.deep_supervision=false", *SIZES),
    ],
    "convolutions": [
        *("model=unet_nnunet", "model.channels=[4,8,8]", "model.convs_per_level=[1,3,2]", *SIZES),
    ],
    "residual": [
        *("model=unet_resenc", "model.channels=[4,8,12]", "model.residual_blocks=[1,2,3]", *SIZES),
        "model.convs_per_level=[2,1,1]",
    ],
    "batch norm": [
        *("model=unet_resenc", "model.channels=[4,8,8]", "model.norm=batch", *SIZES),
        *("model.residual_blocks=1", "model.activation=relu"),
    ],
}


def make_metadata(**options):
    regions = options.pop("regions", None)
    preprocessing = {"num_classes": 3, "spacing_mm": [1.0, 2.0, 3.0], "crop": "nonzero"}
    return {
        "classes": ["background", "a", "b"],
        "channels": ["T1", "T2"],
        "regions": regions,
        "region_labels": None,
        "preprocessing": preprocessing | {"normalize": ["zscore", "ct"]} | options,
        "config": {"data": {"batch_size": 2}, "augmentation": {"flip_p": 0.5}},
        "training_statistics": None,
    }


def build(composed, words, **metadata):
    """Return a network with random norms and statistics, as if it were trained."""
    torch.manual_seed(0)
    network = build_network(composed(*words, "data.in_channels=2", "data.num_classes=3", base=[]))
    for tensor in [*network.parameters(), *network.buffers()]:
        if tensor.dim() == 1:
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    metadata = make_metadata(**metadata)
    return TrainedNetwork(
        path=Path("best.ckpt"), network=network.eval(), metadata=metadata, patch_size=(8, 16, 12)
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_nnunets_network_has_the_same_logits(composed, tmp_path, name):
    trained = build(composed, NETWORKS[name])
    write_model_folder(trained, tmp_path / "model")
    x = torch.randn(2, 2, 8, 16, 12)
    with torch.inference_mode():
        expected = trained.network(x)
    torch.testing.assert_close(NnUnetSession(tmp_path / "model")(x), expected, rtol=1e-4, atol=1e-5)


def test_plans_have_nnunets_order_of_axes(composed, tmp_path):
    trained = build(composed, NETWORKS["plain"], intensities=[[0, 1, 2, 3], [4, 5, 6, 7]])
    write_model_folder(trained, tmp_path / "model")
    plans = json.loads((tmp_path / "model" / "plans.json").read_text())
    sizes = plans["configurations"]["3d_fullres"]
    assert sizes["patch_size"] == [12, 16, 8]
    assert sizes["spacing"] == [3, 2, 1]
    assert sizes["architecture"]["arch_kwargs"]["strides"] == [[1, 1, 1], [2, 2, 1], [1, 2, 2]]
    assert sizes["normalization_schemes"] == ["ZScoreNormalization", "CTNormalization"]
    assert plans["foreground_intensity_properties_per_channel"]["1"]["percentile_99_5"] == 7
    assert plans["image_reader_writer"] == "NibabelIOWithReorient"


@pytest.mark.parametrize(("flipped", "axes"), [([0, 1], (1, 2)), ([2], (0,)), ([], None)])
def test_nnunet_mirrors_the_axes_that_training_flipped(composed, tmp_path, flipped, axes):
    trained = build(composed, NETWORKS["plain"])
    trained = replace(trained, metadata={**trained.metadata, "mirroring_axes": flipped})
    write_model_folder(trained, tmp_path / "model")
    content = torch.load(tmp_path / "model" / CHECKPOINT, weights_only=True)
    assert content["inference_allowed_mirroring_axes"] == axes


def test_regions_and_their_labels_are_those_of_dataset_json(composed, tmp_path):
    trained = build(composed, NETWORKS["plain"], regions={"whole": [1, 2], "core": [2]})
    write_model_folder(trained, tmp_path / "model")
    dataset = json.loads((tmp_path / "model" / "dataset.json").read_text())
    assert dataset["labels"] == {"background": 0, "whole": [1, 2], "core": [2]}
    assert dataset["regions_class_order"] == [1, 2]
    assert dataset["channel_names"] == {"0": "T1", "1": "T2"}


def test_another_orientation_is_said(composed, tmp_path):
    trained = build(composed, NETWORKS["plain"], orientation="LPS")
    assert "files stored in LPS orientation" in write_model_folder(trained, tmp_path / "model")
    plans = json.loads((tmp_path / "model" / "plans.json").read_text())
    assert plans["image_reader_writer"] == "SimpleITKIO"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=dynunet", *SHRUNK["dynunet"]], "DynUNet .use model=unet_nnunet"),
        (["model=unet_tiny"], r"it pools \(use pool=strided\)"),
        (["model=unet_tiny", "pool=strided"], "it interpolates"),
        (["model=unet_tiny", "pool=strided", "model.upsampling=transposed_wide"], "keeps the chan"),
        ([*NETWORKS["plain"], "model.norm=group"], "model.norm=group"),
        ([*NETWORKS["plain"], "model.halve_first_conv=true"], "different widths"),
        ([*NETWORKS["plain"], "model.decoder_channels=finer"], "different widths"),
    ],
)
def test_networks_that_nnunet_does_not_have_are_refused(composed, tmp_path, words, message):
    with pytest.raises(UsageError, match=message):
        write_model_folder(build(composed, words), tmp_path / "model")


@pytest.mark.parametrize(
    ("preprocessing", "message"),
    [
        ({"spacing_mm": None}, "train with data.spacing_mm=median"),
        ({"crop": "none"}, "data.crop=nonzero"),
        ({"background": [-1]}, "data.background=0"),
    ],
)
def test_preprocessing_that_nnunet_does_not_have_is_refused(
    composed, tmp_path, preprocessing, message
):
    with pytest.raises(UsageError, match=message):
        write_model_folder(build(composed, NETWORKS["plain"], **preprocessing), tmp_path / "model")
