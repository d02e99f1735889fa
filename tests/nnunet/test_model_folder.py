"""Networks that were exported for nnU-Net, run with nnU-Net's modules."""

import json
from pathlib import Path

import pytest
import torch

from unet3d.errors import UsageError
from unet3d.inference.ensemble import TrainedNetwork
from unet3d.inference.label_writer import AxisInterpolator
from unet3d.nnunet.model_folder import CHECKPOINT, load_model_folder, write_model_folder
from unet3d.step.build import build_network

pytest.importorskip("dynamic_network_architectures.architectures.unet")

SIZES = ["model.channels=[4,8,12,12]", "model.pool_kernel=[[1,2,2],[2,2,1],[1,1,2]]"]
SIZES += ["model.kernel_size=[[3,1,3],3,3,3]", "pool=strided"]
PLAIN = ["model=unet_nnunet", *SIZES]
RESIDUAL = ["model=unet_resenc", *SIZES]
NETWORKS = {
    "plain": PLAIN,
    "no deep supervision": [*PLAIN, "model.deep_supervision=false"],
    "convolutions": [*PLAIN, "model.convs_per_level=[1,3,2,2]"],
    "residual": [*RESIDUAL, "model.residual_blocks=[1,2,3]", "model.convs_per_level=[2,1,1,1]"],
    "norm": [*RESIDUAL, "model.norm=batch", "model.residual_blocks=1", "model.activation=relu"],
}


@pytest.fixture
def build(composed):
    """Make a network with random norms and statistics, as if it were trained."""

    def build_network_of(words=PLAIN, regions=None, mirroring_axes=None, **preprocessing):
        torch.manual_seed(0)
        sizes = ["data.in_channels=2", "data.num_classes=3"]
        network = build_network(composed(*words, *sizes, base=[]).step)
        for tensor in [*network.parameters(), *network.buffers()]:
            if tensor.dim() == 1:
                torch.nn.init.uniform_(tensor, 0.5, 1.5)
        defaults = {"num_classes": 3, "spacing_mm": [1.0, 2.0, 3.0], "crop": "nonzero"}
        metadata = {
            "classes": ["background", "a", "b"],
            "channels": ["T1", "T2"],
            "regions": regions,
            "region_labels": None,
            "preprocessing": defaults | {"normalize": ["zscore", "ct"]} | preprocessing,
            "config": {"data": {"batch_size": 2}, "augmentation": {"flip_p": 0.5}},
            "training_statistics": None,
            "mirroring_axes": mirroring_axes,
        }
        return TrainedNetwork(
            path=Path("best.ckpt"),
            network=network.eval(),
            metadata=metadata,
            patch_size=(8, 16, 12),
        )

    return build_network_of


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("name", NETWORKS)
def test_nnunets_network_has_the_same_logits(build, tmp_path, name):
    trained = build(NETWORKS[name])
    write_model_folder(trained, tmp_path / "model")
    x = torch.randn(2, 2, 8, 16, 12)
    with torch.inference_mode():
        expected = trained.network(x)
    network = load_model_folder(tmp_path / "model")
    torch.testing.assert_close(network(x), expected, rtol=1e-4, atol=1e-5)


def test_plans_have_nnunets_order_of_axes(build, tmp_path):
    write_model_folder(build(intensities=[[0, 1, 2, 3], [4, 5, 6, 7]]), tmp_path / "model")
    plans = read(tmp_path / "model", "plans")
    sizes = plans["configurations"]["3d_fullres"]
    assert sizes["patch_size"] == [12, 16, 8]
    assert sizes["spacing"] == [3, 2, 1]
    strides = sizes["architecture"]["arch_kwargs"]["strides"]
    assert strides == [[1, 1, 1], [2, 2, 1], [1, 2, 2], [2, 1, 1]]
    assert sizes["normalization_schemes"] == ["ZScoreNormalization", "CTNormalization"]
    assert plans["foreground_intensity_properties_per_channel"]["1"]["percentile_99_5"] == 7
    assert plans["image_reader_writer"] == "NibabelIOWithReorient"


def test_nnunet_interpolates_the_logits_of_thick_slices(build, tmp_path):
    resampling = pytest.importorskip("nnunetv2.preprocessing.resampling.default_resampling")
    write_model_folder(build(spacing_mm=[1.0, 1.0, 4.0]), tmp_path / "model")
    sizes = read(tmp_path / "model", "plans")["configurations"]["3d_fullres"]
    logits, new = torch.randn(1, 5, 6, 7), (9, 8, 9)
    got = getattr(resampling, sizes["resampling_fn_probabilities"])(
        logits.numpy(),
        new,
        (4, 1, 1),
        (2.2, 0.75, 0.78),
        **sizes["resampling_fn_probabilities_kwargs"],
    )
    expected = logits
    for axis, size in enumerate(new, start=1):  # as unet3d predict
        interpolator = AxisInterpolator(logits.shape[axis], size, logits.device)
        expected = interpolator.interpolate(expected, axis, range(size), 0)
    torch.testing.assert_close(torch.as_tensor(got), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_nnunet_mirrors_the_axes_that_training_flipped(build, tmp_path):
    for n, (flipped, axes) in enumerate((([0, 1], (1, 2)), ([2], (0,)), ([], None))):
        write_model_folder(build(mirroring_axes=flipped), tmp_path / str(n))
        content = torch.load(tmp_path / str(n) / CHECKPOINT, weights_only=True)
        assert content["inference_allowed_mirroring_axes"] == axes


def test_regions_and_the_orientation_of_files_are_said(build, tmp_path):
    trained = build(regions={"whole": [1, 2], "core": [2]}, orientation="LPS")
    said = write_model_folder(trained, tmp_path / "model")
    assert ".nii.gz files (`file_ending` in dataset.json) stored in LPS orientation" in said
    assert read(tmp_path / "model", "plans")["image_reader_writer"] == "SimpleITKIO"
    dataset = read(tmp_path / "model", "dataset")
    assert dataset["labels"] == {"background": 0, "whole": [1, 2], "core": [2]}
    assert dataset["regions_class_order"] == [1, 2]
    assert dataset["channel_names"] == {"0": "T1", "1": "T2"}


def test_how_nnunet_normalizes_with_a_mask_is_said(build, tmp_path):
    trained = build(normalize=["zscore_nonzero", "zscore"])
    assert "where any channel is not 0" in write_model_folder(trained, tmp_path / "a")
    assert "any channel" not in write_model_folder(build(), tmp_path / "b")


def test_that_nnunet_keeps_all_components_is_said(build, tmp_path):
    trained = build()
    trained.metadata["keep_largest_component"] = ["a"]
    said = write_model_folder(trained, tmp_path / "a")
    assert "; it keeps all components of a, `unet3d predict` the largest" in said
    assert "components" not in write_model_folder(build(), tmp_path / "b")


WIDE = ["model=unet_tiny", "pool=strided", "model.upsampling=transposed_wide"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"words": ["model=unet_tiny"]}, r"it pools \(use pool=strided\)"),
        ({"words": WIDE[:2]}, "it interpolates"),
        ({"words": WIDE}, "keeps the chan"),
        ({"words": [*PLAIN, "model.norm=group"]}, "model.norm=group"),
        ({"words": [*PLAIN, "model.halve_first_conv=true"]}, "different widths"),
        ({"spacing_mm": None}, "train with data.spacing_mm=median"),
        ({"crop": "none"}, "data.crop=nonzero"),
        ({"background": [-1]}, "data.background=0"),
    ],
)
def test_what_nnunet_does_not_have_is_refused(build, tmp_path, changes, message):
    with pytest.raises(UsageError, match=message):
        write_model_folder(build(**changes), tmp_path / "model")
