"""Segmenting whole volumes by windows, in bounded memory, equals segmenting them at once."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from torch import nn

import unet3d as package
from tests.contract.helpers.allocated import AllocatedBytes
from tests.contract.helpers.components import rewrite_checkpoint
from tests.contract.helpers.plain import PlainUNet

PATCH = (16, 16, 16)
SIZE = (37, 20, 25)
MARGIN = 1e-4
"""Logits that are closer may be in another order in other arithmetic."""


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """Train a small network whose labels are not all background; return its folder."""
    words = [*small, "model.width=4", "model.depth=2", "model.prior_bias=false", "logger=none"]
    folder = tmp_path_factory.mktemp("inference") / "run"
    package.train([*words, "trainer.max_steps=2"], folder=folder)
    return folder


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(0).normal(100, 20, SIZE).astype(np.float32)


def load_plain(run):
    """Return the network of a run as plain modules."""
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    network = PlainUNet(1, 4, [4, 8], "instance", 0.01, nn.MaxPool3d(2)).eval()
    state = content["state_dict"].items()
    network.load_state_dict({name.removeprefix("model."): value for name, value in state})
    return network


@torch.no_grad()
def compute_logits(networks, image, overlap=0.5, flips=((),)):
    """Return the mean logits of MONAI's windows over the normalized image."""
    from monai.inferers.utils import sliding_window_inference

    x = torch.from_numpy((image - image.mean()) / image.std())[None, None]
    total = torch.zeros(())
    for network in networks:
        for axes in flips:
            dims = [axis + 2 for axis in axes]
            total = total + sliding_window_inference(
                x,
                PATCH,
                1,
                lambda windows, n=network, d=dims: n(windows.flip(d)).flip(d),
                overlap=overlap,
                mode="gaussian",
            )
    return total[0] / (len(networks) * len(flips))


def assert_labels(labels, logits):
    """Compare labels with the largest logits, except where two are nearly equal."""
    best = logits.topk(2, dim=0)
    clear = (best.values[0] - best.values[1] > MARGIN).numpy()
    expected = best.indices[0].numpy()
    assert labels.dtype == np.uint8
    assert labels.shape == expected.shape
    assert clear.mean() > 0.99
    assert len(np.unique(expected)) > 1
    np.testing.assert_array_equal(labels[clear], expected[clear])


def segment(run, image, **options):
    options = {"device": "cpu", "keep_largest_component": [], **options}
    return package.load(run, **options).predict(image, affine=np.eye(4))


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5])
def test_windows_give_the_labels_of_the_whole_logits(overlap, run, image):
    labels = segment(run, image, overlap=overlap)
    assert_labels(labels, compute_logits([load_plain(run)], image, overlap))


def test_a_volume_smaller_than_a_window_is_segmented(run):
    image = np.random.default_rng(1).normal(size=(9, 16, 11)).astype(np.float32)
    assert_labels(segment(run, image), compute_logits([load_plain(run)], image))


def test_flips_and_ensembles_average_logits(run, image, tmp_path):
    def change(content):
        weight = content["state_dict"]["model.heads.0.weight"]
        content["state_dict"]["model.heads.0.weight"] = weight.roll(1, 0).clone()

    other = rewrite_checkpoint(run / "checkpoints" / "best.ckpt", tmp_path / "other.ckpt", change)
    networks = [load_plain(run), load_plain(run)]
    with torch.no_grad():
        networks[1].heads[0].weight.copy_(networks[0].heads[0].weight.roll(1, 0))
    labels = segment([run, other], image, flip_axes=[0, 2])
    flips = ((), (0,), (2,), (0, 2))
    assert_labels(labels, compute_logits(networks, image, flips=flips))
    assert not np.array_equal(labels, segment(run, image))


def test_the_order_and_the_batch_of_windows_change_nothing(run, image):
    labels = segment(run, image)
    for batch_size in (3, 7):
        np.testing.assert_array_equal(segment(run, image, batch_size=batch_size), labels)
    channels = image[None]
    np.testing.assert_array_equal(segment(run, channels), labels)


def test_the_memory_of_a_volume_is_bounded_and_too_little_of_it_is_one_line(run):
    """The logits of all classes together take 9 MiB; 64 MiB of a budget are for the heap."""
    image = np.random.default_rng(2).normal(size=(128, 64, 72)).astype(np.float32)
    logits = 4 * 4 * image.size
    labels = []
    for memory_gib in (1.0, 67.5 / 1024):
        segmenter = package.load(run, device="cpu", overlap=0.0, memory_gib=memory_gib)
        with AllocatedBytes() as allocated:
            labels.append(segmenter.predict(image, affine=np.eye(4)))
        assert allocated.peak < logits / 2
    np.testing.assert_array_equal(*labels)
    with pytest.raises(RuntimeError, match="memory_gib") as caught:
        package.load(run, device="cpu", memory_gib=0.01).predict(image, affine=np.eye(4))
    assert "\n" not in str(caught.value)


def test_a_constant_network_labels_every_voxel_alike(run, tmp_path):
    def change(content):
        for name, value in content["state_dict"].items():
            value.zero_()
            if name == "model.heads.0.bias":
                value.copy_(torch.tensor([0.0, 1.0, 3.0, 2.0]))

    path = rewrite_checkpoint(run / "checkpoints" / "best.ckpt", tmp_path / "constant.ckpt", change)
    image = np.random.default_rng(3).normal(size=(21, 33, 18))
    assert (segment(path, image, overlap=0.6) == 2).all()
    assert (segment(path, image, overlap=0.6, flip_axes=None) == 2).all()


def test_skipped_background_leaves_bright_voxels_as_they_are(run):
    image = np.random.default_rng(4).normal(100, 10, (48, 20, 20)).astype(np.float32)
    image[24:] = 1 + np.random.default_rng(5).normal(0, 0.01, (24, 20, 20))
    labels, skipped = segment(run, image), segment(run, image, skip_background=0.3)
    np.testing.assert_array_equal(skipped[:24], labels[:24])
    assert (skipped[44:] == 0).all()


def test_the_largest_component_is_kept(run, image):
    from scipy.ndimage import label

    before, after = segment(run, image), segment(run, image, keep_largest_component=["ball"])
    components, count = label(before == 1, np.ones((3, 3, 3)))
    sizes = np.bincount(components.ravel())[1:]
    assert count > 1
    assert np.count_nonzero(after == 1) == sizes.max()
    np.testing.assert_array_equal(after[before != 1], before[before != 1])


def test_the_command_writes_the_labels_and_probabilities_of_python(run, image, unet3d, tmp_path):
    affine = np.diag([1.0, 1.0, 1.0, 1.0])
    (tmp_path / "in").mkdir()
    nibabel.save(nibabel.Nifti1Image(image, affine), tmp_path / "in" / "a.nii.gz")
    ended = unet3d(
        *("predict", f"checkpoint={run}", "input=in", "output=out", "device=cpu"),
        *("save_probabilities=true", "keep_largest_component=none"),
    )
    assert ended.code == 0, ended.err
    written = np.asarray(nibabel.load(tmp_path / "out" / "a.nii.gz").dataobj)
    np.testing.assert_array_equal(written, segment(run, image))
    probabilities = np.asarray(
        nibabel.load(tmp_path / "out" / "probabilities" / "a.nii").dataobj, np.float64
    )
    expected = compute_logits([load_plain(run)], image).softmax(0).movedim(0, -1).numpy()
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)


def test_files_and_folders_are_segmented_from_python(run, image, tmp_path):
    scans = tmp_path / "scans"
    scans.mkdir()
    for name in ("a", "b"):
        nibabel.save(nibabel.Nifti1Image(image, np.eye(4)), scans / f"{name}.nii.gz")
    segmenter = package.load(run, device="cpu", keep_largest_component=[])
    assert segmenter.channels == ("synthetic",)
    assert segmenter.classes == ("background", "ball", "tube", "box")
    labels = segmenter.predict(image, spacing_mm=(1, 1, 1))
    one = segmenter.predict_file(scans / "a.nii.gz", tmp_path / "one.nii")
    files = segmenter.predict_files(scans, tmp_path / "out")
    assert files == [tmp_path / "out" / "a.nii.gz", tmp_path / "out" / "b.nii.gz"]
    for file in (one, *files):
        np.testing.assert_array_equal(np.asarray(nibabel.load(file).dataobj), labels)
    times = [file.stat().st_mtime_ns for file in files]
    segmenter.predict_files(scans, tmp_path / "out")
    assert [file.stat().st_mtime_ns for file in files] == times
    (scans / "b.nii.gz").write_bytes(b"no volume")
    with pytest.raises(ValueError, match=r"1 of 2 scans failed: .*b\.nii\.gz"):
        segmenter.predict_files(scans, tmp_path / "again")
    assert (tmp_path / "again" / "a.nii.gz").exists()


@pytest.fixture(scope="module")
def bundle(run, tmp_path_factory):
    return package.load(run, device="cpu").save(tmp_path_factory.mktemp("bundles") / "shapes")


def test_a_bundle_has_the_labels_of_its_checkpoint_and_weights_without_pickles(bundle, run, image):
    from safetensors.torch import load_file

    labels = package.load(bundle, device="cpu").predict(image, affine=np.eye(4))
    expected = package.load(run, device="cpu").predict(image, affine=np.eye(4))
    np.testing.assert_array_equal(labels, expected)
    content = json.loads((bundle / "bundle.json").read_text())
    assert (content["format"], content["format_version"]) == ("unet3d bundle", 1)
    assert content["pipeline"]["patch_size"] == list(PATCH)
    assert content["pipeline"]["classes"] == ["background", "ball", "tube", "box"]
    weights = load_file(bundle / "models" / "network_0.safetensors")
    for name, value in load_plain(run).state_dict().items():
        assert torch.equal(weights[name], value)
    names = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    assert names >= {
        *("models/network_0.onnx", "models/network_0.pt2", "models/network_0.safetensors"),
        *("configs/inference.json", "configs/metadata.json", "scripts/predict.py"),
        "docs/README.md",
    }


def test_a_bundle_may_not_name_a_class_outside_of_the_allowed_packages(
    bundle, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(bundle, "copy")
    content = json.loads(Path("copy/bundle.json").read_text())
    target = {"_target_": "os.system", "command": "touch executed"}
    content["members"][0]["config"]["model"] = target
    Path("copy/bundle.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="copy"):
        package.load("copy", device="cpu")
    assert not Path("executed").exists()


def test_a_bundle_runs_without_this_package_and_without_torch(bundle, run, image, tmp_path):
    scan = tmp_path / "scan.nii.gz"
    nibabel.save(nibabel.Nifti1Image(image, np.diag([-1.0, 1.0, 1.0, 1.0])), scan)
    code = (
        "import runpy, sys; sys.modules['unet3d'] = sys.modules['torch'] = None; "
        "runpy.run_path('scripts/predict.py', run_name='__main__')"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(scan), str(tmp_path / "out.nii.gz")]
    ended = subprocess.run(command, cwd=bundle, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    written = nibabel.load(tmp_path / "out.nii.gz")
    expected = package.load(run, device="cpu").predict(image, affine=np.diag([-1.0, 1, 1, 1]))
    labels = np.asarray(written.dataobj)
    assert (labels == expected).mean() > 0.999
    np.testing.assert_array_equal(written.affine, nibabel.load(scan).affine)
