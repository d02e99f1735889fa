"""experiment=nnUNetPlans.json trains what nnU-Net has planned."""

import json
import pydoc

import nibabel as nib
import numpy as np
import pytest

from tests.workflows.nnunet.helpers.plans import NAME, write_plans
from unet3d.__main__ import main
from unet3d.components.network import build_network
from unet3d.config.compose import compose_config
from unet3d.config.settings.training import parse_training
from unet3d.errors import UsageError
from unet3d.workflows.nnunet.plans import expand_plans, read_plans


def read_settings(path, *overrides, configuration="3d_fullres"):
    return parse_training(
        compose_config([*read_plans(path, configuration, None), *overrides], "train")
    )


def test_patches_spacing_and_normalization_are_those_of_the_plans(tmp_path):
    data = read_settings(write_plans(tmp_path)).data
    assert data.patch_size == (12, 16, 8)  # SimpleITK reads axes in reverse
    assert data.spacing_mm == (2, 1, 3)
    assert data.batch_size == 3
    assert data.normalize == ("zscore_nonzero", "ct")
    assert data.root == tmp_path / "nnUNet_raw" / NAME
    assert data.splits == tmp_path / "nnUNet_preprocessed" / NAME / "splits_final.json"
    assert data.patches_per_case == 188  # 4 training cases, 250 steps of 3 patches


def test_volumes_keep_the_axes_of_the_files_as_in_nnunet(tmp_path):
    path = write_plans(tmp_path)
    raw = tmp_path / "nnUNet_raw" / NAME / "imagesTr" / "case_00_0000.nii.gz"
    image = nib.nifti1.load(raw)
    assert read_settings(path).data.orientation == "".join(nib.aff2axcodes(image.affine))
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj), np.diag([-1.0, -1, 1, 1])), raw)
    assert read_settings(path).data.orientation == "LPS"


def test_a_transposition_of_nnunet_is_undone(tmp_path):
    data = read_settings(write_plans(tmp_path, transpose=[1, 0, 2])).data
    assert data.patch_size == (12, 8, 16)
    assert data.spacing_mm == (2, 3, 1)


@pytest.mark.parametrize("residual", [False, True])
def test_the_network_has_nnunets_weights(tmp_path, residual):
    unet = pytest.importorskip("dynamic_network_architectures.architectures.unet")

    def change(sizes):
        if residual:
            architecture = sizes["architecture"]
            name = architecture["network_class_name"]
            architecture["network_class_name"] = name.replace("PlainConv", "ResidualEncoder")
            architecture["arch_kwargs"]["n_blocks_per_stage"] = [1, 2, 2]
            architecture["arch_kwargs"]["n_conv_per_stage_decoder"] = [1, 2]
            del architecture["arch_kwargs"]["n_conv_per_stage"]

    path = write_plans(tmp_path, change=change)
    plans = json.loads(path.read_text())["configurations"]["3d_fullres"]["architecture"]
    options = {
        key: pydoc.locate(value) if str(value).startswith("torch.") else value
        for key, value in plans["arch_kwargs"].items()
    }
    kind = getattr(unet, plans["network_class_name"].rpartition(".")[2])
    theirs = kind(input_channels=2, num_classes=3, deep_supervision=True, **options)
    settings = read_settings(path, "data.in_channels=2", "data.num_classes=3")
    ours = build_network(settings)
    unused = sum(p.numel() for p in theirs.decoder.seg_layers[0].parameters())  # coarsest head
    count = sum(p.numel() for p in theirs.parameters()) - unused
    assert sum(p.numel() for p in ours.parameters()) == count


def test_a_configuration_can_be_named_and_inherits(tmp_path):
    data = read_settings(write_plans(tmp_path), configuration="3d_lowres").data
    assert data.spacing_mm == (4, 2, 6)
    assert data.patch_size == (12, 16, 8)


def test_the_command_line_wins_over_the_plans(tmp_path, capsys):
    path = write_plans(tmp_path)
    words = ["data.batch_size=7", f"experiment={path}:3d_lowres", "data.root=/elsewhere"]
    with pytest.raises(UsageError, match="/elsewhere"):
        expand_plans(words, print)
    settings = parse_training(compose_config(expand_plans(words[:2], print), "train"))
    assert settings.data.batch_size == 7
    assert settings.data.spacing_mm == (4, 2, 6)
    assert "stands for" in capsys.readouterr().out


def test_an_estimate_needs_no_raw_dataset(tmp_path, monkeypatch):
    path = write_plans(tmp_path)
    (tmp_path / "nnUNet_raw").rename(tmp_path / "moved")
    data = read_settings(path).data
    assert (data.root, data.in_channels, data.num_classes) == (None, 2, 3)
    monkeypatch.setenv("nnUNet_raw", str(tmp_path / "moved"))
    assert read_settings(path).data.root == tmp_path / "moved" / NAME


def edit(key, value):
    def change(sizes):
        *parents, last = key.split(".")
        for parent in parents:
            sizes = sizes[parent]
        sizes[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("normalization_schemes", ["RGBTo01Normalization"] * 2), "RGBTo01Normalization is"),
        (edit("architecture.network_class_name", "a.Primus"), "Primus .* is not available"),
        (edit("architecture.arch_kwargs.dropout_op", "torch.nn.Dropout3d"), "is not available"),
        (edit("architecture.arch_kwargs.n_conv_per_stage", [1, 2, 2]), "in the decoder, are not"),
        (edit("architecture.arch_kwargs.conv_bias", False), "with conv_bias=False is not avail"),
        (edit("architecture.arch_kwargs.norm_op_kwargs", {"eps": 1}), "with norm_op_kwargs={'eps"),
        (lambda sizes: sizes.pop("architecture"), "is of an nnU-Net before 2.2"),
        (edit("patch_size", [8, 8]), "does not describe 3d_fullres .* IndexError"),
        (edit("spacing", None), "does not describe 3d_fullres .* TypeError"),
    ],
)
def test_plans_that_cannot_be_trained_here_are_refused(tmp_path, change, message):
    with pytest.raises(UsageError, match=message):
        read_plans(write_plans(tmp_path, change=change), "3d_fullres", None)


@pytest.mark.parametrize(
    ("configuration", "message"),
    [(":2d", "2d cannot be trained here, use one of 3d_fullres, 3d_lowres"), (":x", "x cannot")],
)
def test_another_configuration_is_refused_in_one_line(tmp_path, capsys, configuration, message):
    path = write_plans(tmp_path)
    assert main(["memory", f"experiment={path}{configuration}"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_file_that_holds_no_plans_is_refused(tmp_path, capsys, content):
    path = tmp_path / "plans.json"
    assert main(["memory", f"experiment={path}"]) == 2
    path.write_text(content)
    assert main(["memory", f"experiment={path}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=a.json", "experiment=b.json"],
        ["experiment=hippocampus", "experiment=a.json"],
        ["-m", "experiment=a.json,b.json"],
        ["+experiment=a.json"],
    ],
)
def test_plans_are_one_file_and_no_other_experiment(words, capsys):
    assert main(["memory", *words]) == 2
    error = capsys.readouterr().err
    assert "one file and no other experiment, got" in error
    assert len(error.splitlines()) == 1


def test_a_reader_that_reorients_has_its_own_orientation(tmp_path):
    path = write_plans(tmp_path)
    raw = tmp_path / "nnUNet_raw" / NAME / "imagesTr" / "case_00_0000.nii.gz"
    image = np.asarray(nib.nifti1.load(raw).dataobj)
    nib.save(nib.Nifti1Image(image, np.diag([-1.0, -1, 1, 1])), raw)
    plans = json.loads(path.read_text())
    for reader, orientation in (("SimpleITKIO", "LPS"), ("NibabelIOWithReorient", "RAS")):
        path.write_text(json.dumps(plans | {"image_reader_writer": reader}))
        assert read_settings(path).data.orientation == orientation
    path.write_text(json.dumps(plans | {"image_reader_writer": "Tiff3DIO"}))
    with pytest.raises(UsageError, match=r"^[^ ]+: nnU-Net's reader Tiff3DIO"):
        read_plans(path, "3d_fullres", None)


def test_thin_patches_rotate_by_180_degrees_and_half_of_a_batch_is_foreground(tmp_path):
    thin = edit("patch_size", [4, 16, 16])
    settings = read_settings(write_plans(tmp_path, change=thin), "data.batch_size=2")
    assert settings.augmentation.arguments["rotation_degrees"] == [180, 180, 180]
    assert settings.data.foreground_fraction == pytest.approx(1 / 3, abs=1e-3)  # of 3 patches


def test_a_run_trains_with_one_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write_plans(tmp_path, change=edit("normalization_schemes", ["ZScoreNormalization"] * 2))
    short = ["trainer.max_steps=1", "data.patches_per_case=1", "trainer.check_val_every_n_epoch=1"]
    assert main(["train", f"experiment={path}", *short, "trainer.accelerator=cpu"]) == 0
    assert "3 cases for training, 2 cases for validation" in capsys.readouterr().out
