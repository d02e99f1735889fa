"""`unet3d.load(...)` segments arrays, files and folders, with files of every released format."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import unet3d
from unet3d.checkpoint_file import FORMAT_VERSION, save_checkpoint
from unet3d.data.formats.volumes import write_labels
from unet3d.data.layouts.scans import ScanFiles
from unet3d.errors import UsageError
from unet3d.export import bundle
from unet3d.inference.ensemble import load_ensemble
from unet3d.inference.scans import plan_outputs

RELEASED = sorted((Path(__file__).parent / "released").iterdir())


def test_every_format_version_has_a_file():
    versions = [int(folder.name) for folder in RELEASED]
    assert versions == list(range(1, FORMAT_VERSION + 1))
    assert bundle.FORMAT_VERSION == FORMAT_VERSION


@pytest.mark.parametrize("folder", RELEASED, ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", ["best.ckpt", "bundle"])
def test_a_released_file_gives_the_logits_that_it_gave(folder, name):
    network = load_ensemble([folder / name]).networks[0]
    logits = network(torch.linspace(-2, 2, 8**3).reshape(1, 1, 8, 8, 8))
    np.testing.assert_allclose(logits, np.load(folder / "logits.npy"), atol=1e-4)


def test_a_checkpoint_of_a_later_version_is_refused(tmp_path):
    content = torch.load(RELEASED[-1] / "best.ckpt", weights_only=True)
    content["unet3d"]["format_version"] = FORMAT_VERSION + 1
    save_checkpoint(content, tmp_path / "later.ckpt")
    with pytest.raises(UsageError, match=rf"has format version {FORMAT_VERSION + 1}, .* upgrade"):
        unet3d.load(tmp_path / "later.ckpt")


def load(**options):
    return unet3d.load(**{"checkpoint": RELEASED[-1] / "best.ckpt", "device": "cpu", **options})


def test_a_printed_segmenter_is_one_line_and_nothing_else_is_printed(capsys):
    segmenter = load(device=torch.device("cpu"), precision="32-true")
    labels = segmenter.predict(np.ones((9, 8, 7)), spacing_mm=(1,) * 3)
    assert labels.shape == (9, 8, 7)
    assert capsys.readouterr() == ("", "")
    text = str(segmenter)
    assert text.startswith("Segmenter: UNet3D, ")
    assert f" parameters on cpu; channels {', '.join(segmenter.channels)}; classes back" in text


@pytest.mark.parametrize("name", ["scan.tif", "scan.ome.zarr", "scan.h5", "scan.npy"])
def test_a_scan_is_not_replaced_by_its_labels(tmp_path, name):
    if name.endswith(("zarr", "h5")):
        pytest.importorskip("zarr" if name.endswith("zarr") else "h5py")
    np.save(tmp_path / "source.npy", np.zeros((9, 8, 7), np.uint8))
    write_labels(tmp_path / name, np.ones((9, 8, 7), np.uint8), tmp_path / "source.npy")
    image = tmp_path / name / "label" if name.endswith("h5") else tmp_path / name
    with pytest.raises(UsageError, match=rf"{name} is the scan itself"):
        load().predict_file(image, tmp_path / name)
    with pytest.raises(UsageError, match=r"is the scan itself|folder of the images"):
        plan_outputs([ScanFiles(name="scan", files=(image,))], image, tmp_path)


def test_a_scan_in_a_larger_store_is_not_replaced_with_it(tmp_path):
    pytest.importorskip("zarr")
    np.save(tmp_path / "source.npy", np.zeros((9, 8, 7), np.uint8))
    write_labels(tmp_path / "a.zarr", np.ones((9, 8, 7), np.uint8), tmp_path / "source.npy")
    store = tmp_path / "several.zarr"
    (tmp_path / "a.zarr").rename(store.with_name("b.zarr"))
    store.mkdir()
    (tmp_path / "b.zarr").rename(store / "0")
    with pytest.raises(UsageError, match=r"several\.zarr holds the scan itself"):
        load().predict_file(store / "0", store)
    assert ScanFiles(name="0", files=(store / "0",)).suffix == ".ome.zarr"


def test_a_segmenter_can_be_sent_to_another_process():
    segmenter, image = load(), np.random.default_rng(0).normal(size=(9, 8, 7))
    sent = pickle.loads(pickle.dumps(segmenter))
    labels = [s.predict(image, spacing_mm=(1, 1, 1)) for s in (segmenter, sent)]
    np.testing.assert_array_equal(*labels)


def test_one_number_is_the_spacing_along_all_axes():
    segmenter, image = load(), np.random.default_rng(0).normal(size=(9, 8, 7))
    labels = [segmenter.predict(image, spacing_mm=mm) for mm in (2.0, np.float32(2), (2, 2, 2))]
    for other in labels[1:]:
        np.testing.assert_array_equal(labels[0], other)


NAN = np.where(np.arange(8) < 2, np.nan, np.zeros((8, 8, 8)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, a: s.predict(a), "needs spacing_mm or affine, one of them"),
        (lambda s, a: s.predict(a, spacing_mm=(1, 1, 0)), "three numbers > 0"),
        (lambda s, a: s.predict(a, spacing_mm=0.0), "three numbers > 0"),
        (lambda s, a: s.predict(a, affine=np.diag([1, 1, 0, 1])), r"an invertible \(4, 4\)"),
        (lambda s, a: s.predict(a, affine=np.eye(3)), r"an invertible \(4, 4\)"),
        (lambda s, a: s.predict(a, affine=np.eye(4) + np.eye(4, k=-3)), r"an invertible \(4, 4\)"),
        (lambda s, a: s.predict(a[0], spacing_mm=(1, 1, 1)), r"is \(D, H, W\) or \(C, D, H, W\)"),
        (lambda s, a: s.predict(np.stack([a, a]), spacing_mm=(1, 1, 1)), "image has 2 channels"),
        (lambda s, a: s.predict(NAN, spacing_mm=(1, 1, 1)), "has 128 voxels that are NaN or inf"),
        (lambda s, a: s.predict_file("missing.nii", "x.nii"), r"missing\.nii is missing"),
        (lambda s, a: s.predict_file(__file__, "x.txt"), r"output must end in \.nii\.gz, \.nii"),
    ],
)
def test_what_cannot_be_segmented_is_named(call, message):
    with pytest.raises(UsageError, match=message):
        call(load(), np.zeros((8, 8, 8), np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": []}, "load needs a checkpoint"),
        ({"device": "tpu"}, "device must be auto, cpu, cuda, cuda:N or mps, got 'tpu'"),
        ({"tta": [3]}, "tta must be .*a list of the axes 0, 1 and 2, got "),
        ({"keep_largest_component": ["x"]}, "keep_largest_component must be some of the classes"),
    ],
)
def test_what_cannot_be_loaded_is_named(options, message):
    with pytest.raises(UsageError, match=message):
        load(**options)
