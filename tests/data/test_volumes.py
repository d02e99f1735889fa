import nibabel
import numpy as np
import pytest
import torch

from unet3d.data.case import Case
from unet3d.data.preparation import Preparation
from unet3d.data.prepared import prepared
from unet3d.data.volumes import EpochOrder, TrainingPatches, cut, loaders
from unet3d.types import IGNORE, Misuse


def write_case(folder, image, label, name="case", affine=None):
    files = []
    for kind, array in (("image", image), ("label", label)):
        path = folder / f"{name}_{kind}.nii.gz"
        nibabel.save(nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine), path)
        files.append(path)
    return Case(name=name, images=(files[0],), label=files[1])


def noise(*size):
    return np.random.default_rng(0).normal(5, 2, size).astype(np.float32)


def one_volume(tmp_path, size=(12, 10, 8), **settings):
    label = np.zeros(size, np.uint8)
    label[2:4, 2:4, 2:4] = 1
    case = write_case(tmp_path, noise(*size), label)
    return prepared([case], Preparation(num_classes=2, **settings), tmp_path / "cache")[0]


def test_a_prepared_image_has_mean_0_and_deviation_1(tmp_path):
    image = one_volume(tmp_path).image
    assert image.shape == (1, 12, 10, 8)
    assert image.mean() == pytest.approx(0, abs=1e-5)
    assert image.std() == pytest.approx(1, abs=1e-5)


def test_volumes_are_turned_to_one_orientation_and_spacing(tmp_path):
    flipped = np.diag([-1.0, 1, 2, 1])
    label = np.zeros((6, 6, 6), np.uint8)
    label[0] = 1
    case = write_case(tmp_path, noise(6, 6, 6), label, affine=flipped)
    settings = Preparation(num_classes=2, spacing_mm=(1.0, 1.0, 1.0))
    volume = prepared([case], settings, tmp_path / "cache")[0]
    assert volume.label.shape == volume.image.shape[1:] == (6, 6, 12)
    assert volume.label[-1].all()
    assert not volume.label[:-1].any()


def test_a_case_is_prepared_once_until_its_file_or_the_settings_change(tmp_path):
    first = one_volume(tmp_path)
    made = (first.folder / "image.npy").stat().st_mtime_ns
    case = Case(
        name="case",
        images=(tmp_path / "case_image.nii.gz",),
        label=tmp_path / "case_label.nii.gz",
    )
    again = prepared([case], Preparation(num_classes=2), tmp_path / "cache")[0]
    assert (again.folder / "image.npy").stat().st_mtime_ns == made
    other = prepared([case], Preparation(num_classes=3), tmp_path / "cache")[0]
    assert other.folder != first.folder
    changed = write_case(tmp_path, noise(12, 10, 8) * 2, np.zeros((12, 10, 8), np.uint8))
    assert prepared([changed], Preparation(num_classes=2), tmp_path / "cache")[0] != first


def test_labels_to_ignore_are_told_apart_from_classes(tmp_path):
    label = np.zeros((8, 8, 8), np.int16)
    label[0] = -1
    case = write_case(tmp_path, noise(8, 8, 8), label)
    settings = Preparation(num_classes=2, ignore_label=-1)
    volume = prepared([case], settings, tmp_path / "cache")[0]
    assert (volume.label[0] == IGNORE).all()
    assert not volume.label[1:].any()
    assert len(volume.places) == 0


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (np.full((8, 8, 8), 2, np.int16), r"labels must be 0\.\.1, it holds 2"),
        (np.full((8, 8, 8), -2, np.int16), "it holds -2"),
        (np.full((8, 8, 8), 0.5, np.float32), "it holds 0.5"),
        (np.zeros((8, 8, 4), np.int16), r"has shape \[8, 8, 4\] and its image \[8, 8, 8\]"),
        (np.zeros((8, 8, 8, 2), np.int16), "one label per voxel"),
        (np.zeros((8, 8), np.int16), "must be a 3D volume"),
    ],
)
def test_a_faulty_label_is_named_with_its_file(tmp_path, label, said):
    case = write_case(tmp_path, noise(8, 8, 8), label)
    with pytest.raises(Misuse, match=said) as caught:
        prepared([case], Preparation(num_classes=2), tmp_path / "cache")
    assert "case_label.nii.gz" in str(caught.value)


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    case = write_case(tmp_path, noise(8, 8, 8), np.zeros((8, 8, 8), np.int16))
    whole = case.images[0].read_bytes()
    case.images[0].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Misuse, match=r"case_image.nii.gz cannot be read"):
        prepared([case], Preparation(num_classes=2), tmp_path / "cache")
    case.images[0].unlink()
    with pytest.raises(Misuse, match=r"case_image.nii.gz is missing"):
        prepared([case], Preparation(num_classes=2), tmp_path / "cache")


def test_nan_in_an_image_is_refused(tmp_path):
    image = noise(8, 8, 8)
    image[0, 0, 0] = np.nan
    case = write_case(tmp_path, image, np.zeros((8, 8, 8), np.int16))
    with pytest.raises(Misuse, match="NaN"):
        prepared([case], Preparation(num_classes=2), tmp_path / "cache")


@pytest.mark.parametrize(
    "bad",
    [
        {"num_classes": 1},
        {"normalize": ("max",)},
        {"crop": "some"},
        {"orientation": "RAX"},
        {"ignore_label": 1},
        {"spacing_mm": (1.0, 0.0, 1.0)},
    ],
)
def test_settings_that_make_no_sense_are_refused(bad):
    with pytest.raises(Misuse, match=r"data\."):
        Preparation(**{"num_classes": 2, **bad})


def patches(volume, **choices):
    settings = {"patch_size": [8, 8, 8], "foreground_share": 0.0, "augment": "none", "seed": 0}
    return TrainingPatches([volume], **{**settings, **choices})


def test_a_patch_depends_on_seed_epoch_and_number_alone(tmp_path):
    volume = one_volume(tmp_path)
    one, other = patches(volume, augment="light"), patches(volume, augment="light")
    other[(3, 4)]  # what was drawn before does not matter
    assert one[(0, 1)]["image"].equal(other[(0, 1)]["image"])
    assert not one[(0, 1)]["image"].equal(one[(1, 1)]["image"])
    assert not one[(0, 1)]["image"].equal(patches(volume, augment="light", seed=1)[(0, 1)]["image"])


def test_a_foreground_patch_holds_foreground(tmp_path):
    volume = one_volume(tmp_path, size=(40, 40, 40))
    always = patches(volume, foreground_share=1.0)
    assert all(always[(0, n)]["label"].any() for n in range(20))


def test_a_patch_larger_than_the_volume_is_padded_on_both_sides(tmp_path):
    volume = one_volume(tmp_path)
    sample = patches(volume, patch_size=[16, 10, 8])[(0, 0)]
    assert sample["image"].shape == (1, 16, 10, 8)
    assert sample["image"][0, 2:14].equal(torch.from_numpy(np.array(volume.image[0])))
    assert sample["image"][:, :2].abs().max() == sample["image"][:, 14:].abs().max() == 0


def test_what_lies_outside_is_zero():
    assert cut(np.ones((2, 2, 2)), [-1, 0, 1], [2, 2, 2])[..., 0].tolist() == [[0, 0], [1, 1]]


def test_samples_are_plain_tensors_for_the_network(tmp_path):
    sample = patches(one_volume(tmp_path), augment="light")[(0, 0)]
    assert type(sample["image"]) is torch.Tensor
    assert (sample["image"].dtype, sample["label"].dtype) == (torch.float32, torch.uint8)


def test_an_epoch_has_whole_batches_and_every_case():
    order = EpochOrder(5, batch_size=4, seed=0)
    first = list(order)
    assert len(first) == len(order) == 8
    assert {n for _, n in first} == set(range(8))
    order.set_epoch(1)
    assert [n for _, n in order] != [n for _, n in first]


@pytest.mark.parametrize(
    "bad",
    [
        {"batch_size": 0},
        {"num_workers": -1},
        {"patches_per_case": 0},
        {"patch_size": [8, 8]},
        {"patch_size": [8, 0, 8]},
        {"foreground_share": 2.0},
        {"augment": "much"},
    ],
)
def test_a_loader_that_cannot_be_is_refused(tmp_path, bad):
    settings = {
        "patch_size": [8, 8, 8],
        "batch_size": 2,
        "patches_per_case": 1,
        "foreground_share": 0.5,
        "augment": "light",
        "num_workers": 0,
        "pin_memory": False,
        "seed": 0,
    }
    with pytest.raises(Misuse, match="data"):
        loaders([one_volume(tmp_path)], [], **{**settings, **bad})
