"""experiment=nnUNetPlans.json trains what nnU-Net has planned."""

import json
import shutil

import nibabel as nib
import numpy as np
import pytest

from tests.contract.test_nnunet import NAME, plans  # noqa: F401  (a fixture)
from unet3d.config.compose import compose_config
from unet3d.errors import UsageError
from unet3d.nnunet.plans import expand_plans, read_plans
from unet3d.training.config import parse_train_config


@pytest.fixture
def path(plans):  # noqa: F811
    return plans


def read_settings(path, *overrides):
    words = [*read_plans(path, "3d_fullres", None), *overrides]
    return parse_train_config(compose_config(words, "train"))


def change(path, **values):
    """Replace values of the plans, whose keys are joined by two underscores."""
    content = json.loads(path.read_text())
    for key, value in values.items():
        *parents, last = key.split("__")
        part = content
        for parent in parents:
            part = part[parent]
        part[last] = value
    path.write_text(json.dumps(content))


SIZES = "configurations__3d_fullres__"
NETWORK = f"{SIZES}architecture__arch_kwargs__"


@pytest.mark.slow
def test_patches_and_folds_are_those_of_nnunet(path, tmp_path):
    thin = {f"{SIZES}patch_size": [4, 16, 16], f"{SIZES}use_mask_for_norm": [True, False]}
    change(path, **thin)
    settings = read_settings(path)
    assert settings.augmentation.arguments["rotation_degrees"] == [180, 180, 180]
    data = settings.data
    assert data.normalize == ("zscore_nonzero", "ct")
    assert data.splits == tmp_path / "nnUNet_preprocessed" / NAME / "splits_final.json"
    assert data.patches_per_case == 188  # 4 training cases, 250 steps of 3 patches
    assert data.foreground_fraction == pytest.approx(1 / 3, abs=1e-3)
    overrides = read_plans(path, "3d_fullres", None)
    assert {"trainer.max_steps=250000", "trainer.check_val_every_n_epoch=20"} <= {*overrides}


def test_background_stays_0_and_regions_weigh_as_in_nnunet(path):
    words = {*read_plans(path, "3d_fullres", None)}
    assert not {word for word in words if word.startswith(("augmentation.keep", "loss.ce"))}
    change(path, **{f"{SIZES}use_mask_for_norm": [True, False]})
    dataset = path.with_name("dataset.json")
    change(dataset, labels={"background": 0, "whole": [1, 2], "core": 2, "ignore": 3})
    assert {"augmentation.keep_zeros=true", "loss.ce=2"} <= {*read_plans(path, "3d_fullres", None)}


@pytest.mark.slow
def test_another_dataset_has_its_own_regions_cases_and_folds(path, tmp_path):
    raw, other = tmp_path / "nnUNet_raw" / NAME, tmp_path / "nnUNet_raw" / "Dataset900_Other"
    shutil.copytree(raw, other)
    content = json.loads((other / "dataset.json").read_text())
    content["labels"] = {"background": 0, "whole": [1, 2], "core": 2, "ignore": 3}
    content |= {"regions_class_order": [1, 2], "numTraining": 50}
    (other / "dataset.json").write_text(json.dumps(content))
    roots = raw / "imagesTr" / "..", other
    own, words = ({*read_plans(path, "3d_fullres", root)} for root in roots)
    assert {"loss.ce=2", "data.patches_per_case=19", f"data.root={other}"} <= words
    assert [any(w.startswith("data.splits=") for w in given) for given in (own, words)] == [1, 0]
    assert "data.patches_per_case=188" in own


def test_volumes_have_the_axes_that_the_reader_of_nnunet_gives_them(path, tmp_path):
    change(path, transpose_forward=[1, 0, 2])  # is undone
    data = read_settings(path).data
    assert (data.patch_size, data.spacing_mm) == ((12, 8, 16), (2, 3, 1))
    raw = tmp_path / "nnUNet_raw" / NAME / "imagesTr" / "case_0_0000.nii.gz"
    assert read_settings(path).data.orientation == "RAS"
    voxels = np.asarray(nib.nifti1.load(raw).dataobj)
    nib.save(nib.Nifti1Image(voxels, np.diag([-1.0, -1, 1, 1])), raw)
    for reader, orientation in (("SimpleITKIO", "LPS"), ("NibabelIOWithReorient", "RAS")):
        change(path, image_reader_writer=reader)
        assert read_settings(path).data.orientation == orientation
    change(path, image_reader_writer="Tiff3DIO")
    with pytest.raises(UsageError, match=r"^[^ ]+: nnU-Net's reader Tiff3DIO"):
        read_plans(path, "3d_fullres", None)


def test_a_residual_network_has_the_blocks_and_convolutions_of_nnunet(path):
    kind = "dynamic_network_architectures.architectures.unet.ResidualEncoderUNet"
    change(path, **{f"{SIZES}architecture__network_class_name": kind})
    blocks, convs = f"{NETWORK}n_blocks_per_stage", f"{NETWORK}n_conv_per_stage_decoder"
    change(path, **{blocks: [1, 2, 2], convs: [1, 2]})
    model = {"model=unet_resenc", "model.residual_blocks=[1,2,2]", "model.convs_per_level=[2,1,1]"}
    assert model <= {*read_plans(path, "3d_fullres", None)}


def test_a_network_of_three_stages_is_built_without_deep_supervision(path):
    network = read_settings(path).step.network.bind(in_channels=1, num_outputs=2).build()
    assert len(network.list_heads()) == 1  # nnU-Net has a second one, of weight 0


def test_a_configuration_inherits_and_the_command_line_wins(path):
    lines = []
    words = ["data.batch_size=7", f"experiment={path}:3d_lowres", "data.root=/elsewhere"]
    with pytest.raises(UsageError, match="/elsewhere"):
        expand_plans(words, lines.append)
    data = parse_train_config(compose_config(expand_plans(words[:2], lines.append), "train")).data
    assert (data.batch_size, data.patch_size, data.spacing_mm) == (7, (12, 16, 8), (4, 2, 6))
    assert lines[0] == f"{path} sets these options:"


def test_an_estimate_needs_no_raw_dataset(path, tmp_path, monkeypatch):
    (tmp_path / "nnUNet_raw").rename(tmp_path / "moved")
    data = read_settings(path).data
    assert (data.root, data.in_channels, data.num_classes) == (None, 2, 3)
    monkeypatch.setenv("nnUNet_raw", str(tmp_path / "moved"))
    assert read_settings(path).data.root == tmp_path / "moved" / NAME


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (f"{SIZES}normalization_schemes", ["MyNormalization"] * 2, "MyNormalization is"),
        (f"{SIZES}architecture__network_class_name", "a.Primus", "Primus is not available"),
        (f"{NETWORK}dropout_op", "torch.nn.Dropout3d", "is not available"),
        (f"{NETWORK}n_conv_per_stage", [1, 2, 2], "in the decoder, are not"),
        (f"{NETWORK}strides", [[2, 1, 1], [1, 2, 2], [2, 2, 2]], "a stride in the first stage"),
        (f"{NETWORK}conv_bias", False, "with conv_bias=False is not avail"),
        (f"{NETWORK}stem_channels", 4, "with stem_channels=4 is not avail"),
        (f"{NETWORK}block", "a.BottleneckD", "with block=a.BottleneckD is not avail"),
        (f"{SIZES}resampling_fn_data", "resample_torch_fornnunet", "with resample_torch_for"),
        (f"{SIZES}resampling_fn_data_kwargs", {"order": 1}, "order=1 is not available here"),
        (f"{SIZES}resampling_fn_seg_kwargs", {"order": 0}, "order=0 is not available here"),
        (f"{SIZES}resampling_fn_probabilities", "other", "with other is not available here"),
        (f"{SIZES}preprocessor_name", "Mine", "Mine with resample_data_or_seg_to_shape is not"),
        ("configurations__3d_fullres", {"patch_size": [8]}, "KeyError: .* plan again with"),
        ("configurations", {"2d": {}}, "3d_fullres cannot be trained here, use one of none"),
        ("configurations", None, "has no configurations"),
    ],
)
def test_plans_that_cannot_be_trained_here_are_refused(path, key, value, message):
    change(path, **{key: value})
    with pytest.raises(UsageError, match=message):
        read_plans(path, "3d_fullres", None)


def test_plans_without_resampling_keep_the_spacing_of_each_scan(path):
    kinds = ("data", "seg", "probabilities")
    change(path, **{f"{SIZES}resampling_fn_{kind}": "no_resampling_hack" for kind in kinds})
    assert read_settings(path).data.spacing_mm is None


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=a.json", "experiment=b.json"],
        ["experiment=hippocampus", "experiment=a.json"],
        ["+experiment=a.json"],
    ],
)
def test_plans_are_one_file_and_no_other_experiment(words):
    with pytest.raises(UsageError, match="one file and no other experiment, got"):
        expand_plans(words, print)
