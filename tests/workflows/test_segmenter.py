"""`unet3d.load(...)` segments arrays, files and folders as `unet3d predict` does."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

import unet3d
from unet3d.__main__ import main
from unet3d.errors import UsageError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a run, and those of its scans and of what the command predicts."""
    folder = tmp_path_factory.mktemp("segmenter")
    words = ["data.layout.size=[20,18,16]", "data.layout.num_cases=5", "data.batch_size=2"]
    words += [f"data.root={folder / 'data'}", f"data.cache={folder / 'cache'}", "model.width=4"]
    words += ["data.patch_size=[16,16,16]", "data.spacing_mm=[1.0,1.0,1.0]", "fold=0"]
    words += ["trainer.max_steps=6", "trainer.accelerator=cpu", "evaluation.enabled=false"]
    assert main(["train", *words, f"hydra.run.dir={folder / 'run'}", "logger=none"]) == 0
    (scans,) = folder.glob("data/*/imagesTr")
    paths = [f"checkpoint={folder / 'run'}", f"input={scans}", f"output={folder / 'labels'}"]
    assert main(["predict", *paths, "device=cpu"]) == 0
    return folder / "run", scans, folder / "labels"


def read(path):
    image = nib.load(path)
    return np.asarray(image.dataobj), image.affine


pytestmark = pytest.mark.slow


def test_arrays_have_the_labels_of_the_command(trained):
    run, scans, labels = trained
    segmenter = unet3d.load(run, device="cpu")
    assert segmenter.classes == ("background", "ball", "tube", "box")
    assert segmenter.channels == ("synthetic",)
    for file in sorted(scans.glob("*.nii.gz"))[:2]:
        array, affine = read(file)
        expected, _ = read(labels / file.name)
        found = segmenter.predict(array, affine=affine)
        assert found.dtype == np.uint8
        assert np.array_equal(found, expected)
        assert np.array_equal(segmenter.predict(array[None], affine=affine), expected)
        spacing = np.linalg.norm(affine[:3, :3], axis=0)
        same = np.allclose(affine[:3, :3], np.diag(spacing))
        assert not same or np.array_equal(segmenter.predict(array, spacing_mm=spacing), expected)


def test_a_printed_segmenter_is_one_line_with_networks_channels_and_classes(trained):
    text = str(unet3d.load(trained[0], device="cpu"))
    assert text.startswith("Segmenter: UNet3D, ")
    assert text.endswith(
        " parameters on cpu; channels synthetic; classes background, ball, tube, box"
    )


@pytest.mark.parametrize("precision", [32, "32-true"])
def test_a_precision_is_a_number_or_lightnings_name_too(trained, precision):
    run, scans, _ = trained
    array, affine = read(sorted(scans.glob("*.nii.gz"))[0])
    segmenters = [
        unet3d.load(run, device=torch.device("cpu"), precision=p) for p in (precision, "32")
    ]
    first, second = (segmenter.predict(array, affine=affine) for segmenter in segmenters)
    assert np.array_equal(first, second)


def test_nothing_is_printed(trained, capsys):
    run, scans, _ = trained
    array, affine = read(sorted(scans.glob("*.nii.gz"))[0])
    unet3d.load(run, device="cpu").predict(array, affine=affine)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, a: s.predict(a), "needs spacing_mm or affine, one of them"),
        (lambda s, a: s.predict(a, spacing_mm=(1, 1, 0)), "three numbers > 0"),
        (lambda s, a: s.predict(a, affine=np.zeros((4, 4))), "an invertible matrix"),
        (lambda s, a: s.predict(a[0], spacing_mm=(1, 1, 1)), r"is \(D, H, W\) or \(C, D, H, W\)"),
        (lambda s, a: s.predict(a[None] * 1j, spacing_mm=(1, 1, 1)), "real numbers"),
        (
            lambda s, a: s.predict(np.stack([a, a]), spacing_mm=(1, 1, 1)),
            "the image has 2 channels",
        ),
        (
            lambda s, a: s.predict(np.where(np.arange(8) < 2, np.nan, a), spacing_mm=(1, 1, 1)),
            "channel synthetic of the image has 128 voxels that are NaN or infinite",
        ),
        (
            lambda s, a: s.predict(a.astype(float) + 1e300, spacing_mm=(1, 1, 1)),
            "channel synthetic of the image has 512 voxels that are NaN or infinite",
        ),
        (lambda s, a: s.predict_file("missing.nii", "x.nii"), "no file missing.nii"),
        (lambda s, a: s.predict_files("missing", "x"), "^no file or folder of scans at .*missing$"),
        (lambda s, a: s.save(Path(__file__).parent), "^.*workflows exists: name a new folder"),
        (
            lambda s, a: s.predict_file(__file__, "x.txt"),
            r"output must end in \.nii\.gz, \.nii, \.nrrd",
        ),
    ],
)
def test_what_cannot_be_segmented_is_named(trained, call, message):
    segmenter = unet3d.load(trained[0], device="cpu")
    with pytest.raises(UsageError, match=message):
        call(segmenter, np.zeros((8, 8, 8), np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": []}, "load needs a checkpoint"),
        ({"device": "tpu"}, "device must be auto, cpu, cuda, cuda:N or mps, got 'tpu'"),
        ({"precision": "8"}, "precision must be one of"),
        ({"flip_axes": [3]}, "flip_axes are of 0, 1 and 2"),
        ({"overlap": 1.0}, r"load needs overlap in \[0, 1\)"),
        ({"keep_largest_component": ["x"]}, "keep_largest_component must be some of the classes"),
    ],
)
def test_what_cannot_be_loaded_is_named(trained, options, message):
    options = {"checkpoint": trained[0], "device": "cpu", **options}
    with pytest.raises((UsageError, OSError), match=message):
        unet3d.load(**options)
